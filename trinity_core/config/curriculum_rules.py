"""Rules of the order of tasks: selectors, and the weights by which task sets are mixed."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterator

from trinity_core.config.problems import Finding
from trinity_core.config.schema import Config, TasksetConfig
from trinity_core.config.schema.buffer import TaskSelectorConfig

INPUT = "buffer.explorer_input"


def spelled_twice(written: Config) -> Iterator[Finding]:
    """Task sets that name a selector, or a weight, in two ways."""
    given = written.buffer.explorer_input
    listed = [("taskset", given.taskset)] if given.taskset is not None else []
    listed += [(f"tasksets[{i}]", taskset) for i, taskset in enumerate(given.tasksets)]
    listed += [(f"eval_tasksets[{i}]", taskset) for i, taskset in enumerate(given.eval_tasksets)]
    for name, taskset in listed:
        if taskset.data_selector is not None and taskset.task_selector != TaskSelectorConfig():
            yield Finding(f"{INPUT}.{name}.data_selector", None, "give this or task_selector, not both.")
        if taskset.weight is not None and taskset.weight_by_step:
            yield Finding(f"{INPUT}.{name}.weight_by_step", None, "give this or weight, not both.")


def weight_rules(tasksets: list[tuple[str, TasksetConfig]]) -> Iterator[Finding]:
    """Weights of the training task sets, each with its key."""
    wrong = False
    for key, taskset in tasksets:
        for step in taskset.weight_by_step:
            if not (step.isascii() and step.isdigit() and 0 < int(step) < 2**31):
                wrong = True
                message = f"the keys are explore steps, which count from 1; {step!r} is none."
                yield Finding(f"{key}.weight_by_step", step, message)
    points = {key: taskset.weight_points for key, taskset in tasksets} if not wrong else {}
    given = [each for each in points.values() if each is not None]
    if not given:
        return
    for key, each in points.items():
        if each is None:
            message = "must be given where another training task set has a weight."
            yield Finding(f"{key}.weight", None, message)
    if len(given) == len(points) and (empty := _unfilled(given)) is not None:
        first = next(iter(points))
        yield Finding(f"{first}.weight", 0, f"all training task sets have weight 0 at explore step {empty}.")


def queue_rules(
    config: Config, training: list[tuple[str, TasksetConfig]], evals: list[tuple[str, TasksetConfig]]
) -> Iterator[Finding]:
    """Task sets of `storage_type: queue`, whose tasks arrive while the run goes on."""
    for key, taskset in evals:
        if taskset.storage_type == "queue":
            yield Finding(
                f"{key}.storage_type", "queue", "must be file or sql: an evaluation has the same tasks each time."
            )
    queues = [(key, taskset) for key, taskset in training if taskset.storage_type == "queue"]
    for key, taskset in queues:
        if "://" in taskset.path and not taskset.path.startswith("sqlite:///"):
            message = "must be a SQLite file: name.db (in the run's buffer folder), or sqlite:////folder/name.db."
            yield Finding(f"{key}.path", None, message)
        if taskset.task_selector != TaskSelectorConfig():
            message = "must be left out: tasks of a queue are taken once each, in the order of arrival."
            yield Finding(f"{key}.task_selector", None, message)
        if len(training) > 1 and taskset.weight_points is None:
            message = "must be given, for all training task sets: nobody knows how many tasks a queue will have."
            yield Finding(f"{key}.weight", None, message)
    if queues and config.mode in ("both", "explore", "train") and config.buffer.total_steps is None:
        message = "must be given: nobody knows how many tasks a queue will have."
        yield Finding("buffer.total_steps", None, message, ("trainer.total_steps",))
    if queues and config.synchronizer.max_staleness is not None:
        message = "must be left out with a queue of tasks: nobody can tell when tasks will arrive."
        yield Finding("synchronizer.max_staleness", config.synchronizer.max_staleness, message)


def _unfilled(weights: list[dict[int, float]]) -> int | None:
    """A step at which all weights are 0; None if there is none. Weights are linear between their steps."""

    def zero(points: dict[int, float], step: int) -> bool:
        steps = sorted(points)
        place = bisect_right(steps, step)
        around = {steps[max(place - 1, 0)]} if step in points else set(steps[max(place - 1, 0) : place + 1])
        return all(points[each] == 0 for each in around)

    for step in sorted({step for points in weights for step in points}):
        if all(zero(points, step) for points in weights):
            return step
    return None
