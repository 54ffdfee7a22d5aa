"""How fast a run goes, read from the metrics that its explorer and trainer wrote."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from statistics import fmean

from trinity_core.tracking.metrics_file import MetricLine, series

EXPLORING = {"generate": ("generate",), "reward": ("reward",), "weight sync": ("weight_sync",)}
TRAINING = {"train": ("lay_out", "log_probs", "values", "advantages", "update_critic", "update_actor")}
"""What a step consists of, as names of the metrics `timing_s/…` of the explorer and of the trainer."""
SHOWN = 0.02
"""Share of a step below which a part is not told."""


@dataclass(frozen=True, slots=True)
class Pace:
    """Seconds of a run. Evaluations, and checkpoints between steps, come on top."""

    step: float
    """From the end of a step to the end of the next, on average."""
    start: float
    """From the command to the first step: processes start and load the model."""
    parts: dict[str, float] = field(default_factory=dict)
    """What a step consists of. Parts may overlap, and none is said of what takes next to nothing."""
    measured: str = ""
    """When, in local time to the minute."""

    def whole(self, steps: int) -> float:
        """Seconds of a run of so many steps."""
        return self.start + steps * self.step


def pace_of(lines: Sequence[MetricLine], began: float, left_out: int, measured: str) -> Pace:
    """The pace of a run that began at `began` (Unix seconds), without its first `left_out` steps, which are slower.

    Raises ValueError if no step is left.
    """
    ends = {line.step: line.time for line in lines if line.source == "trainer"}
    counted = [step for step in sorted(ends) if step > left_out and step - 1 in ends]
    if not counted:
        raise ValueError(f"{len(ends)} steps were trained, of which the first {left_out} do not count")
    step = fmean(ends[each] - ends[each - 1] for each in counted)
    parts = _parts(lines, counted, EXPLORING, "explorer") | _parts(lines, counted, TRAINING, "trainer")
    first = ends[min(ends)] - began
    shown = {name: seconds for name, seconds in parts.items() if seconds >= SHOWN * step}
    return Pace(step, max(first - step, 0.0), shown, measured)


def _parts(
    lines: Sequence[MetricLine], steps: Sequence[int], parts: Mapping[str, tuple[str, ...]], source: str
) -> dict[str, float]:
    """Part → its mean seconds in these steps."""
    own = [line for line in lines if line.source == source]
    found = {}
    for part, names in parts.items():
        timings = [series(own, f"timing_s/{name}") for name in names]
        found[part] = fmean(sum(timing.get(step, 0.0) for timing in timings) for step in steps)
    return found
