"""Folders and Prefect's flow runs as one list; what may be done with a run; how flows start."""

from __future__ import annotations

import gc
import json
import os
import signal
import sys
from contextlib import nullcontext, suppress
from dataclasses import replace
from datetime import UTC, datetime, timedelta
from pathlib import Path
from types import SimpleNamespace
from uuid import uuid4

import pytest

from studio.actions import action_for, hindrance, perform
from studio.launch import Launch, start_run, starting
from studio.prefect_runs import FlowRunSeen, recent_runs
from studio.runs import PREFECT_STATES, Run, curves_by_stage, find_runs
from studio.settings import studio_settings
from trinity_core.base.errors import TrinityError
from trinity_core.base.files import read_json, write_json
from trinity_core.base.layout import JobLayout
from trinity_core.base.runlock import PIPELINE, RUN_TRAINS, held
from trinity_core.base.waits import poll
from trinity_core.config.secrets import MASK
from trinity_core.exchange.checkpoints.resume import claim, update_meta
from trinity_core.exchange.tracking.metrics_file import MetricsFile, metrics_path, rewind
from trinity_core.exchange.tracking.notes import Note, delete
from trinity_core.exchange.tracking.run_record import (
    RunState,
    config_path,
    read_record,
    record_end,
    record_path,
    record_start,
)
from trinity_core.exchange.tracking.writers import RunOutcome

NOON = datetime(2026, 1, 1, 12, tzinfo=UTC)


def flow_run(name: str, kind: str = "COMPLETED", minutes: int = 0, **more: object) -> FlowRunSeen:
    """A run of a deployment of the flow `rft`, begun some minutes after noon."""
    run = FlowRunSeen(
        id=f"flow run {name}",
        title=f"p/{name}",
        flow="rft",
        kind=kind,
        began=NOON + timedelta(minutes=minutes),
        ended=NOON + timedelta(minutes=minutes + 2),
        deployment="1",
        parameters={"config": "my.yaml", "overrides": ["seed=1"]},
        tags={"project": "p", "name": name},
    )
    return replace(run, **more)  # type: ignore[arg-type]


def folder(root: Path, name: str, minutes: float = 0, outcome: RunOutcome | None = None, **config: object) -> Path:
    """A run's folder with a checkpoint; the run is this process's until it has an outcome."""
    job = root / "p" / name
    JobLayout(job).step(1).mkdir(parents=True, exist_ok=True)
    own = record_start(job, {"buffer": {"total_steps": 8}, **config}, "rft")
    if outcome is not None:
        record_end(job, own, outcome)
    began = (NOON + timedelta(minutes=minutes)).timestamp()
    record = read_json(record_path(job))
    write_json(record_path(job), record | {"began": began} | ({"ended": began + 120} if outcome else {}))
    return job


def test_newest_runs_come_first_and_those_that_wait_before_them(tmp_path: Path) -> None:
    config_path(folder(tmp_path, "three", minutes=3)).write_text("damaged: [")
    waiting = flow_run("waits", "SCHEDULED", began=None, ended=None)
    runs = find_runs(tmp_path, [flow_run("one"), flow_run("two", minutes=5), waiting])
    assert [run.name for run in runs] == ["p/waits", "p/two", "p/three", "p/one"]


def test_a_failed_run_without_a_flow_run_shows_its_error(tmp_path: Path) -> None:
    """As that of `trinity_core.train`, or any run while Prefect does not answer."""
    try:
        raise TrinityError("no data")
    except TrinityError:
        folder(tmp_path, "one", outcome=RunOutcome.FAILED)
    assert [run.detail for run in find_runs(tmp_path)] == ["no data"]
    assert [run.detail for run in find_runs(tmp_path, [flow_run("one", "FAILED", message="no rows")])] == ["no rows"]


