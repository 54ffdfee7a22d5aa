"""The driver's steps as Prefect tasks and subflows, with artifacts; a pause in which a person gives verdicts."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict
from typing import Any, TypeVar, cast
from uuid import uuid4

from prefect import flow
from prefect.artifacts import create_markdown_artifact
from prefect.client.orchestration import get_client
from prefect.client.schemas.filters import FlowFilter, FlowRunFilter
from prefect.client.schemas.objects import StateDetails
from prefect.client.schemas.sorting import FlowRunSort
from prefect.exceptions import Abort, FlowPauseTimeout
from prefect.flow_runs import pause_flow_run
from prefect.futures import PrefectConcurrentFuture
from prefect.input import RunInput
from prefect.logging import get_run_logger
from prefect.runtime import flow_run
from prefect.states import Cancelled, Completed, Running, State
from prefect.utilities.urls import url_for
from pydantic import Field, create_model

from tasks.prefect_api import WITH_FINDINGS, with_main_settings
from tasks.reports import (
    LiveReport,
    artifact_key,
    begin_summary,
    label_run,
    show_curve,
    show_if_possible,
    show_rollouts,
    show_stage,
    show_summary,
)
from tasks.retries import PIPELINE, RETRIED, named_task, patient_task, retry_only_transient_faults
from trinity_core.base.errors import InputError, TrinityError
from trinity_core.base.timing import duration
from trinity_core.config import Config
from trinity_core.data.experience import Experience
from trinity_core.exchange.tracking.pauses import CONTINUE, STOP, Decision
from trinity_core.exchange.tracking.rollouts import markdown_text
from trinity_core.hosting.faults import Stopped, is_cancelled, raise_most_telling
from trinity_core.results.doctor import Diagnosis
from trinity_core.run.attempt import Frontend, Stoppable, wait_for_all
from trinity_core.run.pauses import has_terminal
from trinity_core.run.stage import Stage, StageRequest
from trinity_core.run.verdicts import (
    ShownTask,
    TaskVerdict,
    Verdict,
    asks_person,
    keep_verdicts,
    shown_tasks,
)

POLL_SECONDS = 5
WIDTH = 4000
"""Characters shown of an answer; the middle of a longer one is cut out."""
TYPED: Mapping[str, Verdict] = {"keep": "keep", "drop": "drop", "": "no verdict"}
"""Text of a field, in small letters → verdict. It is typed, because a select on Prefect's page closes at the click that
opens it."""


def one_of(*words: str) -> str:
    """Return the pattern of a field that takes one of these words, in any case."""
    return rf"(?i)^\s*({'|'.join(words)})\s*$"


@named_task("ask")
def ask(stage: Stage) -> bool:
    """Pause the flow until a person has given verdicts, and save them. Return False if the run continues without.

    Raises TrinityError if the run must end without them.
    """
    log, config = get_run_logger(), stage.config
    buffer = config.buffer.trainer_input.experience_buffer
    settings, shown = buffer.human_verdicts, shown_tasks(buffer)
    key, title = artifact_key(config, "verdicts"), f"verdicts on {len(shown)} tasks"
    form = _asked(verdict_form(shown), settings.timeout, as_markdown(shown), key, title)
    rows = 0 if form is None else keep_verdicts(config, shown, verdicts_of(form, shown))
    if rows:
        log.info("A person's verdicts make %d rows", rows)
    elif settings.on_timeout == "end":
        raise TrinityError(
            f"no verdict was given within {duration(settings.timeout)}; the run asks again when it is started again"
        )
    else:
        log.warning("No verdict was given within %s: the run continues with the rewards", duration(settings.timeout))
    return rows > 0


class Approval(RunInput):
    """The form that Prefect shows where a promotion waits for a person."""

    promote: str = Field("", title="Promote the candidate? yes or no", pattern=one_of("yes", "no"))
    reason: str = Field("", title="Reason, kept with the champion")


@named_task("approve")
def approve(config: Config, text: str) -> str | None:
    """Pause the flow until a person approves a promotion, and return the reason. None if nobody does in time."""
    log, timeout = get_run_logger(), config.gate.approval_timeout
    form = _asked(Approval, timeout, f"```\n{text}\n```", artifact_key(config, "gate"), "approval of a promotion")
    if form is None:
        log.warning("Nobody approved the promotion within %s", duration(timeout))
        return None
    log.info("A person says %s: %s", form.promote.strip(), form.reason)
    return form.reason if form.promote.strip().lower() == "yes" else None


class PausedRun(RunInput):
    """The form that Prefect shows where a run has paused."""

    decision: str = Field("", title="continue or stop", pattern=one_of(CONTINUE, STOP))
    settings: str = Field("", title="Settings to change: key=value, separated by spaces")
    by: str = Field("", title="Your name")
    reason: str = Field("", title="Reason, kept with the run")


@named_task("pause")
def pause(config: Config, text: str) -> Decision | None:
    """Pause the flow until a person decides how its run continues. None if nobody does in time."""
    key, title = artifact_key(config, "pause"), "a decision on a paused run"
    form = _asked(PausedRun, config.monitor.pause.timeout, f"```\n{text}\n```", key, title)
    return None if form is None else Decision.parse(f"{form.decision.lower()} {form.settings}", form.by, form.reason)


def _asked(form: type[R], timeout: float, text: str, key: str, title: str) -> R | None:
    """Show `text` as the artifact `key`, and pause the flow until a person fills in `form`; None if nobody does within
    `timeout` seconds."""
    show_if_possible(lambda: create_markdown_artifact(text, key=key, description=title))
    where = url_for("flow-run", obj_id=flow_run.id) or "Prefect's page of this flow run"
    get_run_logger().info("A person is asked for %s, for %s: resume this run at %s", title, duration(timeout), where)
    try:
        # Prefect's own key is the same in each attempt: a later one would take the earlier one's answer instead of
        # pausing.
        return pause_flow_run(form, math.ceil(timeout), POLL_SECONDS, key=uuid4().hex)
    except FlowPauseTimeout:
        _set_running()
        return None


def _set_running() -> None:
    """Set the run to Running, because after a timed-out pause Prefect would only let it fail.

    Raises Abort, which ends the run in its current state, if it was cancelled during the pause.
    """
    with get_client(sync_client=True) as client:
        state = client.read_flow_run(flow_run.id).state
        if state is not None and (state.is_cancelled() or state.is_cancelling()):
            raise Abort("The run was cancelled while it waited for a person")
        client.set_flow_run_state(flow_run.id, Running(), force=True)


def as_markdown(shown: Sequence[ShownTask]) -> str:
    """Format the tasks with their answers; model output is escaped."""
    parts = []
    for number, item in enumerate(shown, 1):
        parts.append(f"### {number}. {markdown_text(item.prompt, WIDTH)}\n")
        for letter, answer in zip(_letters(item), item.answers, strict=True):
            parts.append(f"**{number}{letter}** {_answer(answer)}\n")
    return "\n".join(parts)


def _answer(answer: Experience) -> str:
    reward = "no reward" if answer.reward is None else f"reward {answer.reward:g}"
    return f"({reward})\n\n> {markdown_text(answer.info['response'], WIDTH)}"


def verdict_form(shown: Sequence[ShownTask]) -> type[RunInput]:
    """Return the form that Prefect shows: a verdict for each answer, and room for a better answer for each task.

    Task and answers are shown at their fields, because a form's description has no room next to many fields.
    """
    fields: dict[str, Any] = {}
    for number, item in enumerate(shown, 1):
        heading = f"**{number}. {markdown_text(item.prompt, WIDTH)}**\n\n"
        for letter, answer in zip(_letters(item), item.answers, strict=True):
            text = (heading if answer is item.answers[0] else "") + _answer(answer)
            field = Field("", title=f"Answer {number}{letter}: keep or drop?", description=text, pattern=one_of(*TYPED))
            fields[f"answer_{number}{letter}"] = (str, field)
        fields[f"better_{number}"] = (str, Field("", title=f"A better answer to {number}"))
    form: type[RunInput] = create_model("HumanVerdicts", __base__=RunInput, **fields)
    form._description = "Type keep or drop, or write better answers; answers without a verdict are left out."
    return form


def verdicts_of(form: RunInput, shown: Sequence[ShownTask]) -> list[TaskVerdict]:
    entries = form.model_dump()
    return [
        TaskVerdict(
            [TYPED[entries[f"answer_{number}{letter}"].strip().lower()] for letter in _letters(item)],
            entries[f"better_{number}"],
        )
        for number, item in enumerate(shown, 1)
    ]


def _letters(task: ShownTask) -> Sequence[str]:
    return [chr(ord("a") + index) if index < 26 else f"_{index}" for index in range(len(task.answers))]


T = TypeVar("T")
R = TypeVar("R", bound=RunInput)


def with_findings(findings: Sequence[Mapping[str, str]], result: T, reason: str = "") -> T | State[T]:
    """Return `result`, or with findings a completed state of another name that lists them after the `reason`, if any,
    for which the run has ended."""
    texts = [*filter(None, [reason]), *(f"{finding['check']}: {finding['evidence']}" for finding in findings)]
    return Completed(name=WITH_FINDINGS, message="; ".join(texts), data=result) if findings else result


def _stage_before(request: StageRequest) -> list[State[Any]]:
    """Return the stage of this flow run whose model the requested one takes, for Prefect's graph; empty if it takes
    none, or if no stage has made one in this flow run.

    Only states of tasks become arrows, and only to a subflow's own id, not to that of its task.
    """
    if not (request.model_path or request.run):
        return []
    stages = FlowFilter.model_validate({"name": {"any_": ["sft", "rft", "gate"]}})
    done = {"parent_flow_run_id": {"any_": [flow_run.id]}, "state": {"type": {"any_": ["COMPLETED"]}}}
    with get_client(sync_client=True) as client:
        newest = client.read_flow_runs(
            flow_filter=stages,
            flow_run_filter=FlowRunFilter.model_validate(done),
            sort=FlowRunSort.END_TIME_DESC,
            limit=1,
        )
    return [Completed(data="done", state_details=StateDetails(task_run_id=run.id)) for run in newest]


class PrefectFrontend(Frontend):
    """Use it within a flow. Steps are closures: their values stay in this process."""

    report = LiveReport

    def __init__(self, has_page: bool = True, decision: Decision | None = None) -> None:
        """`has_page`: False for the API of a command, which serves no page on which a person could answer."""
        super().__init__(decision)
        self.has_page = has_page

    def call(self, name: str, step: Callable[[], T], retries: bool = False) -> T:
        """Run the step as a task; with `retries` the task has retries, for a flow of several runs, which has none
        itself."""
        as_task = patient_task(name) if retries else named_task(name)
        return as_task(step)()

    def examine(self, name: str, find: Callable[[], list[Diagnosis]]) -> list[Diagnosis]:
        """Run an examination as a task whose state tells whether it found something; without Prefect's API as a plain
        call."""
        found: list[list[Diagnosis]] = []

        def examination() -> Any:
            found.append(find())
            return with_findings([asdict(diagnosis) for diagnosis in found[-1]], None)

        show_if_possible(lambda: named_task(name)(examination)())
        return found[-1] if found else find()

    def subflow(self, request: StageRequest, run: Callable[[], T]) -> T:
        """Run a stage as a subflow with retries. It gets its configuration as a value, which Prefect does not store."""
        results, stopped = list[T](), list[Stopped]()

        def stage_flow(name: str, stage: str, model_path: str, config: str, overrides: list[str]) -> State[Any] | None:
            # Not returned: Prefect would record the next stage's arguments as results of this flow run, and its page
            # shows no tasks at all with such inputs (PrefectHQ/prefect 18680).
            with retry_only_transient_faults():
                try:
                    results.append(run())
                except Stopped as error:
                    if not is_cancelled():
                        raise  # another attempt follows
                    stopped.append(error)
                    return Cancelled(message=str(error))
            return None

        # Prefect finds the subflow's run by this name when its parent flow is restarted.
        name = request.run or request.config.name
        stage_flow.__qualname__ = "_".join([request.kind, name, request.stage, request.which]).replace(".", "_")
        title = request.title
        as_flow: Any = flow(name=request.kind, flow_run_name=lambda: title, persist_result=False, **RETRIED)
        above = flow_run.parameters
        file = request.file or str(above.get("config", ""))
        overrides = with_main_settings(above.get("overrides") or (), "", name=above.get("name"))
        before = _stage_before(request)
        token = PIPELINE.set(flow_run.id)
        try:
            as_flow(stage_flow)(name, request.stage, request.model_path, file, overrides, wait_for=before)
        except Exception:
            raise_most_telling(stopped)  # Prefect raises CancelledRun instead, or an earlier attempt's fault
            raise
        finally:
            PIPELINE.reset(token)
        return results[-1]

    def run_components(self, run: Stoppable, components: Mapping[str, Callable[[], T]]) -> dict[str, T]:
        stopped = dict[str, Stopped]()

        def as_task(name: str, component: Callable[[], T]) -> PrefectConcurrentFuture[Any]:
            def ended() -> T | State[Any]:
                try:
                    return component()
                except Stopped as error:
                    stopped[name] = error
                    return Cancelled(message=str(error))

            return cast(PrefectConcurrentFuture[Any], named_task(name)(ended).submit())

        futures = {name: as_task(name, component) for name, component in components.items()}
        # The wrapped future holds the state; the Prefect future would need an API call for it.
        wait_for_all(
            run,
            [future.wrapped_future for future in futures.values()],
            has_failed=lambda future: not future.result().is_completed(),
        )
        results: dict[str, Any] = {
            name: stopped.get(name) or future.result(raise_on_failure=False) for name, future in futures.items()
        }
        raise_most_telling([result for result in results.values() if isinstance(result, BaseException)])
        return results

    def begun_by(self) -> str:
        return flow_run.root_flow_run_id or ""

    def is_retry(self) -> bool:
        """True after the first attempt at the flow run, or at the stage's subflow run, by Prefect's count."""
        return bool(flow_run.run_count > 1)

    def announce(self, config: Config, stage: str, ending: str = "") -> None:
        """Name and tag the flow run, and link to Studio while that is served."""
        algorithm = [] if config.stages else [f"algorithm:{config.algorithm.algorithm_type}"]
        label_run(config.project, config.name, stage, *algorithm, ending=ending)
        show_if_possible(lambda: begin_summary(config))

    def with_human_verdicts(self, stage: Stage) -> Stage:
        if asks_person(stage.config) and not ask(stage):
            return stage
        return super().with_human_verdicts(stage)

    def decides(self, config: Config, text: str) -> Decision | None:
        """Ask at the terminal of the command that runs the flow, or on Prefect's page, if there is one."""
        if has_terminal() or not self.has_page:
            return super().decides(config, text)
        try:
            return pause(config, text)
        except InputError as error:
            return self.decides(config, f"{text}\n\n{error}")

    def approves(self, config: Config, text: str) -> str | None:
        return approve(config, text)

    def show(self, config: Config, summary: dict[str, Any], is_pipeline: bool = False) -> None:
        if not is_pipeline:
            show_if_possible(lambda: show_curve(config))
            show_if_possible(lambda: show_rollouts(config))
        self.show_so_far(config, summary)

    def show_so_far(self, config: Config, summary: dict[str, Any], running: str = "") -> None:
        show_if_possible(lambda: show_summary(config, summary, running))
        if config.stages:
            show_if_possible(lambda: show_stage(config, summary))


PREFECT = PrefectFrontend()
