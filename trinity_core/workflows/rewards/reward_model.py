"""`reward_model`: the score of a model with one output, trained on preferences (a sequence classifier)."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from trinity_core.workflows.rewards.base import Reward, RewardItem
from trinity_core.workflows.rewards.models import RewardModels, conversation, model_reward


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