def test_a_flow_run_is_shown_once_with_what_its_folder_says(tmp_path: Path) -> None:
    job = folder(tmp_path, "one", outcome=RunOutcome.FINISHED)
    for step in (1, 2, 3):
        MetricsFile(job, "trainer").write(step, {"timing_s/step": 1.0})
    MetricsFile(job, "eval").write(
        2, {"eval/test/accuracy": 0.5, "eval/test/accuracy_low": 0.4, "eval/test/accuracy_high": 0.6}
    )
    [run] = find_runs(tmp_path, [flow_run("one"), flow_run("one", minutes=-9, id="earlier", kind="FAILED")])
    assert run.state is RunState.FINISHED and run.folder == job and run.flow_run.id == "flow run one"
    assert run.seconds(NOON) == 120.0 and run.launch == Launch("my.yaml", ("seed=1",))
    write_json(record_path(job), read_json(record_path(job)) | {"earlier": 30.0})
    assert find_runs(tmp_path)[0].seconds(NOON) == 150.0, "with the attempts before"
    assert find_runs(tmp_path, [flow_run("one", "SCHEDULED")])[0].seconds(NOON) == 150.0, (
        "no time passes until it begins"
    )
    assert (run.step, run.total_steps, run.score, run.interval) == (3, 8, 0.5, (0.4, 0.6))
    assert run.seconds_left is not None and run.seconds_left < 60
    assert run.progress == "3 of 8"
    assert replace(run, total_steps=2).progress == "3", "started again with fewer steps"


def test_a_later_attempt_changes_neither_begin_nor_place_in_the_list(tmp_path: Path) -> None:
    """By their begin a comparison takes its baseline too."""
    jobs = [folder(tmp_path, name, minutes, RunOutcome.FAILED) for minutes, name in enumerate(("one", "two"))]
    for _ in range(2):
        second = record_start(jobs[0], {}, "rft")
    assert second is not None
    later = datetime.fromtimestamp(second.began, UTC) + timedelta(seconds=30)
    two, one = find_runs(tmp_path)
    assert (two.name, one.name, one.began) == ("p/two", "p/one", NOON)
    assert one.seconds(later) == pytest.approx(120.0 + 30.0), "of each attempt, without the time between them"


def test_a_promotion_does_not_stand_for_the_run_whose_model_it_promotes(tmp_path: Path) -> None:
    folder(tmp_path, "one", outcome=RunOutcome.FINISHED)
    promotion = flow_run("one", minutes=9, id="gate", flow="gate", kind="RUNNING", parameters={"config": "gate.yaml"})
    [run] = find_runs(tmp_path, [promotion, flow_run("one")])
    assert run.state is RunState.FINISHED and run.launch == Launch("my.yaml", ("seed=1",))


def test_the_length_of_a_run_of_epochs_is_known_after_its_first_step(tmp_path: Path) -> None:
    job = folder(tmp_path, "one", buffer={"total_epochs": 1})
    assert [run.progress for run in find_runs(tmp_path)] == [""]
    MetricsFile(job, "trainer").write(1, {"reward/mean": 0.5}, weights="a", total_steps=8, updates=1)
    assert [run.progress for run in find_runs(tmp_path)] == ["1 of 8"]


def test_of_a_run_in_progress_the_newest_look_alone_is_kept(tmp_path: Path) -> None:
    job = folder(tmp_path, "one")
    kept: list[int] = []
    for step in (1, 2, 4, 3):
        MetricsFile(job, "trainer").write(step, {"timing_s/step": 1.0})
        MetricsFile(job, "eval").write(step, {"eval/test/accuracy": step / 10})
        [run] = find_runs(tmp_path)
        gc.collect()  # of other tests too
        kept.append(sum(isinstance(thing, Run) for thing in gc.get_objects()))
    assert len({*kept}) == 1
    assert [*run.curves["timing_s/step"]] == [1, 2, 3, 4] and run.score == 0.4
    rewind(job, 2)
    [run] = find_runs(tmp_path)
    assert [*run.curves["timing_s/step"]] == [1, 2] and [*run.scores] == [1, 2], "what was deleted is gone"


