"""Reward functions by name, and the pool of killable processes that run them."""

from trinity_core.workflows.rewards import boxed, code, countdown, judge, math, models
from trinity_core.workflows.rewards.base import FAST_PATHS, Parts, Reward, RewardFn, RewardItem, Scored
from trinity_core.workflows.rewards.functions import REWARD_FNS
from trinity_core.workflows.rewards.pool import RewardPool, RewardRunner

__all__ = [
    "FAST_PATHS",
    "REWARD_FNS",
    "Parts",
    "Reward",
    "RewardFn",
    "RewardItem",
    "RewardPool",
    "RewardRunner",
    "Scored",
    "boxed",
    "code",
    "countdown",
    "judge",
    "math",
    "models",
]
