"""The number of a stage's steps, evaluations, checkpoints and published weight versions."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from trinity_core.base.errors import DataError
from trinity_core.config import Config
from trinity_core.config.paths import reads_output
from trinity_core.config.resolve import shares
from trinity_core.config.sync_schedule import SyncSchedule
from trinity_core.config.training import RETENTION
from trinity_core.data import formats
from trinity_core.data.files import data_files, is_local, looks_local, read_rows
from trinity_core.data.inspection import is_readable, supervised_inputs
from trinity_core.data.lengths import explore_steps, training_steps
from trinity_core.data.schedule import TaskSchedule
from trinity_core.data.taskset import Taskset

MOST_BYTES = 64 << 20
"""Limit on the size of data files that are read: about a second's worth."""


@dataclass(frozen=True, slots=True)
class Steps:
    """Train steps, or explore steps of a stage that only explores."""

    count: int | None
    """None if not known before the run."""
    why: str = ""


def steps_of(config: Config) -> Steps:
    """Return the steps of a stage that explores or trains. Rows that may later prove too long are counted."""
    if config.buffer.total_steps:
        return Steps(config.buffer.total_steps)
    try:
        if config.is_supervised:
            return _supervised(config)
        return _explored(config)
    except DataError as error:
        return Steps(None, str(error))


def _explored(config: Config) -> Steps:
    tasksets = config.buffer.explorer_input.tasksets
    if not tasksets:
        return Steps(None, "there is no task set; set buffer.total_steps")
    if any(reads_output(config, taskset) for taskset in tasksets):
        return Steps(None, "the tasks are made by data_processor.task_pipeline")
    _check_readable((taskset.storage_type, taskset.path, taskset.split, taskset.subset_name) for taskset in tasksets)
    schedule = TaskSchedule(
        [Taskset.read(taskset, config.seed) for taskset in tasksets], config.buffer.batch_size, config.seed
    )
    steps = training_steps if config.mode in ("both", "train") else explore_steps
    return Steps(steps(config, schedule), _epochs(config, schedule.epoch_length, "tasks"))


def _supervised(config: Config) -> Steps:
    if len(shares(config)) > 1:
        return Steps(None, "batches are mixed from several data sets")
    (_, buffer, kind), *_ = supervised_inputs(config)  # others are held out
    _check_readable([(buffer.storage_type or "file", buffer.path or "", buffer.split, buffer.subset_name)])
    read = read_rows(buffer.path or "", buffer.split, buffer.subset_name).rows
    usable = [row for row in read if is_readable(row, buffer.format, kind)]
    if buffer.format.prompt_type == "text":
        texts = [formats.demonstration(row, buffer.format).text or "" for row in usable]
        longest = config.model.max_model_len or 0
        if any(len(text.encode(errors="replace")) >= longest for text in texts):  # a token has at least one byte
            return Steps(None, "texts longer than model.max_model_len are cut into pieces")
    rows = len(usable)
    rows_each = 2 if kind == "preferences" else 1
    steps = -(-config.buffer.total_epochs * rows * rows_each // config.buffer.train_batch_size)
    return Steps(steps, _epochs(config, rows, "rows")) if rows else Steps(None, f"{buffer.path} has no usable row")


def _epochs(config: Config, count: int, what: str) -> str:
    epochs = config.buffer.total_epochs
    return f"{epochs} epoch{'s' * (epochs > 1)} of {count:,} {what}"


def _check_readable(sources: Iterable[tuple[str, str, str, str | None]]) -> None:
    """Raise DataError unless all sources (storage, path, split, subset) are local files and small."""
    size = 0
    for storage, path, split, subset in sources:
        if storage != "file":
            raise DataError(f"data of storage_type {storage} is not read for a plan")
        if not is_local(path):
            reason = f"there is no data in {path} yet" if looks_local(path) else f"{path} is on the hub"
            raise DataError(f"{reason}, so that its rows are not known")
        size += sum(file.stat().st_size for file in data_files(path, split, subset))
    if size > MOST_BYTES:
        raise DataError(f"the data is larger than {MOST_BYTES >> 20} MiB, which is not read for a plan")


def evaluations(config: Config, steps: int) -> int:
    """Count evaluations on all eval sets: of the untrained model, when the explorer's version passes an
    `eval_interval` (beside training: of the checkpoints at its multiples), and of the last checkpoint.

    Outside fixed style the explorer's versions are not known in advance, so they are counted as if in fixed style.
    """
    if not config.buffer.explorer_input.eval_tasksets:
        return 0
    if config.mode == "bench":
        return 1
    every = config.explorer.eval_interval
    if config.evaluates_beside:
        return config.explorer.eval_on_startup + (-(-steps // every) if every else 1)
    if not config.explores or config.is_supervised:
        return 0
    schedule = SyncSchedule.of(config)
    last = schedule.required_version(steps)
    passed = {version // every for version in range(0, last + 1, schedule.interval)} if every else {0}
    return config.explorer.eval_on_startup + len(passed) - 1 + (config.mode == "both")


def evaluating_stage(stages: Sequence[Config]) -> int | None:
    """Return the index of the stage whose eval sets score a pipeline's model: the last one that has any and is no
    gate."""
    scored = (index for index, stage in enumerate(stages) if not stage.gate.enable)
    with_sets = [index for index in scored if stages[index].buffer.explorer_input.eval_tasksets]
    return with_sets[-1] if with_sets else None


def scores_base(stage: Config) -> bool:
    """True if a pipeline scores its base model with the eval sets of this stage."""
    return stage.mode == "bench" or stage.explorer.eval_on_startup


def saves(config: Config, steps: int) -> int:
    """Return the number of checkpoints written: one per `save_interval`, and one at the end."""
    every = config.trainer.save_interval
    return -(-steps // every) if every else 1


def kept_checkpoints(config: Config, steps: int) -> int:
    """Peak number of checkpoints on disk."""
    keep = config.trainer.max_checkpoints_to_keep
    return saves(config, steps) if keep is None else min(saves(config, steps), keep + 1)


def stored_steps(config: Config, steps: int) -> int:
    """Return the peak number of explore steps whose rows are in the store.

    In fixed style, rows that are trained on once are deleted with the oldest kept checkpoint. Up to two save intervals
    come on top, because the previous save may still be in progress.
    """
    keep, every = config.trainer.max_checkpoints_to_keep, config.trainer.save_interval
    schedule, buffer = SyncSchedule.of(config), config.buffer.trainer_input.experience_buffer
    again = buffer.replay_buffer.enable or config.algorithm.sample_strategy_args
    if keep is None or not every or again or config.mode != "both" or schedule.style != "fixed":
        return steps
    return min(steps, max(RETENTION, (keep - 1) * every) + 2 * every + schedule.largest_lag + 1)


def syncs(config: Config, steps: int) -> int:
    """Return the number of weight versions published after train steps, without the initial one."""
    return 0 if config.is_supervised else steps // SyncSchedule.of(config).publish_every
