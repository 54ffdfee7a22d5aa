"""Advantages, found by name in `ADVANTAGES`."""

from trinity_core.algorithms.advantages import group, steps, token, trust
from trinity_core.algorithms.advantages.grouping import ADVANTAGES, advantage

__all__ = ["ADVANTAGES", "advantage", "group", "steps", "token", "trust"]
