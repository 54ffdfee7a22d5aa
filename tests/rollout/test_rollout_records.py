"""What an explorer writes for each step besides metrics: a few rollouts for MLflow's traces."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from trinity_core.config import config_from_dict
from trinity_core.data.experience import Experience
from trinity_core.exchange.store.ledger import DrawnTask
from trinity_core.exchange.tracking.rollouts import read_rollouts, rollout_files, traces_dir
from trinity_core.rollout.inference.requests import WeightSyncReport
from trinity_core.rollout.records import StepRecords, StepRollouts


@pytest.mark.parametrize(("monitor", "count"), [
    ({}, 2), ({"traces_per_step": 3}, 3), ({"traces_per_step": 0}, 0), ({"monitor_type": "tensorboard"}, 0),
])  # fmt: skip
def test_each_step_leaves_a_few_rollouts_to_be_traced(tmp_path: Path, monitor: dict, count: int, caplog) -> None:
    config = config_from_dict({
        "project": "p", "name": "n", "checkpoint_root_dir": str(tmp_path), "monitor": monitor,
        "model": {"model_path": "m", "max_model_len": 64},
        "buffer": {"explorer_input": {"taskset": {"path": "tasks.jsonl"}}},
    })  # fmt: skip
    rows = [
        Experience(
            tokens=np.arange(3), prompt_length=1, logprobs=np.zeros(2, np.float32), action_mask=np.ones(2, bool),
            versions=np.zeros(2, np.int64), run=run, info={"prompt": "2 + 2?", "response": str(run)},
        )
        for run in range(8)
    ]  # fmt: skip
    drawn = [DrawnTask("", "sums/3", 8)]
    rollouts = StepRollouts(4, rows, rows, drawn, {"experiences/kept": 8.0}, spans={"": (1.0, 2.5)})
    records = StepRecords(config)
    records.loaded(WeightSyncReport(1, 5.0, 1e-3, 2.0))
    records.loaded(WeightSyncReport(2, 1.0, 1e-5, 0.5))
    numbers = records.numbers(rollouts, 0)
    sync = {
        name: numbers[name]
        for name in ("weight_sync/check_gap", "timing_s/weight_sync_engine", "timing_s/weight_check")
    }
    assert list(sync.values()) == [1e-3, 6.0, 2.5], "several loads in a step"
    records.set_seconds(wait=100.0, sleep=20.0, wake=40.0, weight_sync=10.0, generate=7000.0)
    with caplog.at_level("INFO"):
        records.write(rollouts, {"reward/mean": 0.5}, total_steps=9)
    assert "step 4 of 9: reward/mean 0.5" in caplog.text
    assert records.last["timing_s/step"] == pytest.approx(170, abs=5), "what comes before the step's work is added"
    written = [
        (step, read_rollouts(path)) for _, step, path in rollout_files(config.job_dir, traces_dir(config.job_dir))
    ]
    assert [(step, len(rollouts)) for step, rollouts in written] == ([(4, count)] if count else [])
    assert len({rollout.run for _, rollouts in written for rollout in rollouts}) == count, "spread over the step"
    assert all(rollout.span == (1.0, 2.5) for _, rollouts in written for rollout in rollouts)
    records.sample("eval_test", 4, (rows * 4)[:31])
    [(_, _, path)] = rollout_files(config.job_dir)
    assert [rollout.run for rollout in read_rollouts(path)][-4:] == [23 % 8, 25 % 8, 27 % 8, 29 % 8], "16 of 31"
    records.write(replace(rollouts, step=11), {})
    assert {one.task for one in read_rollouts(rollout_files(config.job_dir)[-1][2])} == {"sums/3"}
