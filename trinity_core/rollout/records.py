"""What is written down of an explorer's steps: metrics, the seconds of each activity, sampled rollouts."""

from __future__ import annotations

import time
from contextlib import AbstractContextManager
from dataclasses import dataclass, field

from trinity_core.config import Config
from trinity_core.data.experience import Experience
from trinity_core.inference.requests import WeightSyncReport
from trinity_core.store.ledger import DrawnTask
from trinity_core.timing import StepTimer
from trinity_core.tracking.metrics_file import MetricsFile, explorer_source
from trinity_core.tracking.rollouts import SampledRollout, save_rollouts, traces_dir

SAMPLED = 16
"""Rollouts of a step that are written down for people to read."""
SAMPLE_EVERY = 10
"""Explore steps between two such samples; every evaluation is sampled."""
GAP = "weight_sync/check_gap"


@dataclass
class StepRollouts:
    """The rollouts of one explore step, with its metrics."""

    step: int
    experiences: list[Experience]
    """What the operators left."""
    given: list[Experience]
    """What the operators were given."""
    drawn: list[DrawnTask]
    numbers: dict[str, float]
    began: float = field(default_factory=time.perf_counter)


class StepRecords:
    """The records of one explorer."""

    def __init__(self, config: Config) -> None:
        self.last: dict[str, float] = {}
        """The metrics of the last step."""
        self._job_dir = config.job_dir
        self._source = explorer_source(config.explorer.name)
        self._traced = config.monitor.traces_per_step if config.monitor.monitor_type == "mlflow" else 0
        self._timer = StepTimer()
        """Of the step in progress."""

    def spent(self, activity: str) -> AbstractContextManager[None]:
        """Add the time within this context to `timing_s/<activity>` of the step in progress."""
        return self._timer.part(activity)

    def set_seconds(self, **activities: float) -> None:
        """Set `timing_s/<activity>` of the step in progress."""
        self._timer.seconds |= {f"timing_s/{name}": seconds for name, seconds in activities.items()}

    def loaded(self, done: WeightSyncReport) -> None:
        """Note what the engines say of a load and of its weight check."""
        self.set_seconds(weight_sync_engine=done.seconds, weight_check=done.check_seconds)
        if done.gap is not None:
            self.last[GAP] = done.gap

    def write(self, rollouts: StepRollouts, engine_restarts: int) -> None:
        """Write the metrics of a step, with the seconds that each activity took, and now and then some rollouts."""
        seconds, self._timer = self._timer.seconds, StepTimer()
        before = seconds.get("timing_s/wait", 0.0) + seconds.get("timing_s/weight_sync", 0.0)
        seconds["timing_s/step"] = time.perf_counter() - rollouts.began + before
        gap = {name: value for name, value in self.last.items() if name == GAP}
        numbers = rollouts.numbers | gap | seconds
        numbers["experiences_per_second"] = rollouts.numbers["experiences/kept"] / seconds["timing_s/step"]
        numbers["engine_restarts"] = float(engine_restarts)
        self.last = numbers
        MetricsFile(self._job_dir, self._source).write(rollouts.step, numbers)
        if self._traced:
            traced = map(SampledRollout.of, _spread(rollouts.experiences, self._traced))
            save_rollouts(self._job_dir, self._source, rollouts.step, traced, traces_dir(self._job_dir))
        if rollouts.step % SAMPLE_EVERY == 1:
            self.sample(self._source, rollouts.step, rollouts.experiences)

    def sample(self, source: str, step: int, experiences: list[Experience]) -> None:
        """Save some of these rollouts, evenly spread."""
        save_rollouts(self._job_dir, source, step, map(SampledRollout.of, _spread(experiences, SAMPLED)))


def _spread(experiences: list[Experience], count: int) -> list[Experience]:
    """As many of them at most, evenly spread."""
    return experiences[:: max(1, len(experiences) // count)][:count]
