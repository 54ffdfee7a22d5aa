"""How often a stage evaluates, saves and publishes weights: pure arithmetic over its steps."""

from __future__ import annotations

from trinity_core.config import Config
from trinity_core.sync.schedule import publish_interval, required_version


def evaluations(config: Config, steps: int) -> int:
    """Evaluations on all eval sets: of the untrained model, when the version explored with passes an `eval_interval`,
    and of the last checkpoint. Outside fixed style, which version is explored with is not known beforehand; it is
    counted as if it were in fixed style.
    """
    if not config.buffer.explorer_input.eval_tasksets:
        return 0
    if config.mode == "bench":
        return 1
    if not config.explores or config.is_supervised:
        return 0
    sync, every = config.synchronizer, config.explorer.eval_interval
    last = required_version(steps, sync.sync_interval, sync.sync_offset)
    passed = {version // every for version in range(0, last + 1, sync.sync_interval)} if every else {0}
    return config.explorer.eval_on_startup + len(passed) - 1 + (config.mode == "both")


def saves(config: Config, steps: int) -> int:
    """Checkpoints that are written: one each `save_interval`, and one at the end."""
    every = config.trainer.save_interval
    return -(-steps // every) if every else 1


def kept_checkpoints(config: Config, steps: int) -> int:
    """Checkpoints there are at the end, or for a moment before the oldest goes."""
    keep = config.trainer.max_checkpoints_to_keep
    return saves(config, steps) if keep is None else min(saves(config, steps), keep + 1)


def syncs(config: Config, steps: int) -> int:
    """Versions of the weights that the trainer publishes after its steps; the one it begins with is not counted."""
    sync = config.synchronizer
    return 0 if config.is_supervised else steps // publish_interval(sync.style, sync.sync_interval)
