"""Advantages, found by name in `ADVANTAGES`."""

from trinity_core.algorithms.advantages import group, token
from trinity_core.algorithms.advantages.grouping import ADVANTAGES, advantage

__all__ = ["ADVANTAGES", "advantage", "group", "token"]
