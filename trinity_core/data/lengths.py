"""Length of a run: explore steps and train steps, each derived from the other."""

from __future__ import annotations

import math
from dataclasses import dataclass

from trinity_core.config.resolve import draws_by, expert_share, most_repeats
from trinity_core.config.schema import Config
from trinity_core.data.schedule import TaskSchedule, Weighted


@dataclass(frozen=True, slots=True)
class TasksTaken:
    """The tasks that train steps take; after a change of that number, counted from the step of the change.

    With `total_steps` each explorer counts by its own task sets and stores this in its position. With `total_epochs`
    the trainer counts, and stores the sizes in `trainer_meta.json`.
    """

    each: int
    """Tasks of a train step after `step`."""
    step: int = 0
    before: int = 0
    """Tasks taken by the steps up to `step`."""

    def by(self, step: int) -> int:
        """Return the number of tasks that the steps up to `step` take."""
        return self.before + (step - self.step) * self.each

    def steps(self, tasks: int) -> int:
        """Return the number of train steps that take this many tasks."""
        return self.step + max(0, -(-(tasks - self.before) // self.each))


def explore_steps(config: Config, schedule: TaskSchedule, taken: TasksTaken | None = None) -> int:
    """Return the explore steps of the run, from `total_steps` or from the epochs.

    In fixed style each explore step feeds one train step. Otherwise the explore steps produce the rows that the train
    steps take, by default as many in each.
    """
    total = config.buffer.total_steps
    if total is None:
        return schedule.steps(config.buffer.total_epochs)
    if config.is_synchronous:
        return total
    taken = taken or TasksTaken(tasks_taken(config, schedule))
    return -(-taken.by(total) // schedule.batch_size)


def training_steps(config: Config, schedule: TaskSchedule, taken: TasksTaken | None = None) -> int:
    """Return the train steps that consume everything the epochs' explore steps produce.

    With experience operators the number of rows is unknown, so it is one per explore step.
    """
    explored = schedule.steps(config.buffer.total_epochs)
    if config.data_processor.experience_pipeline.operators:
        return explored
    taken = taken or TasksTaken(tasks_taken(config, schedule))
    return taken.steps(explored * schedule.batch_size)


def rollouts_taken(config: Config) -> int:
    return split_rows(config.buffer.train_batch_size, expert_share(config.algorithm))[0]


def takes_whole_step(config: Config) -> bool:
    """True if each train step takes a whole explore step, as in synchronous runs; False if it counts rows.

    A rollout may become any number of rows (turns, sequences of a session). If a train step counted them, it would take
    only part of an explore step, and the rest would grow older from step to step. So a `train_batch_size` that holds an
    explore step with one row a rollout stands for the whole step. It never takes more than one: there are as many train
    steps as explore steps, and those after a larger batch would find nothing.
    """
    in_order = draws_by(config) in ("default", "fifo", "staleness_control")
    if not config.is_synchronous or not in_order:
        return False
    buffer = config.buffer
    explored = buffer.batch_size * most_repeats(buffer, config.algorithm)
    per_step = round(buffer.train_batch_size * (1 - expert_share(config.algorithm)))
    return per_step >= explored


def split_rows(rows: int, expert_ratio: float) -> tuple[int, int]:
    """Split a batch into rows from rollouts and expert rows: `round(rows * expert_ratio)`, but at least one of each.

    There are no expert rows if the ratio is 0 or the batch has only one row.
    """
    expert = min(max(round(rows * expert_ratio), expert_ratio > 0), rows - 1)
    return rows - expert, expert


def tasks_taken(config: Config, schedule: TaskSchedule) -> int:
    """Return the tasks per train step, in whole groups of the mean size; if weights change it, of the smallest.

    In fixed style at most the tasks of an explore step, because the next one waits for the weights of a train step; a
    batch is short if the step produced fewer rows.
    """
    rollouts, mixture = rollouts_taken(config), schedule.mixture
    repeats = [taskset.config.repeat_times or 1 for taskset in schedule.tasksets]
    if isinstance(mixture, Weighted):
        steps = {step for points in mixture.weights for step in points}  # linear between them, so extreme at them
        tasks = math.ceil(rollouts / min(float(mixture.shares(step) @ repeats) for step in steps) - 1e-9)
    else:
        an_epoch = sum(size * times for size, times in zip(schedule.sizes, repeats, strict=True))
        tasks = -(-rollouts * schedule.epoch_length // an_epoch)
    return min(tasks, schedule.batch_size) if config.is_synchronous else tasks
