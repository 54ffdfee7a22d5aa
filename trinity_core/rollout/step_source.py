"""Sources of the rollouts of explore steps: the tasks of a schedule or, in mode `serve`, users' sessions.

`sample_step` makes a step from a source: rollouts after the experience operators, with new tasks in place of those
without remaining rollouts.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from functools import partial
from typing import Any, Protocol, TypeVar

from trinity_core.base.errors import TrinityError
from trinity_core.base.files import from_record
from trinity_core.base.threads import DaemonThreads
from trinity_core.base.timing import BusyTimer
from trinity_core.base.waits import Wait, poll_async
from trinity_core.config import Config
from trinity_core.data.experience import STORE, Experience
from trinity_core.data.joined import JoinedInputs
from trinity_core.data.lengths import TasksTaken, explore_steps, rollouts_taken, tasks_taken
from trinity_core.data.rejected import RejectedRows
from trinity_core.data.schedule import Positions, TaskSchedule
from trinity_core.data.task import Task
from trinity_core.exchange.store.members import Stats
from trinity_core.pipelines.operators import FailedGroup, Operators
from trinity_core.rollout.metrics import dropped_whole, experiences_of, scores_of
from trinity_core.rollout.openai_api.api_settings import POLICY
from trinity_core.rollout.openai_api.model import OpenSession, SessionCounts
from trinity_core.rollout.openai_api.served_sessions import WITHOUT_FEEDBACK, ServedGroup, ServedSessions
from trinity_core.rollout.openai_api.server import ApiServer
from trinity_core.rollout.runner import OVER_ROLLOUT, FailureWatch, Outcome, TaskRunner, cause, rejected_row

log = logging.getLogger(__name__)

GATHER_SECONDS = 2.0
"""A step that is not full begins this long after its first group was complete."""
DROPPED_HELD = 100
"""Sessions without feedback that wait for a step with experiences; with more, they become a step of their own."""
SERVED = "served"
"""The task set of users' sessions in the ledger."""
TAKEN = "tasks_taken"
CHANGED = (
    "buffer.train_batch_size or repeat_times has changed: train steps after step %d take %d tasks each, so the run has "
    "%d explore steps instead of %d"
)
OPERATOR_SECONDS = 3600.0
"""Time limit for the operators of a step, which may include a judge model."""
T = TypeVar("T")


class StepSource(Protocol):
    """The source of an explorer's steps. Its position is stored with each step."""

    @property
    def total_steps(self) -> int | None:
        """Explore steps of the run; None: until the trainer has finished."""

    @property
    def text(self) -> str:
        """Text that says what it waits for; "" if nothing."""

    @property
    def is_exhausted(self) -> bool:
        """True if there will be no further step, even before `total_steps`."""

    def rows(self, step: int) -> int:
        """Expected number of experiences of a step."""

    def arrival(self, is_over: Callable[[], bool]) -> Awaitable[bool] | None:
        """Wait until rollouts for a step are available; False if `is_over` first. None: they always are."""

    async def outcomes(self, step: int, version: int) -> list[Outcome]:
        """Return the outcomes of a step, with weights of `version`."""

    async def further(self, step: int, count: int) -> list[Outcome]:
        """Return the outcomes of `count` more tasks for the step in progress; none if the source has no further
        tasks."""

    def position(self, step: int) -> dict[str, Any]:
        """The position after a step, as JSON."""

    def resume(self, position: Mapping[str, Any] | None, positions: Positions, stats: Callable[[], Stats]) -> None:
        """Continue at a stored position; None: at the beginning. Raises DataError if it belongs to other tasks.

        `positions` returns those of all steps so far, `stats` the state of the store.
        """

    def stored(self) -> None:
        """Called when the last step is in the store."""

    def went_back(self, version: int) -> None:
        """Called when the trainer went back to `version`; the engines now hold weights of the new lineage."""


