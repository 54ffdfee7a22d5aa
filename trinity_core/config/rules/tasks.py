"""Rules about tasks: task sets, their order and weights, queues, what the pipelines read and write, and the gate."""

from __future__ import annotations

from collections.abc import Iterator

from trinity_core.config.findings import Finding, conflict, repeated_names
from trinity_core.config.paths import PIPELINE, SPLITS, other_paths, reads_output
from trinity_core.config.schema import Config, TasksetConfig
from trinity_core.config.schema.buffer import TaskSelectorConfig
from trinity_core.config.types import SEVERAL

INPUT = "buffer.explorer_input"
JOINED_INPUTS = "data_processor.experience_pipeline.inputs"
PATH = "must be given, and not be blank: a file, a folder or a hub name."
ONE_PATH = "must be one path: a list is read with storage_type file alone (a | in a URL is written %7C)."


def training_tasksets(config: Config) -> list[tuple[str, TasksetConfig]]:
    """Return each training task set with the key under which it was given."""
    single = config.written(f"{INPUT}.taskset") is not None
    return [
        (f"{INPUT}.taskset" if single and index == 0 else f"{INPUT}.tasksets[{index - single}]", taskset)
        for index, taskset in enumerate(config.buffer.explorer_input.tasksets)
    ]


def eval_tasksets(config: Config) -> list[tuple[str, TasksetConfig]]:
    """Return each evaluation task set with its key."""
    return [
        (f"{INPUT}.eval_tasksets[{i}]", taskset) for i, taskset in enumerate(config.buffer.explorer_input.eval_tasksets)
    ]


def written_tasksets(written: Config) -> list[tuple[str, TasksetConfig]]:
    """Return each task set of a configuration that is not resolved, with its key."""
    inputs = written.buffer.explorer_input
    listed = {"tasksets": inputs.tasksets, "eval_tasksets": inputs.eval_tasksets}
    single = [(f"{INPUT}.taskset", inputs.taskset)] if inputs.taskset is not None else []
    return single + [
        (f"{INPUT}.{name}[{i}]", taskset) for name, sets in listed.items() for i, taskset in enumerate(sets)
    ]


def task_rules(config: Config) -> Iterator[Finding]:
    training, evaluation = training_tasksets(config), eval_tasksets(config)
    if config.mode in ("both", "explore") and not config.is_supervised and not training:
        message = f"must be given, or tasksets, in mode {config.mode}: the explorer needs tasks."
        yield conflict(config, f"{INPUT}.taskset", message, "mode", code="missing")
    if config.mode == "bench" and not evaluation:
        message = "must be given in mode bench: there is nothing to evaluate on."
        yield conflict(config, f"{INPUT}.eval_tasksets", message, code="missing")
    produced = config.data_processor.task_pipeline is not None
    for key, taskset in (*training, *evaluation):
        if not taskset.path.strip() and not produced and taskset.storage_type != "queue":
            yield conflict(config, f"{key}.path", PATH, code="missing")
        if SEVERAL in taskset.path and taskset.storage_type != "file":
            yield conflict(config, f"{key}.path", ONE_PATH, f"{key}.storage_type")
    yield from _pipeline(config)
    yield from _weights(config)
    yield from _queues(config)
    for group in (training, evaluation):
        yield from repeated_names("task sets", ((f"{key}.name", taskset.name) for key, taskset in group))


def _weights(config: Config) -> Iterator[Finding]:
    """Check the weights of the training task sets."""
    tasksets = training_tasksets(config)
    steps = [(f"{key}.weight_by_step", step) for key, taskset in tasksets for step in taskset.weight_by_step]
    wrong = [(key, step) for key, step in steps if not (step.isascii() and step.isdigit() and 0 < int(step) < 2**31)]
    for key, step in wrong:
        message = f"the keys are explore steps, which count from 1; {step!r} is none."
        yield Finding(key, step, "out-of-range", message)
    points = {key: taskset.weight_points for key, taskset in tasksets} if not wrong else {}
    weights = [weight for weight in points.values() if weight is not None]
    for key, weight in points.items() if weights else ():
        if weight is None:
            message = "must be given where another training task set has a weight."
            yield conflict(config, f"{key}.weight", message, code="missing")
    if weights and len(weights) == len(points) and (empty := _unfilled(weights)) is not None:
        message = f"all training task sets have weight 0 at explore step {empty}."
        yield conflict(config, f"{next(iter(points))}.weight", message)


def _unfilled(weights: list[dict[int, float]]) -> int | None:
    """Return a step at which all weights are 0, or None; between two such steps of a data set they are linear."""
    import numpy as np

    steps = sorted({step for points in weights for step in points})
    at_steps = [np.interp(steps, sorted(points), [points[step] for step in sorted(points)]) for points in weights]
    return next((step for step, total in zip(steps, np.sum(at_steps, axis=0), strict=True) if not total), None)


