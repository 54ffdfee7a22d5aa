"""Runs that wait for a person: saved exactly, killed while they wait, continued with other settings, stopped."""

from __future__ import annotations

import json
import os
import pty
import subprocess
from pathlib import Path
from typing import Any

import pytest
from chaos.comparing import first_difference
from chaos.killing import ChaosRun, Kill
from chaos.pipeline import WARM_UP_STEPS, pipeline

from trinity_core.base.program import PAUSED
from trinity_core.data.tiny import TinyFolders
from trinity_core.exchange.checkpoints.resume import whole_steps
from trinity_core.exchange.tracking.metrics_file import read_metrics, series
from trinity_core.exchange.tracking.pauses import pause_at, read_pauses
from trinity_core.exchange.tracking.run_record import RunState, read_record
from trinity_core.results.lineage import lineage

pytestmark = [pytest.mark.campaign, pytest.mark.slow, pytest.mark.timeout(900)]
STEPS, PAUSE = 5, 3


def start(root: Path, tiny: TinyFolders, *overrides: str, through: str = "page") -> ChaosRun:
    overrides = ("trainer.save_interval=0", *overrides)
    return ChaosRun(root, tiny.model, tiny.data, STEPS, through, overrides=overrides)


def call(run: ChaosRun, *more: str) -> subprocess.CompletedProcess[str]:
    environment = {name: value for name, value in os.environ.items() if not name.startswith("PREFECT_")}
    command = [*run.command, *more]
    return subprocess.run(
        command, cwd=run.root, env=environment, stdin=subprocess.DEVNULL, capture_output=True, text=True, timeout=500
    )  # fmt: skip


@pytest.fixture(scope="module")
def unpaused(tmp_path_factory: pytest.TempPathFactory, tiny_folders: TinyFolders) -> ChaosRun:
    with start(tmp_path_factory.mktemp("unpaused"), tiny_folders) as run:
        run.go()
    return run


@pytest.mark.parametrize("through", ["page", "flow"])
def test_a_run_without_a_terminal_ends_and_goes_on_exactly(
    unpaused: ChaosRun, tmp_path: Path, tiny_folders: TinyFolders, through: str
) -> None:
    with start(tmp_path, tiny_folders, f"monitor.pause.after_steps=[{PAUSE}]", through=through) as run:
        for _ in range(2):  # a second start asks again, and trains nothing
            waiting = call(run)
            assert (waiting.returncode, whole_steps(run.job)) == (PAUSED, [PAUSE]), waiting.stderr[-3000:]
            assert "--decide" in waiting.stderr and run.steps_of("trainer")[-1] == PAUSE
        record = read_record(run.job)
        assert record is not None and record.present_state is RunState.PAUSED
        assert not (run.job / "summary.json").exists()
        done = call(run, "--decide", "continue")
        assert done.returncode == 0, done.stderr[-3000:]
        assert run.digest() == unpaused.digest(), first_difference(unpaused.job, run.job, STEPS)
        refused = call(run, "--decide", "continue")
        assert refused.returncode == 1
    [pause] = json.loads((run.job / "summary.json").read_text())["pauses"]
    assert (pause["step"], pause["decided"]["decision"]) == (PAUSE, "continue")


