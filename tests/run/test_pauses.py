"""When a run waits for a person, what is recorded of the decision, and which settings it may change."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import asdict, replace
from pathlib import Path
from pkgutil import resolve_name
from types import SimpleNamespace
from typing import Any

import pytest
from commands import called
from raising import raising

from trinity_core.base.errors import InputError, Paused, TrinityError
from trinity_core.config import Config, ConfigError, config_from_dict, stages
from trinity_core.data.tiny import TinyFolders
from trinity_core.exchange.tracking.pauses import (
    AFTER_STEPS,
    Decision,
    Pause,
    decided_settings,
    pause_at,
    pause_steps,
    read_pauses,
    record_pause,
    undo_pauses,
)
from trinity_core.results.doctor import Diagnosis
from trinity_core.run import driver
from trinity_core.run.attempt import Frontend
from trinity_core.run.configuration import with_settings
from trinity_core.run.pauses import PauseWatch, decided, require_waiting, stopped_by_person
from trinity_core.run.stage import Stage, StageRequest, unlock_run
from trinity_core.run.summary import summary_text

LR = "algorithm.optimizer.lr"
FINDING = Diagnosis("cut-off", "90 %", "why", "next")


def config_of(root: Path, **pause: Any) -> Config:
    return Config().with_values(
        {"checkpoint_root_dir": str(root)} | {f"monitor.pause.{name}": value for name, value in pause.items()}
    )


@pytest.mark.parametrize(
    ("text", "decision", "settings"),
    [
        ("stop", "stop", []),
        (" continue ", "continue", []),
        (f"continue {LR}=1e-5 buffer.batch_size=8", "continue", [f"{LR}=1e-5", "buffer.batch_size=8"]),
        ("continue 'a.b=[1, 2]'", "continue", ["a.b=[1, 2]"]),
    ],
)
def test_a_decision_is_read(text: str, decision: str, settings: list[str]) -> None:
    read = Decision.parse(text, "Ada", " why ")
    assert (read.decision, list(read.settings), read.by, read.reason) == (decision, settings, "Ada", "why")


@pytest.mark.parametrize("text", ["", "halt", "stop a.b=1", "continue a.b", "continue =1", "continue 'a"])
def test_other_texts_are_no_decision(text: str) -> None:
    with raising(InputError, key="decision"):
        Decision.parse(text)


@pytest.mark.parametrize("key", ["explorer.env_vars.X", "monitor.monitor_args.api_key"])
def test_a_decision_is_recorded_so_it_holds_no_secret(key: str) -> None:
    with raising(InputError, key=key):
        Decision.parse(f"continue {key}=hush")


def test_a_pause_is_kept_with_its_decision(tmp_path: Path) -> None:
    record_pause(tmp_path, Pause(3, AFTER_STEPS))
    record_pause(tmp_path, Pause(3, AFTER_STEPS, (), Decision("continue", [f"{LR}=1"], "Ada")))
    record_pause(tmp_path, Pause(3, "a finding", ("cut-off",), Decision("continue", [f"{LR}=2"])))
    record_pause(tmp_path, Pause(7, AFTER_STEPS))
    assert [(pause.step, pause.decided.decision) for pause in read_pauses(tmp_path)] == [
        (3, "continue"), (3, "continue"), (7, ""),
    ]  # fmt: skip
    both = [f"{LR}=1", f"{LR}=2"]
    assert [decided_settings(tmp_path, step) for step in (2, 3, 8)] == [[], both, both]
    undo_pauses(tmp_path, 5)
    assert [pause.step for pause in read_pauses(tmp_path)] == [3, 3]
    undo_pauses(tmp_path, 2)
    record_pause(tmp_path, Pause(3, AFTER_STEPS))
    assert not decided_settings(tmp_path, 8), "the run went back behind step 3, and asks again"


def test_a_step_pauses_again_only_if_the_run_went_back_behind_it(tmp_path: Path) -> None:
    config = config_of(tmp_path, after_steps=[2, 5])
    assert pause_steps(config, 2) == {2, 5}, "a kill came between the checkpoint and the record"
    record_pause(config.job_dir, Pause(2, AFTER_STEPS, (), Decision("continue")))
    record_pause(config.job_dir, Pause(2, "a finding", ("cut-off",), Decision("continue")))
    assert [pause_steps(config, step) for step in (0, 2)] == [{2, 5}, {5}]


def test_a_finding_pauses_once(tmp_path: Path) -> None:
    config, diagnosis = config_of(tmp_path, at_findings=True), FINDING
    watch = PauseWatch(config)
    assert not watch.is_due()
    watch.note_findings(diagnosis)
    assert watch.is_due()
    assert watch.pause({"step": 9, "ended": "finished"}) is None, "nothing is left to pause"
    pause = watch.pause({"step": 4, "ended": "stopped"})
    assert pause is not None and (pause.step, tuple(pause.checks)) == (4, ("cut-off",))
    record_pause(config.job_dir, pause)
    for later in (PauseWatch(config), PauseWatch(config_of(tmp_path))):
        later.note_findings(diagnosis)
        assert not later.is_due()


@pytest.mark.parametrize("ended", ["paused", "stopped"])
def test_a_finding_at_a_step_that_pauses_anyway_is_asked_about_with_it(tmp_path: Path, ended: str) -> None:
    config = config_of(tmp_path, after_steps=[2, 4], at_findings=True)
    watch = PauseWatch(config)
    watch.note_findings(FINDING)
    pause = watch.pause({"step": 2, "ended": ended})
    assert pause is not None and "90 %" in pause.cause
    record_pause(config.job_dir, replace(pause, decided=Decision("continue")))
    later = PauseWatch(config)
    later.note_findings(FINDING)
    assert not later.is_due() and pause_steps(config, 2) == {4}


def asked(*answers: str | None) -> tuple[Callable[[Config, str], Decision | None], list[str]]:
    """Return a person who gives these answers, and the texts that the person sees."""
    left, texts = list(answers), list[str]()

    def ask(config: Config, text: str) -> Decision | None:
        texts.append(text)
        answer = left.pop(0)
        return None if answer is None else Decision.parse(answer, "Ada")

    return ask, texts


def stage_of(config: Config, step: int) -> Any:
    return SimpleNamespace(config=config, resumed_step=step)


def test_a_person_is_asked_again_if_settings_are_refused(tmp_path: Path) -> None:
    config = config_of(tmp_path)
    waiting, changed = stage_of(config, 3), stage_of(config, 3)
    record_pause(config.job_dir, Pause(3, AFTER_STEPS))

    def resolve(decision: Decision) -> Any:
        if decision.settings == ["model.model_path=other"]:
            raise TrinityError("another model")
        return changed

    ask, texts = asked("continue model.model_path=other", f"continue {LR}=1")
    assert decided(waiting, None, ask, resolve) is changed
    assert len(texts) == 2 and "another model" in texts[1]
    assert decided_settings(config.job_dir, 3) == [f"{LR}=1"]
    assert decided(waiting, Decision("stop"), ask, resolve) is waiting, "the run does not wait any more"


def test_nobody_decides(tmp_path: Path) -> None:
    config = config_of(tmp_path)
    record_pause(config.job_dir, Pause(3, AFTER_STEPS))
    with pytest.raises(Paused):
        decided(stage_of(config, 3), None, asked(None)[0], lambda _: pytest.fail("nothing is decided"))
    pause = pause_at(config.job_dir, 3)
    assert pause is not None and pause.decided.decision == ""


def test_nobody_decides_at_a_closed_input(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from tasks.frontend import PrefectFrontend

    monkeypatch.setattr("sys.stdin", None)
    for frontend in (Frontend(), PrefectFrontend(has_page=False)):
        assert frontend.decides(config_of(tmp_path), "the run waits") is None


def test_a_stopped_run_continues_only_if_a_person_says_so(tmp_path: Path) -> None:
    config = config_of(tmp_path)
    stage, (ask, texts) = stage_of(config, 3), asked()
    record_pause(config.job_dir, Pause(3, AFTER_STEPS, (), Decision("stop", (), "Ada", "enough")))
    for given in (None, Decision("stop")):
        assert decided(stage, given, ask, lambda _: stage) is stage and not texts
    reason = stopped_by_person(config, 3)
    assert "enough" in reason and not stopped_by_person(config, 4)
    ended = {"project": "p", "name": "n", "step": 3, "scores": {}, "stopped_early": f"rft: {reason}"}
    ended |= dict.fromkeys(("checkpoint_dir", "hf_dir", "tracking"))
    ended |= {"pauses": [asdict(pause) for pause in read_pauses(config.job_dir)]}
    assert summary_text(ended).count(reason) == 1
    decided(stage, Decision("continue"), ask, lambda _: stage)
    assert not stopped_by_person(config, 3)
    assert [pause.decided.decision for pause in read_pauses(config.job_dir)] == ["stop", "continue"]


def test_nothing_waits(tmp_path: Path) -> None:
    with raising(TrinityError, key="decide"):
        require_waiting(config_of(tmp_path))


@pytest.mark.parametrize("is_pipeline", [True, False])
def test_a_stopped_stage_of_a_pipeline_is_done(tmp_path: Path, tiny_folders: TinyFolders, is_pipeline: bool) -> None:
    """Only a run on its own continues after it has been stopped and evaluated."""
    config = supervised(tmp_path, tiny_folders, **({"stages": [{"stage_name": "sft"}]} if is_pipeline else {}))
    [stage] = stages(config)
    record_pause(stage.job_dir, Pause(0, AFTER_STEPS, (), Decision("stop")))
    require_waiting(config)
    (stage.job_dir / "summary.json").write_text("{}")
    with raising(TrinityError, key="decide") if is_pipeline else nullcontext():
        require_waiting(config)


@pytest.mark.parametrize(("program", "command"), [("flows.cli", ["run"]), ("trinity_core.run.__main__", [])])
def test_a_text_that_is_no_decision_is_wrong_usage(program: str, command: list[str]) -> None:
    main = resolve_name(f"{program}:main")
    done = called(main, *command, "--config", "nowhere.yaml", "--decide", "cont")
    assert done.returncode == 2 and "'cont'" in done.stderr, done.stderr


def test_settings_of_a_stage_are_changed_and_what_its_start_assigned_stays(tmp_path: Path) -> None:
    stage = {"stage_name": "rft", "buffer": {"batch_size": 4}}
    data = {"explorer_input": {"taskset": {"path": "rows.jsonl"}}, "total_steps": 3}
    model = {"model_path": "first", "max_model_len": 64}
    tree = {"checkpoint_root_dir": str(tmp_path), "stages": [stage], "buffer": data, "model": model}
    [run] = stages(config_from_dict(tree))
    started = run.with_values({"model.model_path": "previous", "name": "fresh"})
    changed = with_settings(started, [f"{LR}=0.25", "buffer.batch_size=6"])
    assert (changed.algorithm.optimizer.lr, changed.buffer.batch_size) == (0.25, 6)
    assert changed.buffer.train_batch_size == 6 * changed.algorithm.repeat_times, "derived settings follow"
    assert (changed.model.model_path, changed.name) == ("previous", "fresh")
    with pytest.raises(ConfigError) as refused:
        with_settings(started, ["algorithm.optimizer.lrate=1", "buffer.batch_size=0"])
    assert len(refused.value.problems) == 2
    with raising(InputError, key="name"):
        with_settings(started, ["name=other"])


def supervised(root: Path, tiny: TinyFolders, **more: Any) -> Config:
    columns = {"prompt_key": "question", "response_key": "answer"}
    data = {"path": str(tiny.data), "split": "sft", "format": columns}
    return config_from_dict(
        {
            "mode": "train", "checkpoint_root_dir": str(root),
            "algorithm": {"algorithm_type": "sft", "optimizer": {"lr": 0.5}},
            "model": {"model_path": str(tiny.model), "max_model_len": 128},
            "cluster": {"gpu_per_node": 0},
            "buffer": {"train_batch_size": 4, "total_steps": 3, "trainer_input": {"experience_buffer": data}},
            **more,
        }
    )  # fmt: skip


def test_what_changed_settings_name_is_opened_before_they_are_kept(tmp_path: Path, tiny_folders: TinyFolders) -> None:
    """Also right after preflight, which has opened what the file names."""
    config = supervised(tmp_path, tiny_folders)
    record_pause(config.job_dir, Pause(0, AFTER_STEPS))
    key = "buffer.trainer_input.experience_buffer.path"
    decision = Decision("continue", [f"{key}={tmp_path}/nowhere"])
    with pytest.raises(ConfigError) as refused:
        driver.run_request(StageRequest(config, is_ready=True), Frontend(decision))
    assert [problem.key for problem in refused.value.problems] == [key]
    assert [pause.decided.decision for pause in read_pauses(config.job_dir)] == [""]


def test_a_run_that_lost_the_checkpoint_of_its_pause_forgets_the_decision(
    tmp_path: Path, tiny_folders: TinyFolders
) -> None:
    data = {"name": "train", "path": str(tiny_folders.data), "split": "train", "reward_fn_args": {"pattern": "e"}}
    taskset = {**data, "format": {"prompt_key": "question", "response_key": "answer"}}
    explored = {"taskset": taskset, "default_reward_fn_type": "format_reward"}
    config = supervised(
        tmp_path, tiny_folders, mode="both", algorithm={"algorithm_type": "grpo", "repeat_times": 2},
        buffer={"batch_size": 2, "total_steps": 3, "explorer_input": explored},
    )  # fmt: skip
    record_pause(config.job_dir, Pause(2, AFTER_STEPS, (), Decision("continue", [f"{LR}=0.25"])))
    stage = driver.resolve(StageRequest(config))
    unlock_run(stage)
    assert stage.config.algorithm.optimizer.lr == config.algorithm.optimizer.lr
    assert not read_pauses(config.job_dir)


@pytest.mark.parametrize("continues", [True, False])
def test_the_driver_asks_between_the_attempts_at_a_stage(
    tmp_path: Path, tiny_folders: TinyFolders, monkeypatch: pytest.MonkeyPatch, continues: bool
) -> None:
    """Also in a fresh folder, which the next attempt keeps. Only the attempts themselves are stand-ins."""
    config = supervised(tmp_path, tiny_folders, continue_from_checkpoint=continues)
    (config.job_dir / "buffer").mkdir(parents=True)  # of an earlier run
    attempts: list[Stage] = []

    def attempt(stage: Stage, frontend: Frontend) -> dict[str, Any] | None:
        attempts.append(stage)
        if len(attempts) < 3:
            record_pause(stage.config.job_dir, Pause(0, f"pause {len(attempts)}"))
        unlock_run(stage)
        return None if len(attempts) < 3 else {"name": stage.config.name}

    class Person(Frontend):
        def __init__(self) -> None:
            super().__init__()
            self.ask, self.texts = asked("continue name=other", f"continue {LR}=0.25", "continue")

        def decides(self, config: Config, text: str) -> Decision | None:
            return self.ask(config, text)

    monkeypatch.setattr(driver, "run", attempt)
    person = Person()
    summary = driver.run_request(StageRequest(config), person)
    assert [stage.config.algorithm.optimizer.lr for stage in attempts] == [0.5, 0.25, 0.25]
    assert len({stage.config.job_dir for stage in attempts}) == 1
    assert (summary["name"] == config.name) is continues
    assert [stage.made_from["settings"][LR] for stage in attempts] == [0.5] * 3, "the file's: the stage stays done"
    assert len(person.texts) == 3 and "pause 2" in person.texts[2]


def test_a_part_of_an_asynchronous_run_does_not_pause() -> None:
    tree = {
        "mode": "train",
        "monitor": {"pause": {"after_steps": [2], "at_findings": True}},
        "buffer": {"train_batch_size": 4, "total_steps": 3},
    }
    with pytest.raises(ConfigError) as refused:
        config_from_dict(tree)
    keys = [problem.key for problem in refused.value.problems]
    assert {"monitor.pause.after_steps", "monitor.pause.at_findings"} <= {*keys}


def test_a_retry_does_not_repeat_the_decision(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of a run that was continued with `--decide`, that a person has stopped since, and whose evaluation failed."""
    config = config_of(tmp_path)
    record_pause(config.job_dir, Pause(3, AFTER_STEPS, (), Decision("stop", (), "Ada")))

    class Retry(Frontend):
        def is_retry(self) -> bool:
            return True

        def with_human_verdicts(self, stage: Stage) -> Stage:
            return stage

    monkeypatch.setattr(driver, "resolve", lambda *_: stage_of(config, 3))
    monkeypatch.setattr(driver, "run", lambda *_: {"step": 3})
    driver.run_request(StageRequest(config), Retry(Decision("continue")))
    assert stopped_by_person(config, 3)
