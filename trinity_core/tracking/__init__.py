"""Tracking: a metrics file per job, sampled rollouts, and their way to MLflow, TensorBoard or W&B."""

from trinity_core.tracking.metrics_file import MetricLine, MetricsFile, Tail, read_metrics, rewind, series
from trinity_core.tracking.rollouts import SampledRollout, read_rollouts, rollouts_table, save_rollouts

__all__ = [
    "MetricLine",
    "MetricsFile",
    "SampledRollout",
    "Tail",
    "read_metrics",
    "read_rollouts",
    "rewind",
    "rollouts_table",
    "save_rollouts",
    "series",
]
