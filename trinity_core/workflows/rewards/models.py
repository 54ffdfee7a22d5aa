"""Rewards that need a model: how `rewards.score` reaches them, and their arguments.

Such a reward function scores all answers of a call together, in the explorer and not in the pool of processes.
"""

from __future__ import annotations

import asyncio
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Protocol

from trinity_core.base.threads import call_in
from trinity_core.config.schema.explorer import ExternalModelConfig
from trinity_core.workflows.rewards.base import Reward, RewardItem
from trinity_core.workflows.rewards.functions import REWARD_FNS
from trinity_core.workflows.rewards.pool import RewardRunner

if TYPE_CHECKING:
    from trinity_core.data.formats import Message
    from trinity_core.workflows.rollout_model import RolloutModel


REQUESTS_AT_ONCE = 32
"""Requests in flight at the endpoint of a judge."""


class RewardModels(Protocol):
    """The models of a run that judge answers."""

    def judge(self, name: str | None) -> RolloutModel:
        """Return an auxiliary model by its name; None: the first. Raises TrinityError if there is none."""

    def endpoint(self, settings: ExternalModelConfig) -> RolloutModel:
        """Return a model behind an OpenAI-compatible endpoint. Raises TrinityError if the key's variable is not set.

        Excess requests wait; that time does not count as the calling workflow's.
        """

    async def rated(self, name: str | None, conversations: Sequence[Sequence[Message]]) -> list[float | str]:
        """Return a reward model's score of each conversation, or the error. Raises as `judge`."""


class ModelReward(Protocol):
    """A reward function that uses models. `args` are the task set's `reward_fn_args`."""

    async def __call__(self, *, items: Sequence[RewardItem], models: RewardModels, **args: Any) -> list[Reward]:
        """Return one reward for each item, in order."""


MODEL_REWARDS: dict[str, ModelReward] = {}
"""Reward functions that need models; `REWARD_FNS` also has their names and arguments."""


def model_reward(name: str) -> Any:
    """Decorator: register a reward function that needs models."""

    def add(function: Any) -> Any:
        REWARD_FNS.register(name)(function)
        MODEL_REWARDS[name] = function
        return function

    return add


@dataclass
class ModelRewards:
    """A `RewardRunner` that calls models for the rewards that need them, and the pool for all others."""

    pool: RewardRunner
    models: RewardModels
    loop: asyncio.AbstractEventLoop = field(default_factory=asyncio.get_running_loop)

    async def score(self, name: str, items: Sequence[RewardItem]) -> list[Reward]:
        """See `RewardRunner.score`. Items with different arguments are scored in separate calls."""
        function = MODEL_REWARDS.get(name)
        if function is None:
            return await self.pool.score(name, items)
        rewards: list[Reward | None] = [None] * len(items)
        for places in _groups_of_equals([item.args for item in items]):
            alike = [items[index] for index in places]
            scored = await function(items=alike, models=self.models, **alike[0].args)
            for index, reward in zip(places, scored, strict=True):
                rewards[index] = reward
        return [reward for reward in rewards if reward is not None]

    def score_sync(self, name: str, items: Sequence[RewardItem]) -> list[Reward]:
        if name not in MODEL_REWARDS:
            return self.pool.score_sync(name, items)
        return call_in(self.loop, self.score(name, items))


def _groups_of_equals(arguments: Sequence[Mapping[str, Any]]) -> list[list[int]]:
    groups: list[list[int]] = []
    for index, mine in enumerate(arguments):
        group_of_equals = next((group for group in groups if arguments[group[0]] == mine), None)
        if group_of_equals is None:
            groups.append([index])
        else:
            group_of_equals.append(index)
    return groups


def conversation(item: RewardItem) -> list[Message]:
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

    `model` is the name of an auxiliary model, by default the first reward model. A conversation beyond the model's
    length limit gets an error.
    """
    conversations = [[*conversation(item), {"role": "assistant", "content": item.response}] for item in items]
    scores = await models.rated(model, conversations)
    return [
        Reward(error=score) if isinstance(score, str) else Reward({"reward_model": scale * score + offset})
        for score in scores
    ]