def test_stages_stand_below_their_pipeline_which_has_their_scores(tmp_path: Path) -> None:
    pipeline = folder(tmp_path, "all", outcome=RunOutcome.FINISHED)
    write_json(JobLayout(pipeline).stages, {"sft": "all_sft", "rft": "all_rft"})
    MetricsFile(pipeline, "eval").write(0, {"eval/test/accuracy": 0.1})
    for at, name, scores in ((2, "all_rft", {0: 0.2, 1: 0.4}), (1, "all_sft", {9: 0.2})):
        stage = folder(tmp_path, name, at, RunOutcome.FINISHED)
        update_meta(JobLayout(stage).trainer_meta, model="/c/p/all_sft/global_step_9/actor/huggingface")
        for step, score in scores.items():
            MetricsFile(stage, "eval").write(step, {"eval/test/accuracy": score})
    folder(tmp_path, "later", minutes=9)
    runs = find_runs(tmp_path)
    assert [(run.name, run.parent) for run in runs] == [
        ("p/later", ""), ("p/all", ""), ("p/all_sft", "p/all"), ("p/all_rft", "p/all"),
    ]  # fmt: skip
    assert runs[1].scores == {0: 0.1, 9: 0.2, 10: 0.4}, "by the train steps of all stages"
    lines = {stage: line["eval/test/accuracy"] for stage, line in curves_by_stage(runs[1], runs).items()}
    assert {stage: [*line] for stage, line in lines.items()} == {"sft": [0, 9], "rft": [9, 10]}
    assert curves_by_stage(runs[2], runs) == {"p/all_sft": runs[2].curves}
    assert runs[3].model == "all_sft step 9"


def test_a_pipeline_in_progress_shows_step_and_time_left_of_its_stage(tmp_path: Path) -> None:
    pipeline = folder(tmp_path, "all")
    write_json(JobLayout(pipeline).stages, {"sft": "all_sft", "rft": "all_rft"})
    assert find_runs(tmp_path)[0].progress == "", "while the base model is scored"
    stage = folder(tmp_path, "all_sft", 1)
    assert [run.progress for run in find_runs(tmp_path)] == ["sft 0 of 8", "0 of 8"]
    for step in (1, 2):
        MetricsFile(stage, "trainer").write(step, {"timing_s/step": 1.0})
    lines = metrics_path(stage).read_text().splitlines()
    timed = [json.dumps(json.loads(line) | {"time": 10.0 * at}) for at, line in enumerate(lines)]
    metrics_path(stage).write_text("\n".join(timed) + "\n")
    assert [run.progress for run in find_runs(tmp_path)] == ["sft 2 of 8, 1 min 00 s left", "2 of 8, 1 min 00 s left"]
    record_end(pipeline, read_record(pipeline), RunOutcome.CANCELLED)
    assert find_runs(tmp_path)[0].progress == "sft 2 of 8", "its stage may not have heard of it yet"


def test_a_stage_without_evaluations_has_the_score_that_the_next_one_began_with(tmp_path: Path) -> None:
    """A run of its own that began with the same checkpoint may have other tasks: its score is none of the stage's."""
    write_json(JobLayout(folder(tmp_path, "all", outcome=RunOutcome.FINISHED)).stages, {"sft": "sft", "rft": "rft"})
    folder(tmp_path, "sft", outcome=RunOutcome.FINISHED)
    interval = {"eval/test/accuracy_low": 0.4, "eval/test/accuracy_high": 0.6}
    for minutes, (name, first) in enumerate({"other": 0.1, "rft": 0.5, "later": 0.2}.items(), 1):
        job = folder(tmp_path, name, minutes, RunOutcome.FINISHED)
        update_meta(JobLayout(job).trainer_meta, model=f"{tmp_path}/p/sft/global_step_9/actor/huggingface")
        for step, score in ((0, first), (8, 0.9)):
            MetricsFile(job, "eval").write(step, {"eval/test/accuracy": score} | interval)
    runs = {run.name: run for run in find_runs(tmp_path)}
    assert (runs["p/sft"].scores, runs["p/sft"].interval, runs["p/rft"].score) == ({9: 0.5}, (0.4, 0.6), 0.9)
    assert {step: point.value for step, point in runs["p/sft"].curves["eval/test/accuracy"].items()} == {9: 0.5}
    JobLayout(tmp_path / "p/all").stages.unlink()
    assert {run.name: run for run in find_runs(tmp_path)}["p/sft"].scores == {}


