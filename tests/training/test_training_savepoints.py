"""Retention of checkpoints."""

from __future__ import annotations

import errno
from pathlib import Path
from shutil import copytree
from typing import Any

import pytest
from raising import raising
from safetensors.torch import load_file, save_file

from trinity_core.base.errors import TrinityError
from trinity_core.base.layout import MANIFEST, shard_name
from trinity_core.base.runlock import release
from trinity_core.config.schema import Config
from trinity_core.exchange.checkpoints.beginning import other_beginning
from trinity_core.exchange.store.run_store import open_run_store
from trinity_core.exchange.tracking.metrics_file import MetricsFile
from trinity_core.hosting.placement import Machine, place
from trinity_core.run.stage import Stage, lock_names, resume
from trinity_core.training.checkpoint import Savepoints
from trinity_core.training.distributed import join, meeting_point
from trinity_core.training.learner import Learner

pytestmark = pytest.mark.slow


def test_best_checkpoint_by_eval_is_kept(make_config: Any, tmp_path: Path) -> None:
    ranks = join(0, 1, *meeting_point(), use_gpu=False)
    config = make_config(trainer__max_checkpoints_to_keep=2, trainer__save_hf_checkpoint="last")
    learner = Learner(config, 4, ranks)
    savepoints = Savepoints(config, ranks, learner.engine.module.lm)
    scores = MetricsFile(config.job_dir, "eval")
    for step, accuracy in enumerate((0.1, 0.7, 0.3, 0.7, 0.2), start=1):
        savepoints.save(learner, step, None, last=step == 5)
        savepoints.writer.until_written()
        scores.write(step, {"eval/test/accuracy": accuracy})
    savepoints.writer.close()
    assert savepoints.layout.steps() == [2, 4, 5]
    assert savepoints.oldest() == 4, "the best one does not keep the store's rows"
    folders = {step: savepoints.layout.step(step) / "actor" / "huggingface" for step in (2, 4, 5)}
    assert [step for step, folder in folders.items() if list(folder.glob("*.safetensors"))] == [5]
    manifest = savepoints.layout.step(5) / MANIFEST
    manifest.rename(tmp_path / "away")
    assert savepoints.return_to_latest() == 4
    (tmp_path / "away").rename(manifest)
    assert savepoints.return_to_latest() == 4, "it went on from there"


def test_best_checkpoint_stays_while_its_disk_is_away(make_config: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    ranks = join(0, 1, *meeting_point(), use_gpu=False)
    config = make_config(trainer__max_checkpoints_to_keep=1)
    learner = Learner(config, 2, ranks)
    savepoints = Savepoints(config, ranks, learner.engine.module.lm)
    savepoints.save(learner, 1, None)
    savepoints.writer.until_written()
    MetricsFile(config.job_dir, "eval").write(1, {"eval/test/accuracy": 0.5})
    shard = savepoints.layout.actor(1) / shard_name("model", 1, 0)
    stat = Path.stat

    def is_away(path: Path, **options: Any) -> Any:
        if path == shard:
            raise OSError(errno.ESTALE, "Stale file handle")
        return stat(path, **options)

    with monkeypatch.context() as away:
        away.setattr(Path, "stat", is_away)
        savepoints.save(learner, 2, None)
        savepoints.writer.close()
    assert savepoints.layout.steps() == [1, 2]


def other_weights(model: Path, folder: Path) -> Path:
    copytree(model, folder)
    tensors = load_file(folder / "model.safetensors")
    save_file({name: value + 0.01 for name, value in tensors.items()}, folder / "model.safetensors", {"format": "pt"})
    return folder


def resumed(config: Config) -> Stage:
    """The run as its flow sees it before anything starts."""
    stage = Stage(config, place(config, Machine(2, 0)), "rft")
    if not config.is_supervised:
        with open_run_store(config) as store:
            store.lease(1, 1, 0, final=True)  # the batch of the checkpoint
    try:
        return resume(stage)
    finally:
        for name in lock_names(config, {"train"}):
            release(config.job_dir, name)


def test_reference_is_the_model_the_run_began_with(make_config: Any, tiny_model: Path, tmp_path: Path) -> None:
    """By content. Without a KL term another model is accepted, and the checkpoints keep the record of the first."""
    ranks = join(0, 1, *meeting_point(), use_gpu=False)
    first = copytree(tiny_model, tmp_path / "first")
    other = other_weights(first, tmp_path / "other")
    kl = {"algorithm__kl_loss_fn": "k2", "algorithm__kl_loss_fn_args": "{kl_coef: 0.1}"}

    def opened(model: Path, **overrides: Any) -> tuple[Config, Savepoints, Learner]:
        config = make_config(model__model_path=str(model), **overrides)
        learner = Learner(config, 4, ranks)
        return config, Savepoints(config, ranks, learner.engine.module.lm), learner

    config, savepoints, learner = opened(first, **kl)
    savepoints.save(learner, 1, None)
    savepoints.writer.close()
    moved = first.rename(tmp_path / "moved")
    config, savepoints, learner = opened(moved, **kl)
    savepoints.load(learner, 1)
    assert resumed(config).warnings == ()

    config, savepoints, learner = opened(other, **kl)
    for refusal in (lambda: savepoints.load(learner, 1), lambda: resumed(config)):
        with raising(TrinityError, key="model.model_path"):
            refusal()

    config, savepoints, learner = opened(other, algorithm__kl_loss_fn="none")
    [warning] = resumed(config).warnings
    assert "first" in warning
    savepoints.load(learner, 1)
    savepoints.save(learner, 2, None)
    savepoints.writer.close()
    began = other_beginning(config.job_dir, 2, str(other))
    assert began is not None and began.model == str(first), "it still is the one of step 0"
    assert other_beginning(config.job_dir, 2, str(moved)) is None
    config, savepoints, learner = opened(other, **kl)
    with raising(TrinityError, key="model.model_path"):
        savepoints.load(learner, 2)

    written_again = other_weights(moved, tmp_path / "again")
    moved.rename(tmp_path / "away")
    written_again.rename(tmp_path / "first")
    config, savepoints, learner = opened(tmp_path / "first", **kl)
    with raising(TrinityError, key="model.model_path"):
        savepoints.load(learner, 2)
