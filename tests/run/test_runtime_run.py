"""The page that runs everything, `run/loop.py`, on real parts and without Prefect."""

from __future__ import annotations

import json
import subprocess
from pathlib import Path

import pytest
from chaos.pipeline import STEPS, WARM_UP_STEPS, Undisturbed, pipeline

from trinity_core.data.tiny import TinyFolders
from trinity_core.exchange.tracking.metrics_file import read_metrics
from trinity_core.results.replay import Replay
from trinity_core.run import loop as run


def test_the_page_is_at_most_100_lines() -> None:
    assert len(Path(run.__file__).read_text().splitlines()) <= 100


def test_a_wrong_setting_ends_the_run_with_one_line(tmp_path: Path, tiny_folders: TinyFolders) -> None:
    with pipeline(tmp_path, tiny_folders, "bufer.batch_size=3") as wrong:
        done = subprocess.run(wrong.command, capture_output=True, text=True, timeout=60, check=False)
    assert done.returncode == 2
    assert "bufer" in done.stderr and "Traceback" not in done.stderr


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_a_pipeline_runs_without_prefect(undisturbed: Undisturbed) -> None:
    """A stage from a data set, then one from its model that explores a step ahead of the trainer."""
    said, job = undisturbed.done.stdout, undisturbed.run.job
    assert f"chaos/run_sft: step {WARM_UP_STEPS}" in said, undisturbed.done.stderr[-3000:]
    assert f"chaos/run_rft: step {STEPS}" in said, undisturbed.done.stderr[-3000:]
    summary = json.loads((job / "summary.json").read_text())
    assert summary["step"] == STEPS and 0 <= summary["score"] <= 1 and Path(summary["hf_dir"]).is_dir()
    assert summary["results"]["train"]["ended"] == "finished" and summary["results"]["explore"]["step"] == STEPS
    assert json.loads((job / "trainer_meta.json").read_text())["model"].startswith(str(undisturbed.run.folder("sft")))
    lines = read_metrics(job)
    versions = [line.metrics["version"] for line in lines if line.source == "explorer"]
    assert versions == [0, *range(STEPS - 1)], "no step waited for the train step on the rows of the step before"
    stale = [line.metrics["staleness/max"] for line in lines if line.source == "trainer"]
    assert stale == [0, *(1 for _ in range(STEPS - 1))], "and the trainer had those rows when it wanted them"


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_a_step_and_a_rollout_of_a_real_run_are_repeated(undisturbed: Undisturbed) -> None:
    with Replay(undisturbed.run.job) as replay:
        assert not replay.step(STEPS).differing
        [first, *_] = replay.batch(1) or []
        repeated = replay.rollout(f"{first.group}:{first.run}")
    assert (repeated.version, repeated.first_difference) == (0, None) and repeated.tokens == first.action_mask.sum()


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_the_timeline_says_when_each_actor_was_at_work(undisturbed: Undisturbed) -> None:
    """`monitor.enable_ray_timeline`: what chrome://tracing reads, with the calls of every actor."""
    events = json.loads((undisturbed.run.job / "monitor/timeline.json").read_text())
    calls = {event["cat"] for event in events if event["ph"] == "X" and event["dur"] > 0}
    assert {"task::Explorer.run", "task::TrainerActor.run", "task::InProcessEngine.generate"} <= calls, calls


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_a_failed_asynchronous_run_leaves_no_process(undisturbed: Undisturbed) -> None:
    """Every task of the second explore step fails: one line reports it, and the exit code is 1."""
    run, done = undisturbed.run, undisturbed.done
    assert done.returncode == 1
    [error] = [line for line in done.stderr.splitlines() if line.startswith("error: ")]
    assert "tasks of explore step" in error and "the tool is gone" in error
    assert "Traceback" not in done.stderr
    assert run.folder("failing").is_dir() and not (run.folder("failing") / "summary.json").exists()
    left = subprocess.run(["pgrep", "-f", str(run.root)], capture_output=True, text=True)
    assert not left.stdout.split()
