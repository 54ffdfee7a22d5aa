"""Explore steps of mode `serve`: the sessions of users, as their feedback comes."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from trinity_core.data.schedule import Positions
from trinity_core.data.task import Task
from trinity_core.inference.openai_api.book import WITHOUT_FEEDBACK, ServedGroup, SessionBook
from trinity_core.inference.openai_api.model import OpenSession, SessionCounts
from trinity_core.inference.openai_api.served import POLICY
from trinity_core.inference.openai_api.server import ApiServer
from trinity_core.rollout.runner import Outcome
from trinity_core.waits import Wait

GATHER_SECONDS = 2.0
"""A step that is not full begins so long after its first group was complete."""
DROPPED_HELD = 100
"""Sessions without feedback that wait for a step with experiences; of more, a step of their own is made."""
LOOK_SECONDS = 0.2
SERVED = "served"
"""The task set of users' sessions in the ledger."""


@dataclass
class ServedSteps:
    """A step is what has come: up to `batch_size` groups, and all sessions that were dropped meanwhile."""

    server: ApiServer
    book: SessionBook
    tokenizer: Any
    explorer: str
    batch_size: int
    repeats: int
    temperature: float
    """Of the policy's answers."""
    total_steps: None = None
    is_exhausted: bool = False
    text: str = ""
    _count: int = 0
    """Groups of all steps so far."""
    _names: tuple[str, ...] = ()
    """Sessions of the step in progress."""

    def rows(self, step: int) -> int:
        """See `StepSource`."""
        return self.batch_size * self.repeats

    async def arrival(self, is_over: Callable[[], bool]) -> bool:
        """See `StepSource`. Ends sessions whose time is over meanwhile."""
        wait = Wait("feedback")
        try:
            while not await asyncio.to_thread(self._has_come):
                if await asyncio.to_thread(is_over):
                    return False
                waiting, judged, dropped = self.book.counts
                self.text = wait.note(f"sessions: {waiting} open, {judged} with feedback, {dropped} dropped")
                await asyncio.sleep(LOOK_SECONDS)
            return True
        finally:
            self.text = ""

    def _has_come(self) -> bool:
        for session in self.book.expire():
            self.server.close(session, WITHOUT_FEEDBACK)
        groups, seconds = self.book.complete()
        gathered = bool(groups) and seconds >= GATHER_SECONDS
        return groups >= self.batch_size or gathered or self.book.counts[2] >= DROPPED_HELD

    async def outcomes(self, step: int, version: int) -> list[Outcome]:
        """See `StepSource`."""
        return await asyncio.to_thread(self._outcomes, step, version)

    async def further(self, step: int, count: int) -> list[Outcome]:
        """See `StepSource`: users come by themselves."""
        return []

    def _outcomes(self, step: int, version: int) -> list[Outcome]:
        groups = self.book.take(self.batch_size, version)
        self._names = tuple(mine.name for group in groups for mine in group.sessions)
        return [self._outcome(f"{self.explorer}/{step}/{slot}", group) for slot, group in enumerate(groups)]

    def _outcome(self, name: str, group: ServedGroup) -> Outcome:
        self._count += 1
        task = Task(self._count, {}, SERVED, "serve", repeat_times=len(group.sessions), group=name)
        outcome = Outcome(task, dropped=group.dropped, sessions=SessionCounts())
        for run, mine in enumerate(group.sessions):
            session, feedback = OpenSession(self.server, mine.session, POLICY, self.tokenizer), mine.feedback
            fields: dict[str, Any] = {"group": name, "run": run, "task_index": self._count}
            fields["temperature"] = self.temperature or 1.0
            if feedback is not None:
                fields["metrics"] = {f"feedback/{name}": value for name, value in feedback.metrics.items()}
                fields["info"] = {"task": mine.task, "comment": feedback.comment}
            outcome.experiences += session.experiences(None if feedback is None else feedback.reward, **fields)
            sampled = mine.session.sampled_tokens + mine.session.dropped_tokens
            assert outcome.sessions is not None
            outcome.sessions.add(SessionCounts(1, session.taken_tokens, sampled), succeeded=not group.dropped)
        return outcome

    def position(self, step: int) -> dict[str, Any]:
        """See `StepSource`: also the sessions of the step, by which a restarted explorer knows that they are stored."""
        return {"step": step, "served": self._count, "sessions": list(self._names)}

    def resume(self, position: Mapping[str, Any] | None, positions: Positions) -> None:
        """See `StepSource`."""
        found = position or {}
        self._count = found.get("served", 0)
        for session in self.book.resume(found.get("sessions", ())):
            self.server.close(session, WITHOUT_FEEDBACK)

    def stored(self) -> None:
        """See `StepSource`."""
        self.book.stored()

    def went_back(self, version: int) -> None:
        """See `StepSource`: what was sampled by weights that are gone is not trained on."""
        self.book.take_back(version)
