"""The first number or token in which two runs differ that should be equal."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import numpy as np

from trinity_core.config.paths import database_url
from trinity_core.data.experience import Experience
from trinity_core.exchange.store.store import ExperienceStore
from trinity_core.exchange.tracking.metrics_file import read_metrics
from trinity_core.results.audit import open_store

TIMED = ("timing_s/", "weight_sync/", "tokens_per_second", "experiences_per_second", "engine_restarts", "memory/")
"""Beginnings of the names of metrics that depend on the machine."""


def first_difference(expected: Path, found: Path, steps: int) -> str:
    """Of two runs' folders, in the order of their making: rollouts, then what was trained on them."""
    for difference in _differences(expected, found, steps):
        return difference
    return "no token, log-prob, reward or metric differs: the weights differ from the optimizer or the checkpoint on"


def _differences(expected: Path, found: Path, steps: int) -> Iterator[str]:
    metrics = [steady_metrics(job) for job in (expected, found)]
    stores = [ExperienceStore(open_store(job, database_url(None, job / "buffer"))) for job in (expected, found)]
    with stores[0], stores[1]:
        for step in range(1, steps + 1):
            yield from _batch_differences(step, *(store.batch(step) for store in stores))
            for source in ("explorer", "trainer"):
                was, now = (lines.get((source, step), {}) for lines in metrics)
                for name in sorted(was.keys() | now.keys()):
                    if was.get(name) != now.get(name):
                        yield f"step {step}: {source} metric {name} was {was.get(name)!r}, is {now.get(name)!r}"


def steady_metrics(job: Path) -> dict[tuple[str, int], dict[str, float]]:
    """(source, step) → the metrics that do not depend on the machine."""
    return {
        (line.source, line.step): {
            name: value for name, value in line.metrics.items() if not name.startswith(TIMED)
        }
        for line in read_metrics(job)
    }  # fmt: skip


def _batch_differences(step: int, expected: list[Experience], found: list[Experience]) -> Iterator[str]:
    names = [[f"{e.group} run {e.run} turn {e.turn}" for e in batch] for batch in (expected, found)]
    if names[0] != names[1]:
        yield f"step {step}: the batch has other rows: {names[0]} and {names[1]}"
        return
    for name, was, now in zip(names[0], expected, found, strict=True):
        where = f"step {step}: row {name} (sampled by version {was.newest_version})"
        for what in ("tokens", "logprobs", "versions", "action_mask"):
            yield from _array_difference(f"{where}: {what}", getattr(was, what), getattr(now, what))
        if was.reward != now.reward:
            yield f"{where}: reward was {was.reward!r}, is {now.reward!r}"


def _array_difference(where: str, was: np.ndarray | None, now: np.ndarray | None) -> Iterator[str]:
    if was is None or now is None:
        if was is not now:
            yield f"{where}: there are none in one of the runs"
    elif len(was) != len(now):
        yield f"{where}: {len(was)} and {len(now)} values"
    elif len(differ := np.flatnonzero(was != now)):
        first = int(differ[0])
        yield f"{where}[{first}] was {was[first]!r}, is {now[first]!r} ({len(differ)} of {len(was)} differ)"