@dataclass
class TaskSteps:
    schedule: TaskSchedule
    runner: TaskRunner
    config: Config
    in_waves: bool = False
    """See `TaskRunner.run`."""
    joined: JoinedInputs = field(default_factory=JoinedInputs)
    """Columns added to experiences for the operators."""
    text: str = ""
    taken: TasksTaken | None = None

    @property
    def total_steps(self) -> int:
        return explore_steps(self.config, self.schedule, self.taken)

    def rows(self, step: int) -> int:
        return self.schedule.rollouts(step)

    @property
    def is_exhausted(self) -> bool:
        return self.schedule.is_exhausted

    def arrival(self, is_over: Callable[[], bool]) -> Awaitable[bool] | None:
        """Only tasks of queues are waited for."""
        return self._arrived(is_over) if self.schedule.has_queues else None

    async def _arrived(self, is_over: Callable[[], bool]) -> bool:
        step, wait = self.schedule.step + 1, Wait("tasks")
        try:
            async for _ in poll_async(pause=0.2):
                lacking = await asyncio.to_thread(self.schedule.missing, step)
                if not lacking:
                    return not self.is_exhausted
                if await asyncio.to_thread(is_over):
                    break
                counts = ", ".join(f"{count} more of '{name}'" for name, count in lacking.items())
                self.text = wait.note(f"explore step {step} takes {counts}: `trinity tasks add` adds some")
            return False
        finally:
            self.text = ""

    async def outcomes(self, step: int, version: int) -> list[Outcome]:
        self.schedule.begin(step)
        outcomes = await self.further(step, self.schedule.batch_size)
        self.runner.pace.steps += 1
        return outcomes

    async def further(self, step: int, count: int) -> list[Outcome]:
        """The schedule observes scores as the workflows returned them, before any operator."""
        outcomes = await self.runner.run_step(self.schedule.draw(count), in_waves=self.in_waves)
        for outcome in outcomes:
            self.schedule.observe(outcome.task, scores_of(outcome))
            columns = self.joined.columns(outcome.task.raw)
            for experience in outcome.experiences:
                experience.info |= columns
        return outcomes

    def position(self, step: int) -> dict[str, Any]:
        assert self.taken is not None, "resume comes first"
        return self.schedule.finish_step() | {TAKEN: asdict(self.taken)}

    def resume(self, position: Mapping[str, Any] | None, positions: Positions, stats: Callable[[], Stats]) -> None:
        """If train steps now take another number of tasks, recount the remaining ones, including those repeated because
        the trainer went back to before that change."""
        self.schedule.resume(position, positions)
        each, stored = tasks_taken(self.config, self.schedule), stats()
        self.taken = from_record(TasksTaken, (position or {}).get(TAKEN, {"each": each}), STORE)
        if self.taken.each != each or stored.committed < self.taken.step:
            steps_before = self.total_steps
            waiting = (stored.ready + stored.leased) * each // rollouts_taken(self.config)
            explored = self.schedule.step * self.schedule.batch_size
            self.taken = TasksTaken(each, stored.committed, max(0, explored - waiting))
            if self.total_steps != steps_before:
                log.warning(CHANGED, stored.committed, each, self.total_steps, steps_before)

    def stored(self) -> None:
        """Does nothing: tasks are identified by their position."""

    def went_back(self, version: int) -> None:
        """Does nothing: all steps after the one of `version` are repeated."""


