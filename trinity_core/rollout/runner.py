"""Runs the workflows of many tasks concurrently, with a time limit and retries. A failing task does not affect
others."""

from __future__ import annotations

import asyncio
import logging
import math
import sysconfig
import time
import traceback
from collections.abc import Callable, Coroutine, Sequence
from concurrent.futures import Executor
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np

from trinity_core.base.errors import EndpointError, RewardError, TransientFault, TrinityError, WeightSyncError
from trinity_core.base.threads import InterruptibleThreads, RunsElsewhere
from trinity_core.base.timing import UNCOUNTED, BusyTimer
from trinity_core.config.schema.explorer import DynamicTimeoutConfig, OverRolloutConfig
from trinity_core.data.experience import Experience
from trinity_core.data.files import RejectedRow, RowLocation
from trinity_core.data.rejected import FAILED_IN_A_ROW, RejectedRows
from trinity_core.data.task import Task
from trinity_core.rollout.openai_api.model import ApiModel, ApiModels, SessionCounts
from trinity_core.rollout.workflow_loops import LoopBlocked, WorkflowLoop, WorkflowTimeout
from trinity_core.workflows import RecordingModel, Reward, RewardItem, RewardRunner, RolloutModel, run_workflow
from trinity_core.workflows.base import RolloutsFailed, all_of
from trinity_core.workflows.rewards.base import VERIFIER_ERRORS
from trinity_core.workflows.rewards.models import MODEL_REWARDS

log = logging.getLogger(__name__)

OTHER_DISTRIBUTION = (
    "samples with top_p, top_k, repetition_penalty, min_tokens or its own temperature, for which vLLM on a GPU reports "
    "no log-probs over the whole vocabulary; set them (min_tokens: `model.min_response_tokens`) in `rollout_args` of "
    "the task set, with a temperature of 1, and leave them out of the workflow's call"
)


OVER_ROLLOUT = "over_rollout"
"""Why a task that its step did not wait for is not trained on."""
NO_VERDICT = "no answer that could be judged"
CUT = (
    "a prompt that is too long: it was cut, and nothing was sampled. Raise model.max_prompt_tokens, or have such rows "
    "rejected at the start by model.enable_prompt_truncation: false"
)
UNASKED = (
    "agents that got no answer of the policy: they sent no request to their session's address, or only ones that were "
    "refused, such as prompts of model.max_model_len tokens or more"
)
NOT_OWN = ("<", str(Path(__file__).parents[1]), *map(sysconfig.get_path, ("stdlib", "purelib", "platlib")))
"""Path prefixes of library and generated code, which are skipped when locating an error in the user's code."""


@dataclass(slots=True)
class Outcome:
    """The result of one task: its experiences, or why it failed."""

    task: Task
    experiences: list[Experience] = field(default_factory=list)
    retries: int = 0
    error: BaseException | None = None
    """Error of the last attempt; None if a rollout succeeded."""
    failed_runs: tuple[int, ...] = ()
    """Rollouts that failed in the last attempt; if others succeeded, the group goes on without them."""
    dropped: str = ""
    """Why its experiences are not trained on; "" if they are."""
    sessions: SessionCounts | None = None
    """Sessions of the OpenAI API, those of failed attempts included; None if it is not served."""
    span: tuple[float, float] | None = None
    """Start and end of the last attempt, in Unix seconds; None if no workflow ran here."""

    @property
    def failed(self) -> bool:
        """True if every rollout failed in every attempt."""
        return self.error is not None

    @property
    def lost(self) -> str:
        """Return why there is nothing to learn from it: it failed, or no answer could be judged. "" if there is
        something."""
        if self.error is not None:
            return cause(self.error)
        errors = [
            str(experience.info.get("verifier_error", NO_VERDICT))
            for experience in self.experiences
            if experience.is_unscored and experience.metrics.get(VERIFIER_ERRORS)
        ]
        return errors[0] if errors and len(errors) == len(self.experiences) else ""

    @property
    def is_cut(self) -> bool:
        """True if nothing was sampled: its prompts are too long, or its agents asked nothing."""
        return bool(self.experiences) and all(experience.is_unsampled for experience in self.experiences)

    @property
    def further_groups(self) -> set[str]:
        """Groups that its workflow made below the task's own group."""
        return {
            experience.group for experience in self.experiences if experience.group.startswith(f"{self.task.group}/")
        }

    @property
    def of_task(self) -> list[Experience]:
        further = self.further_groups
        return [experience for experience in self.experiences if experience.group not in further]


