"""What a run loses costs it no step: a hanging engine, a dead trainer, also after the explorer has finished."""

from __future__ import annotations

import os
import signal
import sys
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import yaml
from ray import cloudpickle

from trinity_core.checkpoints.huggingface import weights_digest
from trinity_core.data.tiny import TinyFolders
from trinity_core.runtime.configuration import load_checked
from trinity_core.runtime.pipeline import early_cluster
from trinity_core.runtime.run import explore, train
from trinity_core.runtime.session import open_session
from trinity_core.runtime.stage import resolve_stage
from trinity_core.runtime.summary import summarise
from trinity_core.runtime.together import run_together
from trinity_core.tracking import read_metrics

pytestmark = [pytest.mark.slow, pytest.mark.timeout(600)]

STEPS, SAVE_INTERVAL = 5, 3
DIES_AFTER = (2, 5)
"""Before the first checkpoint; and when nothing is left to explore, until the trainer is back at step 3."""

STOPPING = '''
import os, signal
from pathlib import Path

import psutil

from trinity_core.workflows import WORKFLOWS
from trinity_core.workflows.builtin import MathWorkflow


@WORKFLOWS.register("stopping")
class Stopping(MathWorkflow):
    """Once, stops the process of the engine that it is about to ask."""

    async def run(self):
        marker = Path(__file__).with_name("stopped")
        if self.task.index == 4 and not marker.exists():
            marker.touch()
            [engine] = [each for each in psutil.process_iter() if each.name() == "ray::Engine" and ours(each)]
            engine.suspend()
        return await super().run()


def ours(process):
    return process.ppid() == os.getppid()
'''


def dying_train(trainer: Any) -> None:
    """The trainer's loop, in a process that dies with a version published and no checkpoint of it."""
    while (batch := trainer.next_batch()) is not None:
        trainer.update(batch)
        trainer.publish_if_due()
        marker = trainer.savepoints.layout.root / f"died_{trainer.progress.step}"
        if trainer.progress.step in DIES_AFTER and not marker.exists():
            marker.touch()
            os.kill(os.getpid(), signal.SIGKILL)
        trainer.save_if_due()
        trainer.write_metrics()
    trainer.finish()


def written(root: Path, tiny: TinyFolders, name: str, **sections: Any) -> Path:
    data = {"path": str(tiny.data), "format": {"prompt_key": "question", "response_key": "answer"}}
    config = {
        "project": "p",
        "name": name,
        "checkpoint_root_dir": str(root),
        "plugin_dir": str(root / "plugins"),
        "algorithm": {"algorithm_type": "grpo", "repeat_times": 4, "optimizer": {"lr": 1e-3}},
        "model": {"model_path": str(tiny.model), "max_prompt_tokens": 88, "max_response_tokens": 12},
        "cluster": {"gpu_per_node": 0},
        "buffer": {"batch_size": 4, "total_steps": STEPS, "explorer_input": {"taskset": data}},
        "explorer": {"engine_timeout": 3, "rollout_model": {"enforce_eager": True, "kv_cache_gib": 1}},
        "synchronizer": {"sync_method": "memory"},
        "trainer": {"save_interval": SAVE_INTERVAL},
        "monitor": {"monitor_type": "tensorboard"},
    }
    (root / "plugins").mkdir(exist_ok=True)
    (root / "plugins/stopping.py").write_text(STOPPING)
    path = root / f"{name}.yaml"
    path.write_text(yaml.safe_dump(config | sections))
    return path


def digest_of_run(path: Path, loop: Any, *overrides: str) -> str:
    """The digest of the weights that the run ends with."""
    with open_session(resolve_stage(load_checked(str(path), overrides))) as session:
        loops = {"explore": partial(session.explore, explore), "train": partial(session.train, loop)}
        return weights_digest(Path(summarise(session, run_together(session, loops))["hf_dir"]))


def test_weights_are_the_same_after_losses(
    tmp_path: Path, tiny_folders: TinyFolders, caplog: pytest.LogCaptureFixture
) -> None:
    cloudpickle.register_pickle_by_value(sys.modules[__name__])  # Ray's workers cannot import this file
    whole, hurt = (written(tmp_path, tiny_folders, name) for name in ("whole", "hurt"))
    with early_cluster(load_checked(str(whole))):
        expected = digest_of_run(whole, train)
        found = digest_of_run(hurt, dying_train, "buffer.default_workflow_type=stopping")
    assert found == expected
    assert caplog.text.count("trainer returns to its latest checkpoint") == len(DIES_AFTER)
    lines = read_metrics(tmp_path / "p/hurt")
    for source in ("trainer", "explorer"):
        assert [line.step for line in lines if line.source == source] == list(range(1, STEPS + 1))
    assert (tmp_path / "plugins/stopped").exists()
    assert max(line.metrics.get("engine_restarts", 0) for line in lines) == 1
