"""Where the rollouts of explore steps come from: the tasks of a schedule, or (`served_steps.py`) users."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, Protocol

from trinity_core.data.joined import JoinedInputs
from trinity_core.data.schedule import Positions, TaskSchedule
from trinity_core.rollout.metrics import scores_of
from trinity_core.rollout.runner import Outcome, TaskRunner
from trinity_core.waits import Wait

LOOK_SECONDS = 0.2
"""Between two looks for tasks that are waited for."""


class StepSource(Protocol):
    """The source of an explorer's steps. Its position is stored with each step."""

    @property
    def total_steps(self) -> int | None:
        """Explore steps of the run; None: until the trainer has finished."""

    @property
    def text(self) -> str:
        """What is waited for, in words; "" if nothing is."""

    @property
    def is_exhausted(self) -> bool:
        """True if there will be no further step, whatever `total_steps` says."""

    def rows(self, step: int) -> int:
        """Experiences that a step is expected to give."""

    def arrival(self, is_over: Callable[[], bool]) -> Awaitable[bool] | None:
        """Waits until there are rollouts for a step; False if `is_over` before. None: there always are."""

    async def outcomes(self, step: int, version: int) -> list[Outcome]:
        """The outcomes of a step, with weights of `version`."""

    async def further(self, step: int, count: int) -> list[Outcome]:
        """The outcomes of `count` more tasks for the step in progress; none where nobody can ask for more."""

    def position(self, step: int) -> dict[str, Any]:
        """The position after a step, as JSON."""

    def resume(self, position: Mapping[str, Any] | None, positions: Positions) -> None:
        """Go on at a stored position; None: at the beginning. Raises DataError if it belongs to other tasks.

        `positions` gives those of all steps so far.
        """

    def stored(self) -> None:
        """The last step is in the store."""

    def went_back(self, version: int) -> None:
        """The trainer went back to `version`; the engines now hold weights that it has."""


@dataclass
class TaskSteps:
    """Steps of a schedule's tasks."""

    schedule: TaskSchedule
    runner: TaskRunner
    total_steps: int
    in_waves: bool
    """See `TaskRunner.run`."""
    joined: JoinedInputs = field(default_factory=JoinedInputs)
    """Columns that experiences get for the operators."""
    text: str = ""

    def rows(self, step: int) -> int:
        """See `StepSource`."""
        return self.schedule.rollouts(step)

    @property
    def is_exhausted(self) -> bool:
        """See `StepSource`."""
        return self.schedule.is_exhausted

    def arrival(self, is_over: Callable[[], bool]) -> Awaitable[bool] | None:
        """See `StepSource`. Only tasks of queues are waited for."""
        return self._arrived(is_over) if self.schedule.has_queues else None

    async def _arrived(self, is_over: Callable[[], bool]) -> bool:
        step, wait = self.schedule.step + 1, Wait("tasks")
        try:
            while lacking := await asyncio.to_thread(self.schedule.missing, step):
                if await asyncio.to_thread(is_over):
                    return False
                named = ", ".join(f"{count} more of '{name}'" for name, count in lacking.items())
                self.text = wait.note(f"explore step {step} takes {named}: `trinity tasks add` adds some")
                await asyncio.sleep(LOOK_SECONDS)
            return not self.is_exhausted
        finally:
            self.text = ""

    async def outcomes(self, step: int, version: int) -> list[Outcome]:
        """See `StepSource`."""
        self.schedule.begin(step)
        return await self.further(step, self.schedule.batch_size)

    async def further(self, step: int, count: int) -> list[Outcome]:
        """See `StepSource`. The schedule sees scores as the workflows gave them, before any operator."""
        outcomes = await self.runner.run(self.schedule.draw(count), in_waves=self.in_waves)
        for outcome in outcomes:
            self.schedule.observe(outcome.task, scores_of(outcome.experiences))
            columns = self.joined.columns(outcome.task.raw)
            for experience in outcome.experiences:
                experience.info |= columns
        return outcomes

    def position(self, step: int) -> dict[str, Any]:
        """See `StepSource`."""
        return self.schedule.position()

    def resume(self, position: Mapping[str, Any] | None, positions: Positions) -> None:
        """See `StepSource`."""
        self.schedule.resume(position, positions)

    def stored(self) -> None:
        """Nothing to do: a task is known by its place."""

    def went_back(self, version: int) -> None:
        """Nothing to do: all steps after the one of `version` are made again."""
