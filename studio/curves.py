"""Metrics of several runs over their steps, laid over one another."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from pathlib import Path

from trinity_core.tracking.metrics_file import FORMER_NAMES, metrics_path, read_metrics
from trinity_core.tracking.writers import full_names

Curves = dict[str, dict[int, float]]
"""Metric's full name → step → value."""
FIRST_ENDINGS = ("/accuracy", "reward/mean", "final_loss", "response_length/mean")
"""Metrics that are shown unless others are chosen: one for each of these endings."""
MOST_SHOWN = 4


def read_curves(job_dir: Path) -> Curves:
    """All metrics of a run. Of a step that was written twice (by a resumed run), the later value counts."""
    former = {*FORMER_NAMES.values()}
    curves: Curves = {}
    for line in read_metrics(job_dir):
        for name, value in full_names(line).items():
            if math.isfinite(value) and not any(name.endswith(each) for each in former):
                curves.setdefault(name, {})[line.step] = value
    return {name: dict(sorted(points.items())) for name, points in sorted(curves.items())}


def file_state(job_dir: Path) -> tuple[int, int]:
    """Changes whenever `read_curves` does."""
    path = metrics_path(job_dir)
    if not path.exists():
        return 0, 0
    found = path.stat()
    return found.st_size, found.st_mtime_ns


def metric_names(curves: Mapping[str, Curves]) -> list[str]:
    """The metrics that any run has, sorted."""
    return sorted({name for own in curves.values() for name in own})


def first_shown(names: Sequence[str]) -> list[str]:
    """The metrics that are shown unless others are chosen: one for each of the first endings."""
    found = (next((name for name in names if name.endswith(ending)), None) for ending in FIRST_ENDINGS)
    return list(dict.fromkeys(name for name in found if name is not None))[:MOST_SHOWN]


def laid_over(curves: Mapping[str, Curves], metric: str) -> dict[str, list[float | int | str]]:
    """A table with the columns step, value and run: the metric of every run that has it."""
    points = [(step, value, run) for run, own in curves.items() for step, value in own.get(metric, {}).items()]
    steps, values, runs = zip(*points, strict=True) if points else ((), (), ())
    return {"step": list(steps), "value": list(values), "run": list(runs)}


def short_titles(titles: Sequence[str]) -> dict[str, str]:
    """Title → the part after its project, where that tells all of them apart."""
    names = {title: title.rpartition("/")[2] for title in titles}
    return names if len({*names.values()}) == len(names) else dict(zip(titles, titles, strict=True))
