"""Agents that reach the policy through the OpenAI API: one session for each rollout."""

from __future__ import annotations

import asyncio
import inspect
from types import TracebackType
from typing import Any, Protocol, Self, runtime_checkable

from trinity_core.data.experience import Experience
from trinity_core.errors import TrinityError
from trinity_core.threads import InterruptibleThreads
from trinity_core.workflows.base import Workflow, all_of
from trinity_core.workflows.rewards import Reward


class RolloutSession(Protocol):
    """One rollout through the OpenAI API. A context manager: it ends with the block."""

    @property
    def base_url(self) -> str:
        """Where clients reach the API; whatever they do there belongs to this rollout."""

    @property
    def api_key(self) -> str:
        """The key for it."""

    @property
    def model_name(self) -> str:
        """The policy's name in requests."""

    @property
    def openai_client(self) -> Any:
        """An `openai.OpenAI` for it."""

    @property
    def openai_async_client(self) -> Any:
        """An `openai.AsyncOpenAI` for it."""

    def __enter__(self) -> Self: ...

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None: ...

    def experiences(self, reward: Reward | float | None = None, **fields: Any) -> list[Experience]:
        """The fewest experiences that hold each token sampled in it once; all get `reward` and `fields`.

        Give the `Reward` as it came from `rewards.score`. Ends the session.
        """


@runtime_checkable
class OpensSessions(Protocol):
    """A model whose engines also serve the OpenAI API."""

    def session(self, run: int = 0) -> RolloutSession:
        """A new session, for rollout `run` of the task."""


class AgentWorkflow(Workflow):
    """Any agent that takes a base URL or a client. Subclass it and write `rollout`.

    All rollouts of a task run at once. If one of them raises, the others are ended too, and the task is tried again.
    """

    def rollout(self, session: RolloutSession, run: int) -> Any:
        """Let the agent work on `self.task`; its reward (or a coroutine that returns it).

        A plain `rollout` is called in a thread. A `Reward` as it came from `self.rewards.score`, a number, or None if
        the rollout cannot be judged.
        """
        raise NotImplementedError(f"{type(self).__name__} has no rollout()")

    async def run(self) -> list[Experience]:
        """The experiences of all `task.repeat_times` rollouts."""
        model = self.model
        if not isinstance(model, OpensSessions):
            raise TrinityError(
                f"workflow '{self.task.workflow}' talks to the OpenAI API; set "
                "explorer.rollout_model.enable_openai_api: true"
            )
        rollouts = await all_of([self._rollout(model, run) for run in range(self.task.repeat_times)])
        return [one for experiences in rollouts for one in experiences]

    async def _rollout(self, model: OpensSessions, run: int) -> list[Experience]:
        with model.session(run) as session:
            if inspect.iscoroutinefunction(self.rollout):
                reward = await self.rollout(session, run)
            else:
                threads = InterruptibleThreads("agent")
                reward = await asyncio.get_running_loop().run_in_executor(threads, self.rollout, session, run)
        return session.experiences(reward, run=run, info={"truth": str(self.task.truth)})
