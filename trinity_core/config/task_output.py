"""Which task sets read the output of the task pipeline."""

from __future__ import annotations

from pathlib import Path

from trinity_core.config.schema import Config
from trinity_core.config.schema.buffer import TasksetConfig
from trinity_core.config.types import SEVERAL
from trinity_core.local_paths import expanded

PIPELINE = "data_processor.task_pipeline"
SPLITS = ("train", "test")


def reads_output(config: Config, taskset: TasksetConfig) -> bool:
    """Whether a task set of this configuration reads the output: without a path, or, if none is, inputs alone."""
    pipeline = config.data_processor.task_pipeline
    if pipeline is None or taskset.storage_type == "queue":
        return False
    given = config.buffer.explorer_input
    if any(not each.path and each.storage_type != "queue" for each in (*given.tasksets, *given.eval_tasksets)):
        return not taskset.path
    return taskset in given.tasksets and not other_paths(config, taskset)


def other_paths(config: Config, taskset: TasksetConfig) -> list[str]:
    """The paths of a task set that are not among the pipeline's inputs."""
    pipeline = config.data_processor.task_pipeline
    inputs = {Path(path) for path in pipeline.inputs} if pipeline else set()
    return [path for path in taskset.path.split(SEVERAL) if Path(path) not in inputs]


def uses_pipeline(config: Config) -> bool:
    """Whether this run has a task set that reads the output."""
    given = config.buffer.explorer_input
    asked = (*given.tasksets, *given.eval_tasksets) if config.mode in ("both", "explore") else given.eval_tasksets
    return config.mode != "train" and any(reads_output(config, taskset) for taskset in asked)


def curated_folder(config: Config) -> str | None:
    """The output that the run's task sets read, by which its name, the fingerprint, is known; None if none does."""
    if config.data_processor.task_pipeline is None:
        return None
    given, root = config.buffer.explorer_input, output_root(config)
    paths = (each.path for each in (*given.tasksets, *given.eval_tasksets))
    return next((path for path in paths if path and Path(path).parent == root), None)


def output_root(config: Config) -> Path:
    """The folder of the pipeline's data sets."""
    pipeline = config.data_processor.task_pipeline
    assert pipeline is not None, "only a configuration with a task pipeline has its output"
    given = pipeline.output.path
    return expanded(given).absolute() if given else config.job_dir.parent / "curated_tasks"
