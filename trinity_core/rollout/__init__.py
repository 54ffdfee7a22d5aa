"""Rollout: the explorer, which turns tasks into experiences."""
