"""The trainer's sources of batches: the experience store for rollouts, a data set for SFT and DPO. Rank 0 only."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from functools import partial
from typing import Any

from trinity_core.algorithms.objective import Objective
from trinity_core.base.errors import DataError, TransientFault, TrinityError
from trinity_core.base.files import read_json
from trinity_core.base.waits import Wait, poll
from trinity_core.config.resolve import held_out, replay_args, shares
from trinity_core.config.schema import Config
from trinity_core.config.schema.buffer import ExperienceBufferConfig
from trinity_core.config.training import RETENTION
from trinity_core.data.experience import Experience
from trinity_core.data.lengths import TasksTaken, takes_whole_step, tasks_taken, training_steps
from trinity_core.data.rejected import RejectedRows
from trinity_core.data.schedule import TaskSchedule, check_order, open_tasksets
from trinity_core.data.supervised import Kind, SupervisedMixture, SupervisedSet
from trinity_core.data.tokenizer import endless_answers, policy_encoder
from trinity_core.exchange.checkpoints.resume import latest_whole, update_meta
from trinity_core.exchange.store.archive import Archive, RowAdvantage
from trinity_core.exchange.store.earlier_rollouts import read_answers
from trinity_core.exchange.store.expert import ExpertData, ExpertMixture, ExpertSource
from trinity_core.exchange.store.members import Contribution, Stats
from trinity_core.exchange.store.presence import all_is_dropped, describe_explorers
from trinity_core.exchange.store.run_store import open_run_store, present
from trinity_core.exchange.store.schema import TRAINER
from trinity_core.exchange.store.store import ExperienceStore
from trinity_core.exchange.store.strategies import Strategy, make_strategy

log = logging.getLogger(__name__)

LOOK_SECONDS = 1.0
"""Interval of progress reports during a wait."""
TAKEN = "tasks_taken_after"
"""Key of `trainer_meta.json`: step -> tasks of each later train step."""
BUSY_TIMES = 24
"""Factor on `max_read_timeout` while no row has come but an explorer is at work."""
BUSY = (
    "train step %d: no experience in %g s, but an explorer is at work, perhaps in a long evaluation; still waiting. %s"
)
CHANGED = "buffer.train_batch_size or repeat_times has changed: train steps after step %d take %d tasks each"
SHORT = "train step %d takes %d rows instead of %s: no more came in %g s (max_read_timeout); %s"


class BatchSource:
    """Yields the batch of each step; after a resume, the same step gets the same batch.

    This base class has no batches and no explorers: ranks other than 0 use it and get their batches from rank 0.
    """

    def draw(self, step: int, stop: Callable[[], bool], tell: Callable[[str], None]) -> list[Experience] | None:
        """Wait for the rows of `step`; [] for an empty step, None if `stop()` is true or the data has ended.

        Calls `tell` now and then with a text that says what it waits for.
        """
        return None

    def present(self, total_steps: int) -> AbstractContextManager[None]:
        """A context in which explorers see that a trainer with this many steps is at work."""
        return nullcontext()

    def end(self) -> None:
        """Record for later explorers that the trainer ended before its last step."""

    def held_out(self, key: str) -> list[Experience]:
        """Return the rows of a data set whose loss is measured."""
        return []

    def untrained_rows(self) -> int:
        """Return the number of rows in the queue; 0 for a data set, which is not consumed."""
        return 0

    def contributions(self, step: int | None = None) -> dict[str, Contribution]:
        """Return each explorer's share of the batch of a train step, or of all batches, by its name."""
        return {}

    def rewind(self, step: int) -> None:
        """Rewind to checkpoint `step`. Raises DataError if data or its order changed, so that rows after `step` would
        repeat or be skipped."""

    def explorer_steps(self) -> dict[str, int]:
        """Return the last step of each explorer, by its name."""
        return {}

    def awaited(self, version: int) -> bool:
        """True if all explorers wait for weights of `version`."""
        return True

    def explored(self) -> int:
        """Return the last stored explore step of the run's own explorer."""
        return 0

    def record_advantages(self, step: int, advantages: Sequence[RowAdvantage]) -> None:
        """Record the advantages of the rows of train step `step`, in the order of its batch."""

    def before_save(self, step: int) -> None:
        """Make the batches up to `step` durable, before the checkpoint that depends on them is committed."""

    def commit(self, step: int, oldest: int) -> None:
        """Called once the checkpoint of `step` is committed; a resume from `oldest` or later must be exact."""


