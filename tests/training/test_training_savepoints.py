"""Which checkpoints stay."""

from __future__ import annotations

from pathlib import Path
from shutil import copytree
from typing import Any

import pytest

from trinity_core.addresses import rendezvous
from trinity_core.checkpoints.resume import other_beginning
from trinity_core.tracking import MetricsFile
from trinity_core.training.distributed import join
from trinity_core.training.learner import Learner
from trinity_core.training.savepoints import Savepoints

pytestmark = pytest.mark.slow


def test_best_checkpoint_by_eval_is_kept(make_config: Any, tmp_path: Path) -> None:
    ranks = join(0, 1, *rendezvous(), use_gpu=False)
    config = make_config(trainer__max_checkpoints_to_keep=2, trainer__save_hf_checkpoint="last")
    learner = Learner(config, 4, ranks)
    savepoints = Savepoints(config, ranks, learner.engine.module.lm)
    scores = MetricsFile(config.job_dir, "eval")
    for step, accuracy in enumerate((0.1, 0.7, 0.3, 0.7, 0.2), start=1):
        savepoints.save(learner, step, None, last=step == 5)
        scores.write(step, {"eval/test/accuracy": accuracy})
    assert savepoints.layout.steps() == [2, 4, 5]
    folders = {step: savepoints.layout.step(step) / "actor" / "huggingface" for step in (2, 4, 5)}
    assert [step for step, folder in folders.items() if list(folder.glob("*.safetensors"))] == [5]
    assert other_beginning(config.job_dir, config.model.model_path) is None
    assert other_beginning(config.job_dir, "another") == config.model.model_path

    first = config.model.model_path
    config = config.with_values({"model.model_path": str(copytree(first, tmp_path / "another"))})
    later = Savepoints(config, ranks, learner.engine.module.lm)
    later.load(learner, 5)
    later.save(learner, 6, None)
    assert other_beginning(config.job_dir, config.model.model_path) == first, "it still is the one of step 0"