@dataclass
class ServedSteps:
    """A step takes the groups that are ready, up to `batch_size`, and all sessions dropped since the last step."""

    server: ApiServer
    served_sessions: ServedSessions
    tokenizer: Any
    explorer: str
    batch_size: int
    repeats: int
    total_steps: None = None
    is_exhausted: bool = False
    text: str = ""
    _count: int = 0
    """Number of groups in all steps so far."""
    _names: tuple[str, ...] = ()
    """Sessions of the step in progress."""

    def rows(self, step: int) -> int:
        return self.batch_size * self.repeats

    async def arrival(self, is_over: Callable[[], bool]) -> bool:
        """Also ends sessions that have timed out."""
        wait = Wait("feedback")
        try:
            async for _ in poll_async(pause=0.2):
                if await asyncio.to_thread(self._has_come):
                    return True
                if await asyncio.to_thread(is_over):
                    break
                waiting, judged, dropped = self.served_sessions.counts
                self.text = wait.note(f"sessions: {waiting} open, {judged} with feedback, {dropped} dropped")
            return False
        finally:
            self.text = ""

    def _has_come(self) -> bool:
        for session in self.served_sessions.expire():
            self.server.close(session, WITHOUT_FEEDBACK)
        groups, seconds = self.served_sessions.complete()
        gathered = bool(groups) and seconds >= GATHER_SECONDS
        return groups >= self.batch_size or gathered or self.served_sessions.counts[2] >= DROPPED_HELD

    async def outcomes(self, step: int, version: int) -> list[Outcome]:
        return await asyncio.to_thread(self._outcomes, step, version)

    async def further(self, step: int, count: int) -> list[Outcome]:
        return []

    def _outcomes(self, step: int, version: int) -> list[Outcome]:
        groups = self.served_sessions.take(self.batch_size, version)
        self._names = tuple(mine.name for group in groups for mine in group.sessions)
        return [self._outcome(f"{self.explorer}/{step}/{slot}", group) for slot, group in enumerate(groups)]

    def _outcome(self, name: str, group: ServedGroup) -> Outcome:
        self._count += 1
        task = Task(self._count, {}, SERVED, "serve", repeat_times=len(group.sessions), group=name)
        outcome = Outcome(task, dropped=group.dropped, sessions=SessionCounts())
        for run, mine in enumerate(group.sessions):
            session, feedback = OpenSession(self.server, mine.session, POLICY, self.tokenizer), mine.feedback
            fields: dict[str, Any] = {"group": name, "run": run, "task_index": self._count}
            if feedback is not None:
                fields["metrics"] = {f"feedback/{name}": value for name, value in feedback.metrics.items()}
                fields["info"] = {"task": mine.task, "comment": feedback.comment}
            outcome.experiences += session.experiences(None if feedback is None else feedback.reward, **fields)
            sampled = mine.session.sampled_tokens + mine.session.dropped_tokens
            assert outcome.sessions is not None
            counts = SessionCounts(1, session.taken_tokens, sampled, *mine.session.guided)
            outcome.sessions.add(counts, succeeded=not group.dropped)
        return outcome

    def position(self, step: int) -> dict[str, Any]:
        """Includes the step's sessions, from which a restarted explorer knows that they are stored."""
        return {"step": step, "served": self._count, "sessions": list(self._names)}

    def resume(self, position: Mapping[str, Any] | None, positions: Positions, stats: Callable[[], Stats]) -> None:
        stored = position or {}
        self._count = stored.get("served", 0)
        for session in self.served_sessions.resume(stored.get("sessions", ())):
            self.server.close(session, WITHOUT_FEEDBACK)

    def stored(self) -> None:
        self.served_sessions.stored()

    def went_back(self, version: int) -> None:
        """Take back sessions sampled by weights that are gone."""
        self.served_sessions.take_back(version)


def one_answer_each(tasks: Sequence[Task]) -> list[Task]:
    """Make each repeat a separate task, so that a failed request costs one answer, not all answers to the question."""
    return [
        replace(task, repeat_times=1, group=f"{task.group}/{run}", repeat_of=task.group)
        for task in tasks
        for run in range(task.repeat_times)
    ]


@dataclass(frozen=True, slots=True)
class SampledStep:
    outcomes: list[Outcome]
    experiences: list[Experience]
    """Experiences that the operators kept."""
    dropped: dict[str, dict[str, int]]
    """Group -> operator or reason -> number of experiences dropped."""
    operator_seconds: float


