"""Train steps repeated from what a run has stored (`trinity replay`); a whole run's are in `benchmarks/replay.py`."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from sqlalchemy import delete, select, update
from trained_runs import STEPS, put, run

from trinity_core.base.errors import DataError
from trinity_core.config import Config, public_dict
from trinity_core.data.experience import from_bytes, to_bytes
from trinity_core.data.tiny import TinyFolders
from trinity_core.exchange.store.run_store import open_run_store
from trinity_core.exchange.tracking.pauses import AFTER_STEPS, Decision, Pause, record_pause
from trinity_core.exchange.tracking.run_record import record_start
from trinity_core.results.replay import Replay

ADAPTER = {
    "model__lora_configs": "[{lora_rank: 4, lora_alpha: 8}]", "algorithm__kl_loss_fn": "k2",
    "algorithm__kl_loss_fn_args": "{kl_coef: 0.1}",
}  # fmt: skip


def trained(config: Config) -> Path:
    """Train a run that saves every second step; return its folder."""
    record_start(config.job_dir, public_dict(config), "rft")
    if not config.is_supervised:
        put(config)
    run(config)
    return config.job_dir


def files_of(folder: Path) -> dict[Path, int]:
    """Modification times, without the store's: this process's trainer may have it open, and write its log back."""
    paths = (path for path in folder.rglob("*") if path.is_file() and ".db" not in path.name)
    return {path: path.stat().st_mtime_ns for path in paths}


@pytest.mark.slow
def test_steps_of_rollouts_are_repeated_exactly(make_config: Any) -> None:
    """From the beginning and from a checkpoint; nothing in the run's folder changes."""
    config = make_config(trainer__save_interval=2, **ADAPTER)
    folder = trained(config)
    before = files_of(folder)
    with Replay(folder) as replay:
        for step, start in (1, 0), (STEPS, 2), (2, 0):
            repeated = replay.step(step)
            assert (repeated.start, repeated.differing, repeated.since) == (start, [], None)
            assert {"weights", "actor/final_loss", "actor/grad_norm", "actor/kl_mean"} <= {*repeated.replayed}
        with pytest.raises(DataError) as refused:
            replay.step(STEPS + 1)
        assert refused.value.key == "--step" and files_of(folder) == before
        edit_first_group(config, 3, other_rewards)
        repeated = replay.step(STEPS)
        assert repeated.since == 3 and {"weights", "actor/final_loss"} <= {*repeated.differing}
        edit_first_group(config, 3, None)
        with pytest.raises(DataError) as gone:
            replay.step(STEPS)
        assert gone.value.key == "trainer.max_checkpoints_to_keep"
        assert not replay.step(1).differing


@pytest.mark.slow
def test_a_step_of_a_data_set_is_repeated_exactly(make_config: Any, tiny_folders: TinyFolders) -> None:
    buffer = "buffer__trainer_input__experience_buffer__"
    columns = "{prompt_key: question, response_key: answer}"
    data = {f"{buffer}path": tiny_folders.data, f"{buffer}split": "sft", f"{buffer}format": columns}
    folder = trained(
        make_config(
            "sft",
            trainer__save_interval=2,
            buffer__train_batch_size=4,
            model__max_model_len=256,
            algorithm__optimizer__warmup_style="cosine",
            **data,
        )
    )
    with Replay(folder) as replay:
        record_pause(folder, Pause(2, AFTER_STEPS, (), Decision("continue", ["algorithm.optimizer.lr=1"])))
        assert not replay.step(STEPS).differing
        with pytest.raises(DataError) as other_settings:
            replay.step(2)
        assert other_settings.value.key == "--step"


def edit_first_group(config: Config, step: int, blob: Callable[[bytes], bytes] | None) -> None:
    """Replace the stored rows of the first group of a batch; None removes them."""
    with open_run_store(config) as store, store._database.write() as connection:
        t = store._database.tables
        taken = (
            select(t.lease_groups.c.group_id).where(t.lease_groups.c.step == step).order_by(t.lease_groups.c.ordinal)
        )
        mine = t.experiences.c.group_id == connection.scalars(taken).first()
        stored = connection.scalars(select(t.experiences.c.blob).where(mine)).one()
        connection.execute(
            delete(t.experiences).where(mine)
            if blob is None
            else update(t.experiences).where(mine).values(blob=blob(stored))
        )


def other_rewards(blob: bytes) -> bytes:
    return to_bytes([replace(row, reward=float(row.run)) for row in from_bytes(blob)])