class SupervisedSource(BatchSource):
    """Data sets of answers or preference pairs; the order of rows depends only on `order` and the step."""

    def __init__(
        self, config: Config, data: SupervisedSet, others: Sequence[SupervisedSet] = (),
        measured: Mapping[str, SupervisedSet] | None = None,
    ) -> None:  # fmt: skip
        self._measured = dict(measured or {})
        weights = list(shares(config).values())
        self.data = SupervisedMixture([data, *others], weights) if others else data
        self.rows = config.buffer.train_batch_size
        self.meta = config.layout.trainer_meta
        self.order = {
            "buffer.train_batch_size": self.rows,
            "seed": config.seed,
            "buffer.trainer_input.experience_buffer": f"{len(data)} usable rows (fingerprint {data.fingerprint})",
        }
        if others:
            self.order["share of each data set"] = dict(
                zip([source.name for source in (data, *others)], weights, strict=True)
            )
            self.order["buffer.trainer_input.auxiliary_buffers"] = [other.fingerprint for other in others]

    def draw(self, step: int, stop: Callable[[], bool], tell: Callable[[str], None]) -> list[Experience] | None:
        return None if stop() else self.data.batch(step, self.rows)

    def held_out(self, key: str) -> list[Experience]:
        data = self._measured[key]
        return [experience for index in range(len(data)) for experience in data.experiences(index)]

    def rewind(self, step: int) -> None:
        if step:
            check_order(read_json(self.meta).get("order", {}), self.order)

    def before_save(self, step: int) -> None:
        """Record the settings that the order depends on; all checkpoints of a run share them."""
        update_meta(self.meta, order=self.order)


class RolloutSource(BatchSource):
    """The experience store, with expert data if the sampling strategy uses some."""

    def __init__(self, config: Config, expert: ExpertSource | None, order: Mapping[str, Any] | None = None) -> None:
        buffer, algorithm = config.buffer.trainer_input.experience_buffer, config.algorithm
        self.store = open_run_store(config)
        self.name = config.trainer.name
        self.explorer = config.explorer.name
        self.explorer_meta = config.layout.explorer_meta
        self.archive = Archive(config.layout.archive)
        self._advantages: dict[int, Sequence[RowAdvantage]] = {}
        """Those that are not in the archive yet, by train step."""
        self.rows = config.buffer.train_batch_size
        self.whole_step = takes_whole_step(config)
        self.timeout = buffer.max_read_timeout
        self.expert = expert
        self.meta = config.layout.trainer_meta
        self.order = dict(order or {})
        self.strategy = make_strategy(
            algorithm.sample_strategy,
            algorithm.sample_strategy_args,
            config.synchronizer.max_staleness,
            replay_args(config),
        )

    def draw(self, step: int, stop: Callable[[], bool], tell: Callable[[str], None]) -> list[Experience] | None:
        """Return whole groups of at least `train_batch_size` rows, in a synchronous run those of a whole explore step;
        none if explorers wait for newer weights instead."""
        telling = self._reporting(step, stop, tell)
        batch = wait_lease(
            self.store, step, self.rows, step - 1, self.strategy, self.expert, self.timeout, telling, self.whole_step
        )
        return None if batch == [] and self.store.exhausted() else batch

    def _reporting(self, step: int, stop: Callable[[], bool], tell: Callable[[str], None]) -> Callable[[], bool]:
        """Wrap `stop`, which is called throughout a wait, so that it also reports what is awaited."""
        wait = Wait(f"experiences for train step {step}")
        looked = time.monotonic()

        def stop_and_tell() -> bool:
            nonlocal looked
            if time.monotonic() >= looked + LOOK_SECONDS:
                looked = time.monotonic()
                stats = self.store.stats()
                explorers = describe_explorers(stats.explorers, stats.now)
                tell(wait.note(f"{stats.ready} of {self.rows} rows are there; {explorers}"))
            return stop()

        return stop_and_tell

    @contextmanager
    def present(self, total_steps: int) -> Iterator[None]:
        """Record in the store that the trainer begins, and every few seconds that it is still alive."""
        self.store.begin(self.name, total_steps)
        with present(partial(self.store.mark_seen, TRAINER, self.name), "the trainer"):
            yield

    def end(self) -> None:
        self.store.mark_ended(self.name)

    def untrained_rows(self) -> int:
        return self.store.untrained()

    def contributions(self, step: int | None = None) -> dict[str, Contribution]:
        return self.store.contributions(step)

    def rewind(self, step: int) -> None:
        """Return later batches to the queue and drop rows that newer policies sampled."""
        if step:
            check_order(read_json(self.meta).get("order", {}), self.order)
        self.store.rewind(step)
        self.archive.rewind(step)

    def explorer_steps(self) -> dict[str, int]:
        return self.store.explorer_steps()

    def awaited(self, version: int) -> bool:
        """True if every explorer has recorded in the store that it waits for `version`."""
        return self.store.awaited(version)

    def explored(self) -> int:
        return self.store.explorer_steps().get(self.explorer, 0)

    def record_advantages(self, step: int, advantages: Sequence[RowAdvantage]) -> None:
        self._advantages[step] = advantages

    def before_save(self, step: int) -> None:
        """Flush the store, archive the batches up to `step`, and record what the order of expert rows depends on."""
        if self.order:
            update_meta(self.meta, order=self.order)
        self.store.flush()
        self.archive.extend(step, self.store.batch, self._advantages)
        for archived in list(self._advantages):  # a copy: this is a thread of its own beside the training
            if archived <= step:
                del self._advantages[archived]

    def commit(self, step: int, oldest: int) -> None:
        """Make the batches up to `step` final and delete rows trained long ago that are not used again.

        The step of each explorer is written to `explorer_meta.json` for people; a resume reads it from the store.
        """
        self.store.commit(step)
        update_meta(self.explorer_meta, checkpoint=step, explorer_steps=self.store.explorer_steps())
        self.store.prune(min(oldest, step - RETENTION), self.strategy)