@dataclass(slots=True)
class EvaluationProgress:
    what: str
    total: int
    done: int = 0

    @property
    def text(self) -> str:
        return f"{self.what}: {self.done} of {self.total} tasks"

    def one_more(self) -> None:
        self.done += 1


@dataclass
class Pace:
    """How long the workflows of explore steps take, and the time limit that follows (`explorer.dynamic_timeout`)."""

    settings: DynamicTimeoutConfig = field(default_factory=DynamicTimeoutConfig)
    steps: int = 0
    """Steps since the explorer started."""
    succeeded: int = 0
    seconds: float = 0.0
    """Total time of the workflows that succeeded, without that of verifiers."""

    @property
    def limit(self) -> float:
        """Seconds that a workflow may take; infinite as long as none has succeeded, and in the first steps."""
        if not self.settings.enable or self.steps < self.settings.warmup_min_steps or not self.succeeded:
            return math.inf
        return self.settings.ratio * self.seconds / self.succeeded

    def add(self, seconds: float) -> None:
        self.succeeded, self.seconds = self.succeeded + 1, self.seconds + seconds


@dataclass
class TaskRunner:
    """Runs workflows on one model, `at_once` of them concurrently."""

    model: RolloutModel
    rewards: RewardRunner
    at_once: int
    timeout: float
    max_retries: int = 0
    auxiliary: Sequence[RolloutModel] = ()
    records: bool = False
    """True if each workflow's model also records its calls (`enable_history`)."""
    api: ApiModels | None = None
    """Opens the sessions of workflows; None if the OpenAI API is not served."""
    workflow_loop: WorkflowLoop = field(default_factory=WorkflowLoop)
    """Runs workflows whose `run` is a coroutine."""
    threads: Executor = field(default_factory=lambda: InterruptibleThreads("workflow"))
    """Runs workflows whose `run` is a plain function."""
    scoring: BusyTimer = field(default_factory=BusyTimer)
    """Time during which any answer was being scored."""
    over_rollout: OverRolloutConfig = field(default_factory=OverRolloutConfig)
    pace: Pace = field(default_factory=Pace)

    async def run_step(self, tasks: Sequence[Task], in_waves: bool = False) -> list[Outcome]:
        """`run` for a round of an explore step, which may end before its slowest tasks (`explorer.over_rollout`)."""
        spare = int(self.over_rollout.ratio * len(tasks))
        if spare:
            return await self._run_until_enough(tasks, len(tasks) - spare)
        return await self.run(tasks, in_waves=in_waves)

    async def _run_until_enough(self, tasks: Sequence[Task], enough: int) -> list[Outcome]:
        """Return the outcomes once `enough` tasks have ended and the others have had some time; those that have not
        ended are dropped."""
        gate, outcomes = asyncio.Semaphore(self.at_once), [Outcome(task) for task in tasks]
        calls = {asyncio.ensure_future(self._with_retries(outcome, gate)): outcome for outcome in outcomes}
        pending = set(calls)
        try:
            while len(calls) - len(pending) < enough:
                ended, pending = await asyncio.wait(pending, return_when=asyncio.FIRST_COMPLETED)
                for call in ended:
                    call.result()
            if pending:
                ended, pending = await asyncio.wait(pending, timeout=self.over_rollout.wait_after_min)
                for call in ended:
                    call.result()
        finally:
            for call in calls:
                call.cancel()
        if pending:
            await asyncio.wait(pending)
            log.info("%d of %d tasks were not waited for (explorer.over_rollout)", len(pending), len(tasks))
        for call in pending:
            calls[call].dropped, calls[call].error, calls[call].experiences = OVER_ROLLOUT, None, []
        return outcomes

    async def run(
        self,
        tasks: Sequence[Task],
        at_once: int | None = None,
        in_waves: bool = False,
        ended: Callable[[], object] = lambda: None,
    ) -> list[Outcome]:
        """Return one outcome for each task, in order; call `ended` as each ends.

        Raises errors that no retry of a task can fix: lost engines, a reward function that returns an impossible
        accuracy.

        With `in_waves`, the next `at_once` tasks begin together once all tasks before them have ended; without, each
        task begins as soon as one ends. In waves, engine batches, and thus the last bits of their log-probs, do not
        depend on how long workflows and verifiers take.
        """
        limit = at_once or self.at_once
        if not in_waves:
            return await self._run(tasks, limit, ended)
        waves = [tasks[start : start + limit] for start in range(0, len(tasks), limit)]
        return [outcome for wave in waves for outcome in await self._run(wave, limit, ended)]

    async def _run(self, tasks: Sequence[Task], at_once: int, ended: Callable[[], object]) -> list[Outcome]:
        gate = asyncio.Semaphore(at_once)

        async def counted(task: Task) -> Outcome:
            outcome = await self._with_retries(Outcome(task), gate)
            ended()
            return outcome

        return await all_of([counted(task) for task in tasks])

    async def _with_retries(self, outcome: Outcome, gate: asyncio.Semaphore) -> Outcome:
        async with gate:
            for attempt in range(self.max_retries + 1):
                outcome.retries = attempt
                await self._attempt(outcome, replace(outcome.task, attempt=attempt, retried=outcome.failed_runs))
                if outcome.error is None:
                    return outcome
                log.warning("%s failed: %s", _task_label(outcome.task), cause(outcome.error))
                if isinstance(outcome.error, TrinityError):
                    break
        if outcome.experiences:
            lost, label = len(outcome.failed_runs), _task_label(outcome.task)
            log.warning("%s goes on without %d of its %d rollouts", label, lost, outcome.task.repeat_times)
            outcome.error = None
        return outcome

    async def _attempt(self, outcome: Outcome, task: Task) -> None:
        """Run the task's workflow once, and add the experiences of the rollouts that succeed. Faults of the run are
        raised."""
        began, model, before = time.time(), self._model(task), len(outcome.experiences)
        rewards = AttemptRewards(self.rewards, self.workflow_loop.outside, self.scoring)
        workflow = run_workflow(task, model, self.auxiliary, rewards, self.threads)
        try:
            seconds, limit = self.timeout, "explorer.max_timeout"
            if not task.is_eval and self.pace.limit < seconds:
                seconds, limit = self.pace.limit, "explorer.dynamic_timeout"
            try:
                experiences = await self.workflow_loop.run(rewards.counted(workflow), seconds, rewards.uncounted, limit)
                outcome.error, outcome.failed_runs = None, ()
            except RolloutsFailed as failure:
                experiences, outcome.error = failure.experiences, failure.first
                outcome.failed_runs = tuple(sorted(failure.errors))
            _set_temperature(task, experiences)
            outcome.experiences += experiences
            if before:
                outcome.experiences.sort(key=lambda experience: experience.run)
            if outcome.error is not None:
                self._check_engines()
            elif not task.is_eval:
                self.pace.add(time.time() - began - rewards.uncounted.seconds)
        except (TransientFault, WeightSyncError, EndpointError, RewardError, LoopBlocked):
            raise
        except Exception as error:  # noqa: BLE001 - it costs this task only
            outcome.error = rewards.named(error) if isinstance(error, WorkflowTimeout) else error
            self._check_engines()
        finally:
            rewards.uncounted.give_up()
            outcome.span = (began, time.time())
            _end(model, outcome, succeeded=len(outcome.experiences) > before)

    def _check_engines(self) -> None:
        """Raise TransientFault if engines were lost: the server's answers told only the agent."""
        if self.api is not None:
            self.api.pool.check()

    def _model(self, task: Task) -> Any:
        if self.api is not None:
            return self.api.model(self.model, task)
        return RecordingModel(self.model) if self.records else self.model