def test_changed_settings_hold_over_a_kill_and_stand_in_the_lineage(tmp_path: Path, tiny_folders: TinyFolders) -> None:
    with start(tmp_path, tiny_folders, f"monitor.pause.after_steps=[{PAUSE}]", "trainer.save_interval=1") as run:
        assert call(run).returncode == PAUSED
        wrong = call(run, "--decide", "continue algorithm.optimizer.lrate=1e-5")
        assert wrong.returncode == 2 and "lrate" in wrong.stderr
        elsewhere = call(run, "--decide", "continue model.model_path=" + str(run.job / "global_step_3/actor"))
        assert elsewhere.returncode == 2
        assert not pause_at(run.job, PAUSE).decided.decision  # type: ignore[union-attr]
        run.overrides = (*run.overrides, "--decide", "continue algorithm.optimizer.lr=1e-5")
        run.kill(Kill("flow", PAUSE + 1))
        assert run.kills == 1
        run.overrides = run.overrides[:-2]
        done = call(run)
        assert done.returncode == 0, done.stderr[-3000:]
    rates = series(read_metrics(run.job), "actor/lr", "trainer")
    assert [rates[step] for step in (PAUSE, PAUSE + 1, STEPS)] == pytest.approx([1e-3, 1e-5, 1e-5])
    [link, *_] = lineage(run.job)
    [pause] = link.pauses
    assert list(pause.decided.settings) == ["algorithm.optimizer.lr=1e-5"]


def test_a_person_at_a_terminal_stops_the_run(tmp_path: Path, tiny_folders: TinyFolders) -> None:
    with start(tmp_path, tiny_folders, "monitor.pause.after_steps=[2, 4]") as run:
        said = at_terminal(run, ["continue", "as expected", "halt", "stop", "enough"])
        assert said.count("key=value …, or stop?") == 3
        assert run.steps_of("trainer")[-1] == 4
        first, second = read_pauses(run.job)
        assert (first.decided.decision, first.decided.reason) == ("continue", "as expected")
        assert (second.decided.decision, second.decided.reason) == ("stop", "enough")
        summary: dict[str, Any] = json.loads((run.job / "summary.json").read_text())
        assert summary["step"] == 4 and "stop" in summary["stopped_early"]
        assert call(run).returncode == 0 and run.steps_of("trainer")[-1] == 4  # it stays stopped
        done = call(run, "--decide", "continue")
        assert done.returncode == 0 and run.steps_of("trainer")[-1] == STEPS, done.stderr[-3000:]


def at_terminal(run: ChaosRun, answers: list[str]) -> str:
    """Run the command on a terminal, on which these lines are typed at its questions; return what it shows."""
    master, slave = pty.openpty()
    with subprocess.Popen(run.command, cwd=run.root, stdin=slave, stdout=slave, stderr=slave) as process:
        os.close(slave)
        shown = b""
        left = [answer.encode() + b"\n" for answer in answers]
        while True:
            try:
                part = os.read(master, 4096)
            except OSError:  # the terminal's other end is closed
                break
            shown += part
            if left and shown.rstrip().endswith((b"stop?", b"with the run:")):
                os.write(master, left.pop(0))
        assert process.wait(60) == 0, shown.decode()[-3000:]
    os.close(master)
    assert not left
    return shown.decode()


def test_each_stage_of_a_pipeline_pauses_for_itself(tmp_path: Path, tiny_folders: TinyFolders) -> None:
    """The second stage begins with the first one's model, and is stopped: the pipeline ends with it."""
    with pipeline(tmp_path, tiny_folders, f"monitor.pause.after_steps=[{PAUSE}]") as run:
        run.through = "flow"
        for decision, stage, steps in (("", "sft", PAUSE), ("continue", "rft", PAUSE)):
            waiting = call(run, *(["--decide", decision] if decision else []))
            assert waiting.returncode == PAUSED, waiting.stderr[-3000:]
            assert run.steps_of("trainer", stage)[-1] == steps
        record = read_record(run.root / "checkpoints/chaos/run")
        assert record is not None and record.present_state is RunState.PAUSED
        done = call(run, "--decide", "stop")
        assert done.returncode == 0, done.stderr[-3000:]
        assert run.steps_of("trainer", "rft")[-1] == PAUSE
    summary = json.loads((run.root / "checkpoints/chaos/run/summary.json").read_text())
    assert summary["steps"] == {"sft": WARM_UP_STEPS, "rft": PAUSE}
    assert "rft: " in summary["stopped_early"] and "stop" in summary["stopped_early"]
    assert summary["score"] is not None, "the result of the stopped stage is evaluated"