def open_supervised(config: Config, buffer: ExperienceBufferConfig, kind: Kind, number: int = 0) -> SupervisedSet:
    """Open data set `number` of the trainer, tokenised; rows beyond `model.max_model_len` are rejected."""
    encoder = policy_encoder(config.model)
    if warning := endless_answers(encoder.with_template(buffer.format.chat_template)):
        log.warning("%s: %s", buffer.name, warning)
    read = read_answers(buffer, encoder, kind, config.model.max_model_len)
    rejected = RejectedRows.of(config, config.trainer.name)
    return SupervisedSet.of(read, buffer.name, kind, config.seed, rejected_rows=rejected, number=number)


def open_source(config: Config) -> BatchSource:
    """Open the configured data source. Raises DataError if it cannot be read."""
    inputs = config.buffer.trainer_input
    if config.is_supervised:
        pairs = Objective(config.algorithm).policy_loss.rows_per_unit == 2
        kind: Kind = "preferences" if pairs else "demonstrations"
        data = open_supervised(config, inputs.experience_buffer, kind)
        joined = [inputs.auxiliary_buffers[key] for key in shares(config) if key]
        others = [open_supervised(config, buffer, kind, number) for number, buffer in enumerate(joined, 1)]
        measured = {key: open_supervised(config, buffer, kind) for key, buffer in held_out(config).items()}
        return SupervisedSource(config, data, others, measured)
    return RolloutSource(config, *open_expert(config))


def open_expert(config: Config) -> tuple[ExpertSource | None, dict[str, Any]]:
    """Return the auxiliary buffers, if the sampling strategy uses them, and what their order depends on."""
    buffers = config.buffer.trainer_input.auxiliary_buffers
    is_needed = make_strategy(config.algorithm.sample_strategy, config.algorithm.sample_strategy_args).expert_ratio > 0
    if not is_needed:
        return None, {}
    opened = [
        open_supervised(config, source, "demonstrations", number) for number, source in enumerate(buffers.values())
    ]
    if not opened:
        raise DataError(f"sample_strategy '{config.algorithm.sample_strategy}' has no auxiliary buffer to draw from")
    order = {"seed": config.seed, "buffer.trainer_input.auxiliary_buffers": [data.fingerprint for data in opened]}
    if len(opened) == 1:
        return ExpertData(len(opened[0]), opened[0].experiences, config.seed), order
    weights = list(shares(config).values())
    order["share of each data set"] = weights
    return ExpertMixture(SupervisedMixture(opened, weights)), order