def _end(model: Any, outcome: Outcome, succeeded: bool) -> None:
    """End the sessions of a workflow's model, if it opens any, and count them."""
    if isinstance(model, ApiModel):
        outcome.sessions = outcome.sessions or SessionCounts()
        outcome.sessions.add(model.end(), succeeded)


def _set_temperature(task: Task, experiences: Sequence[Experience]) -> None:
    """Set the task's temperature on experiences that their workflow made without one.

    Raises TrinityError for a training experience whose log-probs are of a distribution that the trainer cannot compute.
    """
    for experience in experiences:
        if experience.temperature is None and not experience.is_expert:
            experience.temperature = task.temperature
        elif experience.temperature is not None and np.isnan(experience.temperature).any():
            if not task.is_eval:
                raise TrinityError(f"workflow '{task.workflow}' {OTHER_DISTRIBUTION}", key=task.workflow)
            experience.temperature = None


def cause(error: BaseException | None) -> str:
    """Format an error as one line, with the file and line of the user's own code that led to it."""
    if isinstance(error, TrinityError):
        return str(error)
    frames = traceback.extract_tb(error.__traceback__) if error else []
    places = [f" ({frame.filename}:{frame.lineno})" for frame in frames if not frame.filename.startswith(NOT_OWN)]
    return f"{type(error).__name__}: {error}{places[-1] if places else ''}"