async def sample_step(
    steps: StepSource, operators: Operators, step: int, version: int, rounds: int, failures: FailureWatch
) -> SampledStep:
    """Sample the rollouts of a step. Up to `rounds` times, tasks with nothing left to train on are replaced by new ones
    (DAPO's dynamic sampling, arXiv 2503.14476, section 3.2).

    Raises `TrinityError` if all its first tasks fail (`FailureWatch.check`), and in the last step if the operators left
    nothing of the run.
    """
    outcomes = await steps.outcomes(step, version)
    is_last = step == steps.total_steps or steps.is_exhausted
    await asyncio.to_thread(failures.check, step, outcomes, is_last)
    goal = sum(outcome.dropped != OVER_ROLLOUT for outcome in outcomes)
    timer = BusyTimer()
    with timer:
        experiences, dropped = await run_operators(operators, outcomes, failures.rejected_rows)
    missing = goal - _groups(experiences, outcomes)
    for _ in range(rounds):
        further = await steps.further(step, missing) if missing > 0 else []
        if not further:
            break
        await asyncio.to_thread(failures.note, further)
        with timer:
            added, by_operator = await run_operators(operators, further, failures.rejected_rows)
        outcomes, experiences, dropped = outcomes + further, experiences + added, dropped | by_operator
        missing = goal - _groups(experiences, outcomes)
    if rounds and missing > 0:
        log.warning(
            "explore step %d has %d of %d groups after %d tasks (explorer.max_refill_rounds: %d)",
            step, goal - missing, goal, len(outcomes), rounds,
        )  # fmt: skip
    await asyncio.to_thread(failures.check_left, step, experiences, operators.names, is_last)
    return SampledStep(outcomes, experiences, dropped | dropped_whole(outcomes), timer.seconds)


def _groups(experiences: list[Experience], outcomes: Sequence[Outcome] = ()) -> int:
    """Return the number of groups with something to train on, without those below a task's own."""
    further = {group for outcome in outcomes for group in outcome.further_groups}
    return len({experience.group for experience in experiences if experience.action_mask.any()} - further)


async def run_operators(
    operators: Operators, outcomes: Sequence[Outcome], rejected_rows: RejectedRows
) -> tuple[list[Experience], dict[str, dict[str, int]]]:
    """Apply the operators to the outcomes' experiences; return what they keep and what they drop.

    They run outside the explorer's loop, in a thread or a separate process, because plugins may be slow. Rows with
    which an operator fails are recorded in `rejected_rows`.
    """
    failed: list[FailedGroup] = []
    run = partial(operators.run, experiences_of(outcomes), failed.append)
    work = asyncio.get_running_loop().run_in_executor(DaemonThreads("operators"), run)
    try:
        left = await asyncio.wait_for(work, OPERATOR_SECONDS)
    except TimeoutError:
        names, missing = ", ".join(operators.names), operators.running or "the process of their own"
        raise TrinityError(
            f"the experience operators ({names}) took longer than {OPERATOR_SECONDS:g} s: no answer from {missing}"
        ) from None
    tasks = {outcome.task.group: outcome.task for outcome in outcomes}
    rows = [
        rejected_row(tasks[group.group], f"experience operator '{group.operator}' fails: {cause(group.error)}")
        for group in failed
        if group.group in tasks  # an operator may have added it
    ]
    await asyncio.to_thread(rejected_rows.append, "experience_operators", rows)
    return left


async def loading_meanwhile(work: Awaitable[T], load_newest: Callable[[], Awaitable[None]]) -> T:
    """Await `work`, calling `load_newest` repeatedly; the last call ends before this returns.

    Raises what either raises. If a load fails, `work` is cancelled.
    """
    working = asyncio.ensure_future(work)
    try:
        while not (await asyncio.wait({working}, timeout=0.05))[0]:
            await load_newest()
        return working.result()
    finally:
        working.cancel()
