"""Sampled rollouts of several runs or steps, side by side: the same task in one row."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from trinity_core.tracking.rollouts import SampledRollout, read_rollouts, rollout_files


@dataclass(frozen=True, slots=True)
class SampleRow:
    """A task and the answers that it got."""

    prompt: str
    truth: str
    answers: dict[str, SampledRollout | None]
    """Column → its answer; None where it has none."""


def sampled_steps(job_dir: Path) -> dict[str, list[int]]:
    """Source → the steps of which rollouts were kept, ascending; evaluations first."""
    steps: dict[str, list[int]] = {}
    for source, step, _ in rollout_files(job_dir):
        steps.setdefault(source, []).append(step)
    return {source: steps[source] for source in sorted(steps, key=lambda name: (not name.startswith("eval"), name))}


def samples_of(job_dir: Path, source: str, step: int) -> list[SampledRollout]:
    """The rollouts that were kept of a step; none if there are none."""
    found = [path for name, at, path in rollout_files(job_dir) if (name, at) == (source, step)]
    return read_rollouts(found[0]) if found else []


def side_by_side(columns: Mapping[str, Sequence[SampledRollout]]) -> list[SampleRow]:
    """The samples of all columns by task and run, in the order of the first column."""
    by_key = {column: {(each.task_index, each.run): each for each in samples} for column, samples in columns.items()}
    keys = dict.fromkeys(key for samples in by_key.values() for key in samples)
    rows = []
    for key in keys:
        answers = {column: samples.get(key) for column, samples in by_key.items()}
        first = next(each for each in answers.values() if each is not None)
        rows.append(SampleRow(first.prompt, first.truth, answers))
    return rows