def rejected_row(task: Task, reason: str) -> RejectedRow:
    source, _, line = task.location.rpartition(":")
    where = RowLocation(source, int(line)) if source else RowLocation(task.taskset, task.index + 1)
    return RejectedRow(where, reason)


def _task_label(task: Task) -> str:
    where = f" ({task.location})" if task.location else ""
    return f"task {task.index} of {task.taskset}{where}"


@dataclass
class FailureWatch:
    """Tells single tasks that fail because of their rows from a run in which all tasks fail or no answer can be
    judged."""

    rejected_rows: RejectedRows = field(default_factory=RejectedRows)
    in_a_row: int = 0
    """Number of consecutive failed tasks."""
    any_succeeded: bool = False
    """True if any task of the run did not fail."""
    any_left: bool = False
    """True if the operators have left any trainable row in the run so far."""
    judged_later: bool = False
    """True if answers without a reward are useful, for example to a person who judges them (mode `explore`)."""
    has_others: Callable[[], bool] = lambda: False
    """True if the run has other explorers, whose rows may be enough."""

    def check(self, step: int, outcomes: Sequence[Outcome], is_last: bool = False) -> None:
        """Record the rows of failed tasks.

        Raises `TrinityError` if every task of explore step `step` failed, or had no answer that could be judged, and so
        did `FAILED_IN_A_ROW` tasks in a row or all tasks of the run (`is_last`). Until a task succeeds, prompts that
        are too long count as failures. Raises `TransientFault` if verifiers fail that have judged answers before. Tasks
        that were not waited for say nothing.
        """
        self.note(outcomes)
        outcomes = [outcome for outcome in outcomes if outcome.dropped != OVER_ROLLOUT]
        reasons = [self._reason(outcome) for outcome in outcomes]
        if not all(reasons) or not outcomes:
            self.in_a_row = 0
            self.any_succeeded |= bool(outcomes)
            return
        self.in_a_row += len(outcomes)
        if self.in_a_row >= FAILED_IN_A_ROW or (is_last and not self.any_succeeded):
            lost = _all_lost(f"explore step {step}", outcomes, reasons[0])
            if self.any_succeeded and not any(outcome.failed for outcome in outcomes):
                raise TransientFault(str(lost))
            raise lost from outcomes[0].error

    def _reason(self, outcome: Outcome) -> str:
        """Return why there is nothing to learn from a task; "" if there is something, or may be."""
        if outcome.is_cut:
            has_agents = outcome.sessions is not None and outcome.sessions.sessions
            return "" if self.any_succeeded else UNASKED if has_agents else CUT
        return "" if self.judged_later and outcome.lost == NO_VERDICT else outcome.lost

    def check_left(self, step: int, left: Sequence[Experience], operators: Sequence[str], is_last: bool) -> None:
        """Raise `TrinityError` in the last step if the `operators` left nothing to train on in the whole run.

        Not with other explorers: the trainer knows whether their rows were enough.
        """
        self.any_left = self.any_left or any(experience.action_mask.any() for experience in left)
        if is_last and not (self.any_left or self.has_others()):
            raise TrinityError(
                f"nothing is left to train on of all {step} explore steps; experience operators: "
                f"{', '.join(operators) or 'none'}. See experiences/dropped/… and the rewards in the explorer's metrics"
            )

    def note(self, outcomes: Sequence[Outcome]) -> None:
        failed = [outcome for outcome in outcomes if outcome.failed]
        self.rejected_rows.append(
            "failed_tasks", [rejected_row(failure.task, cause(failure.error)) for failure in failed]
        )


