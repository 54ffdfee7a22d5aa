"""Where the rollouts of explore steps come from: the tasks of a schedule, or (`served_steps.py`) users."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass
from typing import Any, Protocol

from trinity_core.data.schedule import TaskSchedule
from trinity_core.rollout.runner import Outcome, TaskRunner


class StepSource(Protocol):
    """The source of an explorer's steps. Its position is stored with each step."""

    @property
    def total_steps(self) -> int | None:
        """Explore steps of the run; None: until the trainer has finished."""

    @property
    def text(self) -> str:
        """What is waited for, in words; "" if nothing is."""

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

    def resume(self, position: Mapping[str, Any] | None) -> None:
        """Go on at a stored position; None: at the beginning. Raises DataError if it belongs to other tasks."""

    def stored(self) -> None:
        """The last step is in the store."""


@dataclass
class TaskSteps:
    """Steps of a schedule's tasks."""

    schedule: TaskSchedule
    runner: TaskRunner
    total_steps: int
    in_waves: bool
    """See `TaskRunner.run`."""
    text: str = ""
    _drawn: int = 0
    """Tasks of all steps so far, with the one in progress."""
    _slots: int = 0
    """Those of the step in progress."""

    def rows(self, step: int) -> int:
        """See `StepSource`."""
        tasks = self.schedule.draw(step, self._drawn, self.schedule.batch_size)
        return sum(task.repeat_times for task in tasks)

    def arrival(self, is_over: Callable[[], bool]) -> None:
        """Tasks are always there."""

    async def outcomes(self, step: int, version: int) -> list[Outcome]:
        """See `StepSource`."""
        self._slots = 0
        return await self.further(step, self.schedule.batch_size)

    async def further(self, step: int, count: int) -> list[Outcome]:
        """See `StepSource`."""
        tasks = self.schedule.draw(step, self._drawn, count, self._slots)
        self._drawn, self._slots = self._drawn + count, self._slots + count
        return await self.runner.run(tasks, in_waves=self.in_waves)

    def position(self, step: int) -> dict[str, Any]:
        """See `StepSource`."""
        return self.schedule.position(step, self._drawn)

    def resume(self, position: Mapping[str, Any] | None) -> None:
        """See `StepSource`."""
        found = dict(position or {})
        self.schedule.check(found)
        self._drawn = found.get("drawn", found.get("step", 0) * self.schedule.batch_size)

    def stored(self) -> None:
        """Nothing to do: a task is known by its place."""
