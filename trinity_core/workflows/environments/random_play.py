"""Episodes of any environment by a player who says texts at random, and plays some again until they go well."""

from __future__ import annotations

import asyncio
import random
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from trinity_core.data.formats import Message
from trinity_core.errors import InputError
from trinity_core.workflows.environments.protocol import Environment, as_step
from trinity_core.workflows.environments.workflow import EnvArguments, called, first_messages, opened

MOST_ATTEMPTS = 1000
"""At one episode that is to go well."""


@dataclass(frozen=True)
class RandomPlayer:
    """Says any of `actions`."""

    given: EnvArguments
    prompt: str
    actions: Sequence[str]
    rng: random.Random
    skill: float
    """The chance that an episode is played again until it earns `enough`."""
    enough: float

    def episodes(self, seeds: Iterable[int]) -> list[list[Message]]:
        """The conversation of one episode for each seed.

        Raises EnvironmentFailed if one fails, InputError if one does not go well in `MOST_ATTEMPTS` attempts.
        """

        async def every() -> list[list[Message]]:
            return [await self._shown(seed) for seed in seeds]

        return asyncio.run(every())

    async def _shown(self, seed: int) -> list[Message]:
        again = self.rng.random() < self.skill
        async with opened(self.given, {}) as environment:
            for _ in range(MOST_ATTEMPTS):
                messages, earned = await self._played(environment, seed)
                if earned >= self.enough or not again:
                    return messages
        raise InputError(f"no episode with seed {seed} earned {self.enough:g} in {MOST_ATTEMPTS} attempts at random")

    async def _played(self, environment: Environment, seed: int) -> tuple[list[Message], float]:
        """The conversation of an episode and its return."""
        step = as_step(await called(environment.reset, self.given.time_limit, seed))
        messages = first_messages([{"role": "user", "content": self.prompt}], step.observation)
        earned = step.reward
        for turn in range(self.given.max_turns):
            if turn:
                messages.append({"role": "user", "content": step.observation})
            messages.append({"role": "assistant", "content": self.rng.choice(self.actions)})
            step = as_step(await called(environment.step, self.given.time_limit, messages[-1]["content"]))
            earned += step.reward
            if step.done:
                break
        return messages, earned