def check_failures(where: str, outcomes: Sequence[Outcome]) -> None:
    """Raise `TrinityError`, naming the first failure, if every task of an evaluation failed."""
    if outcomes and all(outcome.failed for outcome in outcomes):
        raise _all_lost(where, outcomes, outcomes[0].lost) from outcomes[0].error


def _all_lost(where: str, outcomes: Sequence[Outcome], reason: str) -> TrinityError:
    first = _task_label(outcomes[0].task)
    return TrinityError(f"all {len(outcomes)} tasks of {where} failed; the first, {first}, with {reason}")


@dataclass
class AttemptRewards:
    """The `RewardRunner` of one attempt at a task, which measures the time of verifiers.

    That time does not count towards `explorer.max_timeout`: each verdict has its own limit, but an answer may wait for
    those of all other tasks. The time of judge models counts, except waits for a free request slot.
    """

    rewards: RewardRunner
    outside: RunsElsewhere
    scoring: BusyTimer
    """Time during which answers of any attempt are scored."""
    uncounted: BusyTimer = field(default_factory=BusyTimer)
    """Time during which verifiers score this attempt's answers."""
    asking: BusyTimer = field(default_factory=BusyTimer)
    """Time during which models compute this attempt's verdicts."""

    async def counted(self, workflow: Coroutine[Any, Any, list[Experience]]) -> list[Experience]:
        """Await the workflow; its waits for others count here (`timing.uncounted`)."""
        UNCOUNTED.set(self.uncounted)
        return await workflow

    async def score(self, name: str, items: Sequence[RewardItem]) -> list[Reward]:
        if name not in MODEL_REWARDS:
            return await self.outside(self._verified(name, items))
        with self.asking, self.scoring:
            return await self.rewards.score(name, items)

    def score_sync(self, name: str, items: Sequence[RewardItem]) -> list[Reward]:
        with self.asking if name in MODEL_REWARDS else self.uncounted, self.scoring:
            return self.rewards.score_sync(name, items)

    def named(self, error: WorkflowTimeout) -> WorkflowTimeout:
        """Add the time of judge models to the error."""
        seconds = self.asking.seconds
        return WorkflowTimeout(f"{error}; verdicts of models took {seconds:.0f} s of its time") if seconds else error

    async def _verified(self, name: str, items: Sequence[RewardItem]) -> list[Reward]:
        with self.uncounted, self.scoring:
            return await self.rewards.score(name, items)
