"""Sampled rollouts on disk, from evaluations and some explore steps. They have texts but no tokens."""

from __future__ import annotations

from collections import defaultdict
from dataclasses import asdict
from pathlib import Path
from typing import Any

from trinity_core.errors import DataError
from trinity_core.tracking.rollouts import read_rollouts, rollout_files

LARGEST_FILE = 64 * 2**20
"""Maximum size of a file that is read as a whole; an evaluation's has 16 rollouts."""


def sample_steps(job_dir: Path) -> dict[str, list[int]]:
    """Return source → its steps with samples, ascending; evaluations first."""
    steps: dict[str, list[int]] = defaultdict(list)
    for source, step, _ in rollout_files(job_dir):
        steps[source].append(step)
    order = sorted(steps, key=lambda source: (not source.startswith("eval"), source))
    return {source: sorted(steps[source]) for source in order}


def read_samples(job_dir: Path, source: str, step: int) -> list[dict[str, Any]]:
    """Return the samples of one source and step. Raises DataError if there are none."""
    paths = [path for name, at, path in rollout_files(job_dir) if (name, at) == (source, step)]
    if not paths or paths[0].stat().st_size > LARGEST_FILE:
        raise DataError(f"{source} has no samples of step {step} that can be shown")
    return [asdict(rollout) for rollout in read_rollouts(paths[0])]


def side_by_side(left: list[dict[str, Any]], right: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Pair the samples of two steps by task and run, in the order of the first; null if a step lacks the sample."""

    def keys(samples: list[dict[str, Any]]) -> dict[tuple[int, int], dict[str, Any]]:
        return {(sample["task_index"], sample["run"]): sample for sample in samples}

    one, other = keys(left), keys(right)
    return [{"left": one.get(key), "right": other.get(key)} for key in {**one, **other}]
