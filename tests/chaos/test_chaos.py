"""Processes of a real run are killed at random moments, also amid saving and syncing, and nobody helps the run but by
starting it again: no task is lost or trained twice, no checkpoint is lost, and the weights are the undisturbed run's.
"""

from __future__ import annotations

import random
from pathlib import Path

import pytest
from chaos.comparing import first_difference
from chaos.killing import ChaosRun, Kill
from chaos.pipeline import STEPS, WARM_UP_STEPS, Undisturbed, pipeline

from trinity_core.data.tiny import TinyFolders
from trinity_core.tracking import read_metrics

SEED = 12
BACK = "the trainer returns to its latest checkpoint"


def ten_kills(rng: random.Random) -> list[Kill]:
    """A trainer worker before the first checkpoint; two verifiers; everything at once; another verifier of the run that
    resumes; and the trainer amid its last save, when there is nothing left to explore until it is back.
    """
    first, second, amid = sorted(rng.choices(range(1, STEPS - 1), k=3))
    everything = "+".join([*rng.sample(["engine", "trainer", "explorer"], 3), "raylet", "flow"])
    return [
        Kill("trainer", 1, delay=rng.uniform(0, 0.3), stage="sft"),
        *(Kill("reward", step, delay=rng.uniform(0, 0.3)) for step in (first, second)),
        Kill(everything, amid, rng.choice(["saving", "syncing"]), rng.uniform(0, 0.02)),
        Kill("reward", amid + 1, delay=rng.uniform(0, 0.3)),
        Kill("trainer", STEPS - 1, "saving"),
    ]


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_ten_kills_lose_nothing_and_change_no_weight(
    tmp_path: Path, tiny_folders: TinyFolders, undisturbed: Undisturbed
) -> None:
    """An engine hangs besides."""
    hanging = ("buffer.default_workflow_type=stopping", "explorer.engine_timeout=5", "explorer.eval_on_startup=false")
    with pipeline(tmp_path, tiny_folders, *hanging) as run:
        run.go(ten_kills(random.Random(SEED)))
    said = run.log.read_text()
    assert run.kills == 10 and run.attempts > 1, said
    assert run.faults() == []
    expected = undisturbed.run
    assert run.digest() == expected.digest(), first_difference(expected.job, run.job, STEPS)
    assert said.count(BACK) >= 2, said
    assert run.steps_of("trainer", "sft") == list(range(1, WARM_UP_STEPS + 1))
    assert run.steps_of("trainer") == run.steps_of("explorer") == list(range(1, STEPS + 1))
    assert (tmp_path / "plugins/stopped").exists()
    assert max(line.metrics.get("engine_restarts", 0) for line in read_metrics(run.job)) >= 1


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_no_death_keeps_the_other_side_from_a_shared_gpu(tmp_path: Path, tiny_folders: TinyFolders) -> None:
    """Engine and trainer take turns (on the CPU nothing moves). Each side dies, most likely while it has the GPU."""
    kills = [Kill("trainer", 1, "syncing"), Kill("engine", 2, delay=0.2)]
    turns = ("cluster.colocate=true", "synchronizer.sync_interval=2", "synchronizer.sync_timeout=120")
    with ChaosRun(tmp_path, tiny_folders.model, tiny_folders.data, 4, overrides=turns) as run:
        run.go(kills)
    said = run.log.read_text()
    assert (run.kills, run.attempts) == (2, 1), said
    assert run.faults() == []
    assert run.steps_of("trainer") == run.steps_of("explorer") == list(range(1, 5))
    lines = read_metrics(run.job)
    explored = {line.step: line.metrics for line in lines if line.source == "explorer"}
    assert "timing_s/wake" in explored[3] and "timing_s/wake" not in explored[4], "a turn has two steps"
    assert any("timing_s/reload" in line.metrics for line in lines if line.source == "trainer")
