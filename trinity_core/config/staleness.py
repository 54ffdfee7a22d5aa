"""Rules for `synchronizer.max_staleness` and `sync_in_flight`: what else a run does must fit within the bound."""

from __future__ import annotations

from collections.abc import Iterator

from trinity_core.config.problems import Finding
from trinity_core.config.resolve import draws_by, expert_share
from trinity_core.config.schema import Config

KEY = "synchronizer.max_staleness"
STYLE, STRATEGY = "synchronizer.sync_style", "algorithm.sample_strategy"


def staleness_rules(config: Config) -> Iterator[Finding]:
    """What contradicts a bound on staleness, or new weights in mid-generation."""
    sync, most = config.synchronizer, config.synchronizer.max_staleness
    if sync.sync_in_flight and (config.is_synchronous or sync.style == "explorer_driven"):
        message = f"cannot go with sync_style {sync.sync_style}, where weights change between explore steps only."
        yield Finding("synchronizer.sync_in_flight", True, message, (STYLE, "mode"))
    if most is None:
        return
    if (drawn := draws_by(config)) not in ("default", "fifo", "staleness_control"):
        message = f"cannot go with the sample strategy '{drawn}': rows must be trained in the order of their arrival."
        yield Finding(KEY, most, message, (STRATEGY,))
    other = config.algorithm.sample_strategy_args.get("max_staleness", most)
    if drawn == "staleness_control" and other != most:
        message = f"is {most}, but {STRATEGY}_args.max_staleness is {other}; give one of them."
        yield Finding(KEY, most, message, (f"{STRATEGY}_args",))
    yield from _room(config, most)


def _room(config: Config, most: int) -> Iterator[Finding]:
    """The bound must allow what happens anyway, or explorers could never begin (`sync.schedule.least_staleness`)."""
    sync, buffer = config.synchronizer, config.buffer
    repeats = max((taskset.repeat_times or 1 for taskset in buffer.explorer_input.tasksets), default=1)
    rows = (buffer.batch_size or 1) * repeats
    taken = max(round((buffer.train_batch_size or 1) * (1 - expert_share(config.algorithm))), 1)
    fills = -(-rows // taken)
    rests_on = ("buffer.batch_size", "buffer.train_batch_size", "synchronizer.sync_interval", STYLE, "mode")
    if not config.is_synchronous:
        every = 1 if sync.style == "explorer_driven" else sync.sync_interval
        least, offset = every - 1 + fills - 1, ""
    elif fills == 1:
        every, least = sync.sync_interval, sync.sync_interval - 1 + sync.sync_offset
        offset = f", sync_offset is {sync.sync_offset}"
    else:
        message = (
            f"cannot be kept with sync_style fixed: an explore step gives {rows} rows, a train step takes {taken}, so "
            "the trainer runs ahead further and further."
        )
        yield Finding(KEY, most, message, rests_on)
        return
    if most < least:
        message = (
            f"must be at least {least}: versions are published every {every} train steps{offset}, and the rows of an "
            f"explore step fill {fills}."
        )
        yield Finding(KEY, most, message, rests_on, str(least))
