"""Rewards that need a model: how a workflow's `rewards.score` reaches them, and what they are given.

Such a reward function scores all answers of a call together, in the explorer and not in the pool of processes."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Protocol

from trinity_core.threads import call_in
from trinity_core.workflows.rewards.base import REWARD_FNS, Reward, RewardItem
from trinity_core.workflows.rewards.pool import RewardRunner

if TYPE_CHECKING:
    from trinity_core.data.formats import Message
    from trinity_core.workflows.rollout_model import RolloutModel


REQUESTS_AT_ONCE = 32
"""Requests in flight at the endpoint of a judge."""


class RewardModels(Protocol):
    """The models of a run that judge answers."""

    def judge(self, name: str | None) -> RolloutModel:
        """An auxiliary model by its name; None: the first. Raises TrinityError if there is none."""

    def endpoint(
        self, base_url: str, model_name: str, api_key_env: str | None, requests_at_once: int = REQUESTS_AT_ONCE
    ) -> RolloutModel:
        """A model behind an OpenAI-compatible endpoint. Raises TrinityError if the key's variable is not set.

        Further requests wait, which is not the time of the workflow that asks.
        """

    async def rated(self, name: str | None, conversations: Sequence[Sequence[Message]]) -> list[float | str]:
        """The score that a reward model gives to each conversation, or why it gives none. Raises as `judge`."""


class ModelReward(Protocol):
    """A reward function that asks models. `args` are the task set's `reward_fn_args`."""

    async def __call__(self, *, items: Sequence[RewardItem], models: RewardModels, **args: Any) -> list[Reward]:
        """One reward for each item, in their order."""


MODEL_REWARDS: dict[str, ModelReward] = {}
"""Reward functions that need models; `REWARD_FNS` knows their names and arguments too."""


def model_reward(name: str) -> Any:
    """A decorator that adds a reward function which needs models."""

    def add(function: Any) -> Any:
        REWARD_FNS.register(name)(function)
        MODEL_REWARDS[name] = function
        return function

    return add


@dataclass
class ModelRewards:
    """A `RewardRunner` that scores with models what needs them, and everything else in the pool."""

    pool: RewardRunner
    models: RewardModels
    loop: asyncio.AbstractEventLoop = field(default_factory=asyncio.get_running_loop)

    async def score(self, name: str, items: Sequence[RewardItem]) -> list[Reward]:
        """See `RewardRunner.score`. Items with other arguments are scored in calls of their own."""
        function = MODEL_REWARDS.get(name)
        if function is None:
            return await self.pool.score(name, items)
        rewards: list[Reward | None] = [None] * len(items)
        for places in _alike([item.args for item in items]):
            alike = [items[place] for place in places]
            scored = await function(items=alike, models=self.models, **alike[0].args)
            for place, reward in zip(places, scored, strict=True):
                rewards[place] = reward
        return [reward for reward in rewards if reward is not None]

    def score_sync(self, name: str, items: Sequence[RewardItem]) -> list[Reward]:
        if name not in MODEL_REWARDS:
            return self.pool.score_sync(name, items)
        return call_in(self.loop, self.score(name, items))


def _alike(arguments: Sequence[Mapping[str, Any]]) -> list[list[int]]:
    """The places of equal arguments, together."""
    groups: list[list[int]] = []
    for place, own in enumerate(arguments):
        group_of_equals = next((group for group in groups if arguments[group[0]] == own), None)
        if group_of_equals is None:
            groups.append([place])
        else:
            group_of_equals.append(place)
    return groups


def conversation(item: RewardItem) -> list[Message]:
    """The messages that an answer replies to."""
    return [dict(message) for message in item.messages] or [{"role": "user", "content": item.prompt}]


@model_reward("reward_model")
async def reward_model(
    *,
    items: Sequence[RewardItem],
    models: RewardModels,
    model: str | None = None,
    scale: float = 1.0,
    offset: float = 0.0,
    **_: Any,
) -> list[Reward]:
    """`reward_model`: `scale` times the score of the conversation with the answer, plus `offset`.

    `model` is the name of an auxiliary model, by default the first that is a reward model. What is longer than the
    model takes has an error.
    """
    conversations = [[*conversation(item), {"role": "assistant", "content": item.response}] for item in items]
    scores = await models.rated(model, conversations)
    return [
        Reward(error=score) if isinstance(score, str) else Reward({"reward_model": scale * score + offset})
        for score in scores
    ]
