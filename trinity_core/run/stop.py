"""Ends a run early by `monitor.stop`: it saves, is evaluated, and completes with the reason."""

from __future__ import annotations

import logging
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from threading import Lock

from trinity_core.base.files import read_json
from trinity_core.base.layout import stages_of
from trinity_core.config import Config
from trinity_core.config.schema.monitor import BudgetConfig, StopConfig
from trinity_core.exchange.tracking.answers import read_answers
from trinity_core.exchange.tracking.metrics_file import MetricsReader, stream_of
from trinity_core.exchange.tracking.run_record import read_record
from trinity_core.exchange.tracking.scores import evaluated_sets, scores_like_the_newest
from trinity_core.results.paired import Scores, paired
from trinity_core.workflows.rewards.base import JUDGE_CALLS

log = logging.getLogger(__name__)
LOOK_SECONDS = 5.0


class StopRules:
    """Looks at most every few seconds at what the run has recorded. Thread-safe."""

    def __init__(self, config: Config, gpus: int, elsewhere: Mapping[str, float]) -> None:
        """`elsewhere`: what the other stages of its pipeline have spent, by the names of `BudgetConfig`."""
        self.reason = ""
        self._config, self._rules, self._gpus, self._elsewhere = config, config.monitor.stop, gpus, elsewhere
        self._counted: dict[tuple[str, str, int], float] = {}
        """Budget, source and step → amount."""
        self._reader = MetricsReader(config.job_dir, self._counted.clear)
        self._looked, self._lock = 0.0, Lock()
        self._judged = -1
        """Newest evaluation that `patience` has been applied to."""

    def has_enough(self) -> bool:
        """True once a rule applies; `reason` then says which."""
        with self._lock:
            if not self.reason and self._rules != StopConfig() and time.monotonic() - self._looked > LOOK_SECONDS:
                self._looked = time.monotonic()
                if reason := self._applies():
                    self.reason = f"monitor.stop.{reason}"
                    log.info("the run saves and ends: %s", self.reason)
            return bool(self.reason)

    def spent(self) -> dict[str, float]:
        """Return what the run has spent in all attempts, by the names of `BudgetConfig`."""
        with self._lock:
            return self._spent()

    def _applies(self) -> str:
        spent = self._spent()
        together = {name: amount + self._elsewhere.get(name, 0.0) for name, amount in spent.items()}
        if reason := over_budget(self._rules, spent):
            return reason
        return f"pipeline.{reason}" if (reason := over_budget(self._rules.pipeline, together)) else self._scored()

    def _spent(self) -> dict[str, float]:
        tokens = "experience/tokens" if self._config.is_supervised else "tokens"
        for line in self._reader.read():
            for metric, amount in line.metrics.items():
                if metric == tokens and stream_of(line.source) != "eval":
                    self._counted["tokens", line.source, line.step] = amount
                elif metric.rpartition("/")[2] == JUDGE_CALLS:
                    self._counted[metric, line.source, line.step] = amount
        record = read_record(self._config.job_dir)
        hours = 0.0 if record is None else (record.earlier + time.time() - record.began) / 3600
        sampled = sum(amount for (name, *_), amount in self._counted.items() if name == "tokens")
        return {
            "tokens": sampled,
            "judge_calls": sum(self._counted.values()) - sampled,
            "hours": hours,
            "gpu_hours": hours * self._gpus,
            "price": hours * (self._config.cluster.price_per_hour or 0.0),
        }

    def _scored(self) -> str:
        scores = scores_like_the_newest(self._reader.evaluations)
        steps = sorted(scores)
        if self._rules.target is not None and steps and scores[steps[-1]] >= self._rules.target:
            return f"target: step {steps[-1]} scores {scores[steps[-1]]:.3f}"
        patience = self._rules.patience
        if patience is None or len(steps) <= patience or steps[-1] == self._judged:
            return ""
        self._judged = steps[-1]
        recent = steps[-patience:]
        best = max(steps[:-patience], key=lambda step: scores[step])
        sets = sorted({name for line in self._reader.evaluations for name in evaluated_sets(line.metrics)})
        if any(_is_better(self._config.job_dir, sets, best, step) for step in recent):
            return ""
        return (
            f"patience: no evaluation of steps {', '.join(map(str, recent))} is better than that of step {best} "
            f"({scores[best]:.3f}) beyond noise"
        )


def over_budget(budgets: BudgetConfig, spent: Mapping[str, float]) -> str:
    """Return the first budget that is spent, with both numbers; "" if none is."""
    for name, amount in spent.items():
        if (budget := getattr(budgets, name)) is not None and amount >= budget:
            return f"{name}: {amount:.4g} of {budget:g} are spent"
    return ""


def spent_by_stages(pipeline_dir: Path, without: str = "") -> dict[str, float]:
    """Return what the finished stages of a pipeline have spent together, without the run of that name."""
    totals: dict[str, float] = {}
    for folder in stages_of(pipeline_dir).values():
        spent = read_json(folder / "summary.json").get("spent") if folder.name != without else None
        for budget, amount in (spent or {}).items():
            totals[budget] = totals.get(budget, 0.0) + amount
    return totals


def _is_better(job_dir: Path, sets: Sequence[str], before: int, after: int) -> bool:
    """True if the interval of the paired difference of two evaluations lies above 0."""
    difference = paired(_answers(job_dir, sets, before), _answers(job_dir, sets, after))
    return difference is not None and difference.verdict == "better"


def _answers(job_dir: Path, sets: Sequence[str], step: int) -> Scores:
    return {f"{name} {task.digest}": task.scores for name in sets for task in read_answers(job_dir, name, step)}
