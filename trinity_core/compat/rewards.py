"""Trinity-RFT's reward classes: a plugin's classes become reward functions, and ours can be called as classes."""

from __future__ import annotations

import asyncio
import inspect
import math
from collections.abc import Mapping
from contextvars import ContextVar
from typing import Any, ClassVar

from trinity_core.errors import TrinityError
from trinity_core.threads import call_in
from trinity_core.workflows.rewards.base import INPUTS, REWARD_FNS, VERIFIER_ERRORS, RewardFn, RewardItem
from trinity_core.workflows.rewards.functions import accepted
from trinity_core.workflows.rewards.pool import RewardRunner


class RewardClass:
    """Trinity-RFT's `RewardFn`: `__init__` takes `reward_fn_args`, a call returns named parts of the reward."""

    def __init__(self, **args: Any) -> None: ...

    def __call__(self, **inputs: Any) -> dict[str, float]:
        """Return the parts, from `response`, `truth` and further inputs of a workflow."""
        raise NotImplementedError(f"{type(self).__name__} has no __call__()")


SCORING: ContextVar[tuple[RewardRunner, asyncio.AbstractEventLoop, Mapping[str, Any]] | None]
SCORING = ContextVar("scoring", default=None)
"""The reward runner of this thread's workflow, its loop, and the row."""


class PooledReward(RewardClass):
    """One of this project's reward functions, which runs in the pool's processes.

    If the verifier fails, the only part is NaN, which `as_recorded` treats as no reward.
    """

    function: ClassVar[str] = ""
    """Its name in `REWARD_FNS`."""

    def __init__(self, **args: Any) -> None:
        scoring = SCORING.get()
        if scoring is None:
            raise TrinityError(f"{type(self).__name__} needs the run's reward workers: make it where a workflow runs")
        self._scoring, self._args = scoring, args

    def __call__(self, response: str = "", truth: Any = None, prompt: Any = None, **inputs: Any) -> dict[str, float]:
        """Return the parts. `inputs` that the function does not take are ignored."""
        (rewards, loop, row), function = self._scoring, REWARD_FNS.resolve(self.function)
        parameters = inspect.signature(function).parameters.keys() - set(INPUTS)
        args = self._args | {name: value for name, value in inputs.items() if name in parameters}
        work = rewards.score(self.function, [RewardItem(response, truth, str(prompt or ""), row, args)])
        [reward] = call_in(loop, work)
        return {VERIFIER_ERRORS: math.nan} if reward.parts is None else dict(reward.parts)


def reward_class(name: str) -> type[RewardClass]:
    """Return the reward class of that name: the plugin's own, or one that calls the reward function."""
    own: type[RewardClass] | None = getattr(REWARD_FNS.resolve(name), "upstream", None)
    return own or type(name, (PooledReward,), {"function": name})


def as_function(kind: type[RewardClass]) -> RewardFn:
    def score(*, prompt: str, response: str, truth: Any, task: Mapping[str, Any], **args: Any) -> dict[str, float]:
        reward = kind(**args)
        return reward(**accepted(reward, {"response": response, "truth": truth, "prompt": prompt}))

    score.__module__, score.__qualname__ = kind.__module__, kind.__qualname__
    vars(score)["upstream"] = kind
    return score