def total_steps(config: Config, source: BatchSource) -> int:
    """Return the number of train steps: `total_steps` if set, else `total_epochs` over the data."""
    if config.buffer.total_steps is not None:
        return config.buffer.total_steps
    if isinstance(source, SupervisedSource):
        return source.data.steps(config.buffer.total_epochs, source.rows)
    if not config.buffer.explorer_input.tasksets:
        raise DataError("the number of training steps is not known: set buffer.total_steps")
    opened = open_tasksets(config, policy_encoder(config.model))
    schedule = TaskSchedule(opened, config.buffer.batch_size, config.seed)
    return training_steps(config, schedule, _taken(config, tasks_taken(config, schedule)))


def _taken(config: Config, per_step: int) -> TasksTaken:
    """Return the tasks of the run's train steps; a changed batch size applies after the checkpoint that is resumed."""
    meta = config.layout.trainer_meta
    sizes = {int(step): size for step, size in read_json(meta).get(TAKEN, {"0": per_step}).items()}
    if set(sizes.values()) != {per_step}:
        resumed = latest_whole(config.job_dir) or 0
        sizes = {step: size for step, size in sizes.items() if step <= resumed}
        if sizes[max(sizes)] != per_step:
            sizes[resumed] = per_step
            log.warning(CHANGED, resumed, per_step)
    update_meta(meta, **{TAKEN: sizes})
    tasks = TasksTaken(sizes[0])
    for step in sorted(sizes):
        tasks = TasksTaken(sizes[step], step, tasks.by(step))
    return tasks


def wait_lease(
    store: ExperienceStore, step: int, rows: int, newest_version: int, strategy: Strategy | None = None,
    expert: ExpertSource | None = None, timeout: float = 1800.0, stop: Callable[[], bool] | None = None,
    whole_step: bool = False,
) -> list[Experience] | None:  # fmt: skip
    """`ExperienceStore.lease`, waiting until there is a batch; None once `stop()` is true.

    After `timeout` seconds (`max_read_timeout`) an incomplete batch is taken, with a warning. If not a single row has
    come, waits up to `BUSY_TIMES` as long while an explorer is at work; then raises `TransientFault`, or `TrinityError`
    if explorers have stored steps but operators dropped all their rows.
    """
    lease = partial(store.lease, step, rows, newest_version, strategy, expert, whole_step=whole_step)
    steps_before, seen = store.explorer_steps(), -1
    with store.watching() as changes:
        for times in range(1, BUSY_TIMES + 1):
            for _ in poll(timeout):
                now = changes()
                if now != seen:
                    seen = now
                    if (batch := lease()) is not None:
                        return batch
                if stop is not None and stop():
                    return None
            stats, has_rows = store.stats(), store.has_rows_for(step, strategy)
            if has_rows or not _may_bring_rows(steps_before, stats):
                break
            log.warning(BUSY, step, times * timeout, describe_explorers(stats.explorers, stats.now))
    if not has_rows:
        raise _nothing_came(step, times * timeout, steps_before, stats)
    if batch := lease(final=True):
        explorers = describe_explorers(stats.explorers, stats.now)
        what = "a whole explore step" if whole_step else rows
        log.warning(SHORT, step, len(batch), what, timeout, explorers)
    return batch


def _may_bring_rows(steps_before: Mapping[str, int], stats: Stats) -> bool:
    """True if an explorer is at work, in an evaluation or in a step that may still bring rows."""
    explorers = stats.explorers.values()
    is_at_work = any(explorer.is_at_work(stats.now) and explorer.waiting is None for explorer in explorers)
    return is_at_work and not all_is_dropped(stats.explorers, steps_before, stats.now)


def _nothing_came(
    step: int, timeout: float, steps_before: Mapping[str, int], stats: Stats
) -> TrinityError | TransientFault:
    nothing = f"no experience came for train step {step} in {timeout:g} s (max_read_timeout); "
    explorers = describe_explorers(stats.explorers, stats.now)
    if all_is_dropped(stats.explorers, steps_before, stats.now):
        return TrinityError(
            f"{nothing}{explorers}. Explorers work, but operators drop all their rows: see their metrics "
            "experiences and experiences/kept, and data_processor.experience_pipeline.operators"
        )
    return TransientFault(nothing + explorers)