def test_a_note_stays_with_a_run_until_it_is_deleted(tmp_path: Path) -> None:
    """A run that lies elsewhere goes with the link to it; one in progress loses nothing."""
    job = folder(tmp_path, "one", outcome=RunOutcome.FINISHED)
    Note("the good one", archived=True).save(job)
    assert find_runs(tmp_path)[0].note == Note("the good one", archived=True)
    linked = folder(tmp_path / "elsewhere", "two", outcome=RunOutcome.FINISHED)
    (tmp_path / "p/two").symlink_to(linked)
    for component in (RUN_TRAINS, PIPELINE, "explorer_second"):
        with held(job, component), pytest.raises(TrinityError):
            delete([tmp_path / "p/two", job])
    assert len(find_runs(tmp_path)) == 2
    delete([tmp_path / "p/two", job, tmp_path / "p/none"])
    assert find_runs(tmp_path) == [] and not linked.exists() and not (tmp_path / "p/two").is_symlink()


def test_a_flow_run_stands_for_its_parts_of_the_same_name(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A worker's `rft_async` run; its trainer and explorer begin after it and have its tags, but no deployment."""
    from prefect.client.schemas.objects import FlowRun

    flow, tags = uuid4(), ["project:p", "name:one"]
    whole = FlowRun(flow_id=flow, deployment_id=uuid4(), tags=tags)
    parts = [FlowRun(flow_id=flow, parent_task_run_id=uuid4(), tags=tags) for _ in range(2)]
    earlier = FlowRun(flow_id=flow, deployment_id=uuid4(), tags=tags)
    newest_first = SimpleNamespace(read_flow_runs=lambda **_: [*parts, whole, earlier], read_flows=list)
    monkeypatch.setattr("studio.prefect_runs.api_client", lambda _: nullcontext(newest_first))
    [run] = find_runs(tmp_path, recent_runs(""))
    assert run.flow_run is not None and run.flow_run.id == str(whole.id)


def test_runs_that_wait_or_were_refused_have_prefects_name(tmp_path: Path) -> None:
    """It tells two of the same command apart; with settings, whose secrets are masked, until it is project and name."""
    asked = {"config": "my.yaml", "overrides": ["seed=1", "algorithm.judge.api_key=abc"], "name": "mine"}
    begun = [
        flow_run(f"number {kind}", kind, title=f"odd-{kind}", tags={}, parameters=asked)
        for kind in ("SCHEDULED", "FAILED")
    ]
    shown = f"(rft my.yaml seed=1 algorithm.judge.api_key={MASK} name=mine)"
    names = [f"odd-{kind} {shown}" for kind in ("SCHEDULED", "FAILED")]
    assert sorted(run.name for run in find_runs(tmp_path, begun)) == sorted(names)

    folder(tmp_path, "there", outcome=RunOutcome.FINISHED)
    titles = {"p/bad refused: a/b": "FAILED", "p/there refused: a/b": "FAILED", "p/new": "RUNNING"}
    begun = [flow_run(title, kind, title=title, tags={}, parameters={}) for title, kind in titles.items()]
    names = ["p/bad", "p/new", "p/there", "p/there refused: a/b"]
    assert sorted(run.name for run in find_runs(tmp_path, begun)) == names, "an existing run keeps its page"


@pytest.mark.parametrize("kind", PREFECT_STATES)
def test_every_state_of_prefect_has_a_word(kind: str, tmp_path: Path) -> None:
    from prefect.client.schemas.objects import StateType

    assert {*PREFECT_STATES} == {state.value for state in StateType}
    [run] = find_runs(tmp_path, [flow_run("one", kind)])
    assert run.state is PREFECT_STATES[kind]


def test_a_state_is_the_folders_unless_prefect_knows_better(tmp_path: Path) -> None:
    job = folder(tmp_path, "one")
    assert find_runs(tmp_path)[0].state is RunState.RUNNING
    assert find_runs(tmp_path, [flow_run("one", "CANCELLING")])[0].state is RunState.STOPPING
    write_json(record_path(job), read_json(record_path(job)) | {"pid": 2**22 + 1, "mark": ""})
    assert find_runs(tmp_path, [flow_run("one", "RUNNING")])[0].state is RunState.KILLED, "its process is gone"
    assert find_runs(tmp_path, [flow_run("one", "SCHEDULED")])[0].state is RunState.WAITING, "it was retried"
    folder(tmp_path, "one", outcome=RunOutcome.CANCELLED)
    assert find_runs(tmp_path, [flow_run("one", "CANCELLED")])[0].state is RunState.CANCELLED
    folder(tmp_path, "one", outcome=RunOutcome.FAILED)
    assert find_runs(tmp_path, [flow_run("one", "SCHEDULED")])[0].state is RunState.WAITING, "it will be tried again"


def test_an_evaluation_leaves_the_record_of_the_training(tmp_path: Path) -> None:
    job = folder(tmp_path, "one", outcome=RunOutcome.FAILED)
    record_end(job, record_start(job, {}, "evaluate", keeps=True), RunOutcome.FINISHED)
    assert find_runs(tmp_path)[0].state is RunState.FAILED
    own = record_start(job, {}, "rft")
    foreign = read_json(record_path(job)) | {"pid": os.getpid() + 1, "host": "elsewhere"}
    write_json(record_path(job), foreign)
    record_end(job, own, RunOutcome.FINISHED)
    assert find_runs(tmp_path)[0].state is RunState.RUNNING, "of a process elsewhere nothing is known"


def allowed(run: Run) -> str:
    return action_for(run) if not hindrance(run) else ""


def test_what_may_be_done_with_a_run(tmp_path: Path) -> None:
    folder(tmp_path / "going", "one")
    folder(tmp_path / "done", "one", outcome=RunOutcome.FINISHED)
    folder(tmp_path / "failed", "one", outcome=RunOutcome.FAILED)
    folder(tmp_path / "secret", "one", outcome=RunOutcome.FAILED, api_key="abc")
    elsewhere = folder(tmp_path / "elsewhere", "one")
    write_json(record_path(elsewhere), read_json(record_path(elsewhere)) | {"host": "elsewhere"})
    runs = {
        "running": find_runs(tmp_path / "going", [flow_run("one", "RUNNING")]),
        "done": find_runs(tmp_path / "done", [flow_run("one")]),
        "failed": find_runs(tmp_path / "failed", [flow_run("one", "FAILED")]),
        "waiting": find_runs(tmp_path / "none", [flow_run("one", "SCHEDULED")]),
        "by a command": find_runs(tmp_path / "going", [flow_run("one", "RUNNING", deployment="")]),
        "on another machine": find_runs(tmp_path / "elsewhere"),
        "resumed there": find_runs(tmp_path / "elsewhere", [flow_run("one", "FAILED")]),
        "with a secret": find_runs(tmp_path / "secret"),
        "with a secret, by a worker": find_runs(
            tmp_path / "secret", [flow_run("one", "FAILED", parameters={"configs": []})]
        ),
    }
    actions = {name: allowed(run) for name, [run] in runs.items()}
    assert actions == {
        "running": "Cancel",
        "done": "",
        "failed": "Retry",
        "waiting": "Cancel",
        "by a command": "Cancel",
        "on another machine": "",
        "resumed there": "",
        "with a secret": "",
        "with a secret, by a worker": "Retry",
    }


@pytest.mark.parametrize(
    ("mode", "algorithm", "is_part"),
    [
        ("both", "grpo", False), ("train", "grpo", True), ("explore", "grpo", True), ("serve", "grpo", True),
        ("train", "dpo", False), ("train", "own_dpo", False),
    ],
)  # fmt: skip
def test_a_part_that_a_command_started_does_not_stand_for_the_run(
    mode: str, algorithm: str, is_part: bool, tmp_path: Path
) -> None:
    """The run's folder knows one command, of a trainer or an explorer; a worker's flow run has all parts."""
    config = {"mode": mode, "algorithm": {"algorithm_type": algorithm}}
    if algorithm == "own_dpo":  # of a plugin
        config["buffer"] = {"trainer_input": {"experience_buffer": {"storage_type": "file"}}}
    going, done = tmp_path / "going", tmp_path / "done"
    folder(going, "one", **config)
    folder(done, "one", outcome=RunOutcome.FAILED, **config)
    for job, action, kind in ((going, "Cancel", "RUNNING"), (done, "Retry", "FAILED")):
        alone = "" if is_part else action
        by_command = flow_run("one", kind, deployment="")
        assert [allowed(*find_runs(job, seen)) for seen in ([], [by_command])] == [alone, alone]
        assert allowed(*find_runs(job, [flow_run("one", kind, parameters={"configs": []})])) == action


def test_parts_that_were_deployed_one_by_one_are_cancelled_together(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Trainer and explorer share the run's name; a retry of one of them alone would leave the other out."""
    asked: list[str] = []
    monkeypatch.setattr("studio.actions.cancel_run", lambda _, run: asked.append(run))
    kinds = {"explorer": "SCHEDULED", "trainer": "RUNNING"}
    parts = [flow_run("one", kind, id=name, deployment=name) for name, kind in kinds.items()]
    over = flow_run("one", "CRASHED", id="earlier", deployment="trainer")
    folder(tmp_path / "going", "one", mode="train")
    [run] = find_runs(tmp_path / "going", [*parts, over])
    perform(run, studio_settings([]))
    assert asked == ["explorer", "trainer"]
    folder(tmp_path / "done", "one", outcome=RunOutcome.FAILED, mode="train")
    failed = [replace(part, kind="FAILED") for part in parts]
    [run] = find_runs(tmp_path / "done", failed)
    assert allowed(run) != "Retry"
    subflows = [replace(part, deployment="") for part in failed]  # of one deployment that has all parts
    [run] = find_runs(tmp_path / "done", [flow_run("one", "FAILED"), *subflows])
    assert allowed(run) == "Retry"


def test_a_run_is_cancelled_by_who_leads_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A worker's run through Prefect, a command's by a signal to its process."""
    asked: list[tuple[object, ...]] = []
    monkeypatch.setattr("studio.actions.cancel_run", lambda _, run: asked.append(("cancel", run)))
    monkeypatch.setattr("studio.actions.retry_run", lambda _, run: asked.append(("retry", run)))
    monkeypatch.setattr("os.kill", lambda *arguments: asked.append(arguments))
    settings, job = studio_settings([]), folder(tmp_path, "one")
    resumed = flow_run("one", "FAILED")  # by a command, after the worker's run
    for seen in (flow_run("one", "RUNNING"), flow_run("one", "RUNNING", deployment=""), resumed):
        [run] = find_runs(tmp_path, [seen])
        perform(run, settings)
    record_end(job, read_record(job), RunOutcome.FAILED)
    [run] = find_runs(tmp_path, [flow_run("one", "FAILED")])
    perform(run, settings)
    by_signal = (os.getpid(), signal.SIGTERM)
    assert asked == [("cancel", "flow run one"), by_signal, by_signal, ("retry", "flow run one")]


def test_a_run_is_started_again_as_it_was(tmp_path: Path) -> None:
    job = folder(tmp_path, "one", outcome=RunOutcome.FAILED)
    assert find_runs(tmp_path, [flow_run("one")])[0].launch == Launch("my.yaml", ("seed=1",))
    assert find_runs(tmp_path)[0].launch == Launch(str(job / "monitor/config.yaml"))


def test_a_run_in_a_fresh_folder_is_meant_itself(tmp_path: Path) -> None:
    """With `continue_from_checkpoint: false` its name alone means the newest run, or a new one."""
    for name in ("one", "one_20260101000000"):
        claim(folder(tmp_path, name, outcome=RunOutcome.FAILED), "one", name)
    [run] = [run for run in find_runs(tmp_path, [flow_run("one")]) if run.name == "p/one"]
    assert run.launch is not None and run.launch.parameters["run"] == "one"
    assert run.launch.command[2:] == ["my.yaml", "seed=1", "name=one", "continue_from_checkpoint=true"]


def test_a_run_that_a_form_started_keeps_its_settings(tmp_path: Path) -> None:
    filled = {"config": "my.yaml", "overrides": ["seed=1"], "lr": 1e-4, "total_steps": None, "model_path": "m"}
    [run] = find_runs(tmp_path, [flow_run("one", parameters=filled)])
    settings = ("seed=1", "algorithm.optimizer.lr=0.0001", "model.model_path=m")
    assert run.launch == Launch("my.yaml", settings)


def test_a_repeated_setting_stands_once_in_a_command(tmp_path: Path) -> None:
    """A stage's flow run has its name as a parameter too."""
    asked = {"config": "my.yaml", "overrides": ["seed=1", "name=one", "seed=2"], "name": "one", "stage": "sft"}
    [run] = find_runs(tmp_path, [flow_run("one", parameters=asked)])
    assert run.launch is not None and run.launch.overrides == ("seed=2", "name=one")
    [run] = find_runs(tmp_path, [flow_run("one", parameters=asked | {"name": "yes", "overrides": ["lr=[1"]})])
    assert run.launch is not None and run.launch.overrides == ("lr=[1", 'name="yes"'), "a text, not a truth value"


def test_stages_are_cancelled_with_their_pipeline(tmp_path: Path) -> None:
    write_json(JobLayout(folder(tmp_path, "all")).stages, {"rft": "all_rft"})
    folder(tmp_path, "all_rft")
    parent = flow_run("all", "RUNNING", flow="pipeline")
    stage = flow_run("all_rft", "RUNNING", parameters={"config": "my.yaml", "stage": "rft"})
    above, below = find_runs(tmp_path, [parent, stage])
    assert (allowed(above), allowed(below)) == ("Cancel", "")


def test_a_launch_as_a_command_and_as_parameters() -> None:
    launch = Launch("my.yaml", ("seed=1",))
    assert launch.command == ["run", "--config", "my.yaml", "seed=1"]
    assert launch.parameters == {"config": "my.yaml", "overrides": ["seed=1"]}


def test_a_run_that_does_not_begin_says_its_last_line(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("studio.launch.TRINITY", [sys.executable, "-c", "print('begins'); exit('the port is taken')"])
    with pytest.raises(TrinityError, match=r"the port is taken .*\.trinity/studio/logs/p/one/0000\.log"):
        start_run(Launch("my.yaml"), "p/one", tmp_path / "p/one", studio_settings([]))


def test_a_run_starts_until_its_process_has_recorded_that(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    job = folder(tmp_path, "one", outcome=RunOutcome.CANCELLED)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("studio.launch.BEGIN_SECONDS", 0.1)
    monkeypatch.setattr("studio.launch.TRINITY", [sys.executable, "-c", "import time; time.sleep(600)"])
    assert not start_run(Launch("my.yaml"), "p/one", job, studio_settings([]))
    process, _ = starting[job]
    try:
        [run] = find_runs(tmp_path, [flow_run("one", "CANCELLED")])
        assert run.state is RunState.STARTING and not run.state.is_over and action_for(run) == ""
        own = record_start(job, {}, "rft")
        assert find_runs(tmp_path)[0].state is RunState.RUNNING
        record_end(job, own, RunOutcome.CANCELLED)
        assert find_runs(tmp_path)[0].state is RunState.CANCELLED
    finally:
        process.kill()
        process.wait(60)


def test_a_run_is_started_once_it_has_a_record(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its process continues, and can be cancelled from then on."""
    job = tmp_path / "p/one"
    begin = "import sys, time; from pathlib import Path; "
    begin += "from trinity_core.exchange.tracking.run_record import record_start; "
    begin += f"record_start(Path({str(job)!r}), {{}}, 'rft'); time.sleep(600)"
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("studio.launch.TRINITY", [sys.executable, "-c", begin])
    start_run(Launch("my.yaml"), "p/one", job, studio_settings([]))
    [run] = find_runs(tmp_path)
    pid = read_record(job).pid
    try:
        assert run.state is RunState.RUNNING and "save at" in perform(run, studio_settings([]))
        waited = (find_runs(tmp_path)[0].state is RunState.KILLED for _ in poll(60))
        assert any(waited), "it has not ended"
    finally:
        with suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)