def _queues(config: Config) -> Iterator[Finding]:
    """Check task sets with `storage_type: queue`, whose tasks arrive during the run."""
    for key, taskset in eval_tasksets(config):
        if taskset.storage_type == "queue":
            message = "must be file or sql: an evaluation has the same tasks each time."
            yield conflict(config, f"{key}.storage_type", message)
    training = training_tasksets(config)
    queues = [(key, taskset) for key, taskset in training if taskset.storage_type == "queue"]
    for key, taskset in queues:
        if "://" in taskset.path and not taskset.path.startswith("sqlite:///"):
            message = "must be a SQLite file: name.db (in the run's buffer folder), or sqlite:////folder/name.db."
            yield Finding(f"{key}.path", None, "invalid", message)  # without its value, which may hold a password
        if taskset.task_selector != TaskSelectorConfig():
            message = "must be left out: tasks of a queue are taken once each, in the order of arrival."
            yield conflict(config, f"{key}.task_selector", message)
        if len(training) > 1 and taskset.weight is None and not taskset.weight_by_step:
            message = "must be given, for all training task sets: the number of a queue's tasks is unknown."
            yield conflict(config, f"{key}.weight", message, code="missing")
    if queues and config.mode in ("both", "explore", "train") and config.buffer.total_steps is None:
        message = "must be given: the number of a queue's tasks is unknown."
        yield conflict(config, "buffer.total_steps", message, code="missing")
    if queues and config.synchronizer.max_staleness is not None:
        message = "must be left out with a queue of tasks: the time of their arrival is unknown."
        yield conflict(config, "synchronizer.max_staleness", message)


def _pipeline(config: Config) -> Iterator[Finding]:
    """Yield problems of the task pipeline, or of a task set that reads its output."""
    pipeline = config.data_processor.task_pipeline
    if pipeline is None or config.mode == "train":
        return
    if not pipeline.inputs:
        message = "must be given: the files or folders that the pipeline reads."
        yield conflict(config, f"{PIPELINE}.inputs", message, code="missing")
    if pipeline.top_k == 0:
        message = "must be the number of rows to keep, at least 1, or -1 for all."
        yield conflict(config, f"{PIPELINE}.top_k", message, code="out-of-range")
    splits = SPLITS if pipeline.test_share else SPLITS[:1]
    tasksets = [*training_tasksets(config), *eval_tasksets(config)]
    for key, taskset in tasksets:
        if reads_output(config, taskset) and taskset.split not in splits:
            more = "." if pipeline.test_share else ", which has a split test with test_share."
            message = f"must be {' or '.join(splits)}: {key} reads the output of the task pipeline{more}"
            yield conflict(config, f"{key}.split", message, f"{PIPELINE}.test_share")
    has_own_path = all(taskset.path for _, taskset in tasksets if taskset.storage_type != "queue")
    for key, taskset in training_tasksets(config) if has_own_path else ():
        others = other_paths(config, taskset)
        if others and len(others) < len(taskset.path.split(SEVERAL)):
            message = (
                f"must be inputs of the task pipeline alone, or none of them: {', '.join(others)} would be read as it "
                f"is, and so would the other inputs. Add it to {PIPELINE}.inputs, or make a task set of it."
            )
            yield conflict(config, f"{key}.path", message, f"{PIPELINE}.inputs")


def joined_rules(config: Config) -> Iterator[Finding]:
    """Yield inputs that cannot be joined: without a path or a key, or in a run without tasks."""
    pipeline = config.data_processor.experience_pipeline
    for name, source in pipeline.inputs.items():
        key = f"{JOINED_INPUTS}.{name}"
        if not source.path:
            message = "must be given: a file, a folder, a hub name or a URL."
            yield conflict(config, f"{key}.path", message, code="missing")
        if not source.join_key:
            message = "must be given: the column by which rows of the input and tasks belong together."
            yield conflict(config, f"{key}.join_key", message, code="missing")
        if source.join_key in source.columns:
            yield conflict(config, f"{key}.columns", "must leave the join_key out, which tasks have anyway.")
    if pipeline.inputs and config.mode == "serve":
        message = "must be left out in mode serve, in which there are no tasks to join them to."
        yield conflict(config, JOINED_INPUTS, message, "mode")


def gate_rules(config: Config) -> Iterator[Finding]:
    gate, names = config.gate, [taskset.name for taskset in config.buffer.explorer_input.eval_tasksets]
    for key, named in (("gate.no_loss", gate.no_loss), ("gate.floors", gate.floors)):
        for name in named:
            if name not in names:
                message = f"{name!r} is no eval set; there are {', '.join(map(str, names)) or 'none'}."
                yield conflict(config, key, message, f"{INPUT}.eval_tasksets", code="unknown-name")
    if not gate.enable:
        return
    if config.mode != "bench":
        yield conflict(config, "gate.enable", "makes its stage a gate, which trains nothing: set mode: bench.", "mode")
    if names and set(names) <= {*gate.no_loss}:
        message = "names every eval set, so that none is left on which a gain could be shown."
        yield conflict(config, "gate.no_loss", message, f"{INPUT}.eval_tasksets")
