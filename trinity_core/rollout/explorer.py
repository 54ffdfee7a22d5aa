"""The explorer: draws tasks, has the engines answer them, scores the answers and stores the rollouts, step by step.

The loop over its methods is `trinity_core.run.loop.explore`. The explorer holds no model. Its progress is in the
store: the rows of a step and the position after it are one transaction, so it may die at any moment and resume.
"""

from __future__ import annotations

import asyncio
import logging
import os
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from contextlib import suppress
from functools import partial
from typing import Any

from trinity_core.base.errors import DataError
from trinity_core.base.threads import DaemonThreads
from trinity_core.config import Config
from trinity_core.config.sync_schedule import SyncSchedule
from trinity_core.data.rejected import RejectedRows
from trinity_core.exchange.store.run_store import present
from trinity_core.exchange.store.schema import EXPLORER
from trinity_core.exchange.store.store import LineageChanged
from trinity_core.exchange.sync.versions import VersionGone, WeightVersions
from trinity_core.exchange.tracking.answers import TaskAnswers
from trinity_core.exchange.tracking.logs import logged, start_log
from trinity_core.exchange.tracking.metrics_file import MetricsFile
from trinity_core.exchange.tracking.scores import by_eval_set, score_fingerprint, scores_text, unscored_sets
from trinity_core.rollout.inference.requests import WeightSource
from trinity_core.rollout.metrics import dropped_numbers, eval_numbers, experiences_of, step_numbers, task_answers
from trinity_core.rollout.records import StepRecords, StepRollouts, drawn_tasks
from trinity_core.rollout.resources import Resources, open_resources
from trinity_core.rollout.runner import FailureWatch
from trinity_core.rollout.step_source import StepSource, loading_meanwhile, sample_step
from trinity_core.rollout.trainer_watch import AdmissionWait, GpuTurn, TrainerWatch, VersionWait, staleness_bound

log = logging.getLogger(__name__)

NEWER_THAN_DUE = (
    "explore step %d uses version %d, as version %d is gone: the schedule has changed since the checkpoint, or "
    "buffer.train_batch_size is smaller than an explore step. A resumed run may use another one"
)
PULL_ATTEMPTS = 3
"""Attempts to load a version, since a version may be removed between finding and loading it."""
LINEAGE = "lineage"
METRICS = "metrics"


class Explorer:
    """A plain class; its Ray actor is asynchronous (`max_concurrency` of a few, for `stop` and `progress`).

    `engines` and `auxiliary` (one list for each auxiliary model) are Ray actors of `Engine`, or engines in this
    process.
    """

    def __init__(self, config: Config, engines: Sequence[Any], auxiliary: Sequence[Sequence[Any]] = ()) -> None:
        os.environ.update(config.explorer.env_vars)  # before importing anything that may read them
        start_log()
        self.config = config
        self.name = config.explorer.name
        self.version: int | None = None
        """The version that the engines hold; None if they have loaded none of this lineage."""
        self._has_initial_weights = True
        """True while the engines hold the weights they started with (version 0)."""
        self._engines, self._auxiliary = engines, auxiliary
        self._preparing: asyncio.Task[Resources] | None = None
        self._resources: Resources | None = None
        self._trainer: TrainerWatch | None = None
        self._wait: VersionWait | AdmissionWait | StepSource | GpuTurn | None = None
        self._stopping = False
        self._step = 0
        self._lineage: int | None = None
        self._rewound_to: int | None = None
        """The oldest version to which the trainer went back, until the engines have weights of the new lineage."""
        self._evaluated: int | None = None
        self._state = "starting"
        self._records = StepRecords(config)
        self._turn = GpuTurn(config, self._records)
        self._failures = FailureWatch(RejectedRows.of(config, self.name), judged_later=config.mode == "explore")
        self._usage_before_wait: tuple[float, float, float] | None = None
        """Usage of engines and verifiers at the start of a wait for rollouts."""

    # ---- what others call ----

    async def prepare(self) -> None:
        """Wait for the engines; open task sets, tokenizer, store and weights. Idempotent."""
        if self._preparing is None:
            self._preparing = asyncio.ensure_future(open_resources(self.config, self._engines, self._auxiliary))
        self._resources = await asyncio.shield(self._preparing)

    async def run(self, loop: Callable[[Explorer], Awaitable[None]]) -> dict[str, Any]:
        """Explore with `loop` (`trinity_core.run.loop.explore`) to the last step, or until `stop`; return a summary.

        The loop restarts when the trainer goes back to a checkpoint, and ends when the trainer has finished, because
        later rollouts would not be trained on. Raises `TrinityError` if all tasks of a step fail, `WeightSyncError` if
        an engine does not hold the trainer's weights, `TransientFault` if engines or trainer are lost.
        """
        with logged(f"exploring by {self.name}", log):
            return await self._run(loop)

    async def _run(self, loop: Callable[[Explorer], Awaitable[None]]) -> dict[str, Any]:
        await self.prepare()
        store = self._open.store
        with present(partial(store.mark_seen, EXPLORER, self.name), f"explorer {self.name}"):
            while True:
                try:
                    await asyncio.to_thread(self._start_over)
                    await loop(self)
                    await self._turn.end(self._open.pool)
                    ends = store.mark_finished if self._is_done else store.leave
                    await asyncio.to_thread(ends, self.name)
                    break
                except LineageChanged as change:
                    await self._turn.end(self._open.pool)
                    log.warning("explorer %s starts over: %s", self.name, change)
        return await asyncio.to_thread(self._end)

    def _end(self) -> dict[str, Any]:
        """Return the summary: why the explorer ends, how many experiences each operator dropped, and how many of its
        rows are untrained (None: a trainer may still take them)."""
        store, trainer = self._open.store, self._open.store.trainer()
        if self._is_done:
            ended = "finished"
        elif self._stopping:
            ended = "stopped"
        else:
            done = f"finished all its {trainer.total} steps"
            if trainer.ended:
                done = f"ended at step {trainer.committed} of {trainer.total}, as no more experiences came"
            ended = f"the trainer has {done}"
            log.info("explorer %s ends at step %d: %s", self.name, self._step, ended)
        self._state = "stopped" if ended == "stopped" else "finished"
        untrained = store.untrained(self.name) if trainer.finished or trainer.seen is None else None
        return self._summary() | {
            "ended": ended, "untrained_rows": untrained, "dropped_experiences": store.dropped_by(self.name),
        }  # fmt: skip

    async def evaluate(self, version: int = 0, path: str | None = None) -> dict[str, float]:
        """Score `version` on every eval set, record the scores and return them: metric name -> value.

        Loads the Hugging Face folder `path` if set, else the published version; version 0 is what the engines started
        with.
        """
        await self._hold(version, path)
        return await self._evaluate(version)

    async def answer(self, version: int, path: str, taskset: str, rows: Sequence[int]) -> list[TaskAnswers]:
        """Answer these rows of an eval set with the Hugging Face folder `path`, as an evaluation does; record
        nothing."""
        await self._hold(version, path)
        [asked] = [eval_set for eval_set in self._open.eval_tasksets if eval_set.name == taskset]
        return task_answers(await self._open.evaluated(asked, version, rows))

    async def _hold(self, version: int, path: str | None) -> None:
        await self.prepare()
        await self._turn.begin(self._open.pool, lambda: False)
        if path is not None:
            self._has_initial_weights = False
            await self._open.pool.load(WeightSource("folder", path), version)
            self.version = version
        elif version != (self.version or 0) or not self._open.pool.holds_weights:
            await self.load(version)

    async def stop(self) -> None:
        self._stopping = True

    async def progress(self) -> dict[str, Any]:
        """Return step, total_steps, version, state, what it waits for or evaluates (or ""), and metrics of the last
        step."""
        work = self._wait or (self._resources and self._resources.evaluation)
        waits = work.text if work else ""
        return self._summary() | {"state": self._state, "waits": waits, "numbers": self._records.last}

    async def close(self) -> None:
        """Close the store and end the reward processes; the engines keep running."""
        if self._resources is not None:
            self._resources.close()

    # ---- methods of the loop ----

    @property
    def weights(self) -> WeightVersions:
        return self._open.weights

    @property
    def total_steps(self) -> int | None:
        """Explore steps of the whole run; None: until the trainer has finished."""
        return self._steps.total_steps

    @property
    def is_synchronous(self) -> bool:
        """True if each step waits for the version that is due (`sync_style: fixed`, with a trainer at work).

        A synchronous run resumes exactly, so its steps depend only on their tasks and weights.
        """
        return self.config.is_synchronous

    def due_version(self, step: int) -> int:
        return SyncSchedule.of(self.config).required_version(step)

    async def steps(self) -> AsyncIterator[int]:
        """Yield the next step, until `stop` or until the trainer has finished. `store` completes it."""
        while not self._is_done and not self._stopping and not await asyncio.to_thread(self._watch.has_finished):
            yield self._step + 1

    async def version_due(self, step: int) -> int | None:
        """Return the version that `step` of a synchronous explorer uses; None after `stop`, if the trainer has
        finished, or if a queue has ended.

        Waits for the version, for tasks of queues, and for a shared GPU.
        """
        version = await self.wait_for(self.due_version(step))
        if version is not None:
            version = await self._wait_for_tasks(version)
        if version is None or (self._turn.is_over and not await self._wait_for_gpu()):
            return None
        return version

    async def newest_version(self, step: int) -> int | None:
        """Return the version that `step` of an asynchronous explorer uses: the newest one, checked every few steps.

        Waits for the first version; with `max_staleness`, until the step's rows will be fresh enough when trained; in
        mode `serve`, for feedback. None after `stop`, and if the trainer has finished.
        """
        newest = await asyncio.to_thread(self.weights.latest)
        version = SyncSchedule.of(self.config).dynamic_version(step, self.version, newest)
        if version is None and (version := await self.wait_for(0)) is None:
            return None
        if (bound := staleness_bound(self.config)) is None:
            return await self._wait_for_tasks(version)
        self._state = f"waiting to begin step {step}"
        rows = self._steps.rows(step)
        store, watch = self._open.store, self._watch
        wait = AdmissionWait(self.name, rows, version, bound, self.weights, store, watch, self._is_stopping)
        return await self._waited(wait)

    async def wait_for(self, version: int) -> int | None:
        """Wait until `version`, or a newer one if it is gone, can be loaded; return that version.

        None after `stop`, and if the trainer has finished. Raises `LineageChanged` if the trainer went back during the
        wait, `TransientFault` after `sync_timeout` seconds.
        """
        if await self._engines_hold(version):
            return 0
        self._state = f"waiting for version {version}"
        if not await asyncio.to_thread(self.weights.has, version):
            await self._turn.end(self._open.pool)
            await asyncio.to_thread(self._open.store.mark_waiting, self.name, version)
        wait = VersionWait(version, self.weights, self._open.store, self._watch, self._lineage, self._is_stopping)
        loadable = await self._waited(wait)
        if wait.went_back:
            raise LineageChanged(f"the trainer went back during the wait for version {version}")
        if loadable is not None and loadable > version and self.is_synchronous:
            log.warning(NEWER_THAN_DUE, self._step + 1, loadable, version)
        return loadable

    async def load(self, version: int) -> None:
        """Load `version` into all engines and run their weight checks; does nothing if they hold it."""
        if (version == self.version and self._open.pool.holds_weights) or await self._engines_hold(version):
            return
        self._state = f"loading version {version}"
        await self._load(version, "weight_sync")

    async def _load(self, version: int, activity: str) -> None:
        self._has_initial_weights = False
        due = version
        with self._records.spent(activity):
            for attempt in range(PULL_ATTEMPTS):
                try:
                    done = await self._open.pool.load(self._open.source, version)
                    break
                except VersionGone as gone:
                    newest = await asyncio.to_thread(self.weights.latest)
                    if newest is None or newest < version:
                        self.version = None  # some engines may have loaded it
                        raise LineageChanged(f"the trainer goes back: {gone}") from gone
                    if attempt == PULL_ATTEMPTS - 1:
                        raise
                    version = newest
        if version != due and self.is_synchronous:
            log.warning(NEWER_THAN_DUE, self._step + 1, version, due)
        self.version = self._open.model.version = version
        self._records.loaded(done)
        if self._rewound_to is not None:
            self._steps.went_back(self._rewound_to)
            self._rewound_to = None

    async def evaluate_if_due(self) -> None:
        """Evaluate at the start of a new run (`eval_on_startup`), and when the version passes an `eval_interval`.

        Not with `eval_beside_training`.
        """
        explorer, version = self.config.explorer, self.version or 0
        if not self._open.eval_tasksets or explorer.eval_beside_training:
            return
        if self._evaluated is None:
            at_start = self._step == 0 and version == 0
            self._evaluated = version
            due = at_start and explorer.eval_on_startup
        else:
            every = explorer.eval_interval
            due = bool(every) and version // every > self._evaluated // every
        if due:
            await self._evaluate(version, self._lineage)

    async def generate_and_score(self, step: int) -> StepRollouts:
        """Run the workflows of a step, which generate and score answers, then the experience operators.

        Raises `TrinityError` if all its tasks and those before it, or all tasks of the run, fail (`FailureWatch`).
        """
        self._state = f"exploring step {step}"
        resources, began = self._open, time.perf_counter()
        earlier_usage, self._usage_before_wait = self._usage_before_wait or resources.usage(), None
        if self.is_synchronous:
            await resources.pool.reset_prefix_cache()
        rounds, in_flight = self.config.explorer.max_refill_rounds, self.config.synchronizer.sync_in_flight
        answering = sample_step(self._steps, self._open.operators, step, self.version or 0, rounds, self._failures)
        sampled = await (loading_meanwhile(answering, self._load_newest) if in_flight else answering)
        outcomes, experiences, dropped = sampled.outcomes, sampled.experiences, sampled.dropped
        generate, reward, tokens = (now - then for now, then in zip(resources.usage(), earlier_usage, strict=True))
        self._records.set_seconds(generate=generate, reward=reward, operators=sampled.operator_seconds)
        numbers = step_numbers(outcomes) | dropped_numbers(dropped)
        numbers["experiences/kept"] = float(len(experiences))
        numbers |= {"version": float(self.version or 0), "tokens": float(tokens)}
        if generate:
            numbers["tokens_per_second"] = tokens / generate
        drawn, spans = drawn_tasks(outcomes, dropped), {outcome.task.group: outcome.span for outcome in outcomes}
        return StepRollouts(step, experiences, experiences_of(outcomes), drawn, numbers, began, spans)

    async def store(self, rollouts: StepRollouts) -> None:
        """Store the rollouts of a step with the position after it, and write its metrics.

        The position also holds the metrics: `_start_over` writes them if this process dies first. A synchronous
        explorer also records the version it needs next, so that the trainer does not wait for more rows.
        """
        store, step = self._open.store, rollouts.step
        numbers = self._records.numbers(rollouts, self._open.pool.restarts)
        position = self._steps.position(step)
        position |= {"evaluated": self._evaluated, LINEAGE: self._lineage, METRICS: numbers}
        waits = self.is_synchronous and step < (self.total_steps or 0)
        with self._records.spent("store"):
            await asyncio.to_thread(self._open.operator_input.append, step, rollouts.inputs)
            await asyncio.to_thread(
                store.put,
                self.name,
                step,
                position,
                rollouts.experiences,
                self.version or 0,
                self.due_version(step + 1) if waits else None,
                rollouts.drawn,
            )
        self._step = step
        self._turn.tell_progress()
        await asyncio.to_thread(self._open.explored_file.stored, step)
        await asyncio.to_thread(self._steps.stored)
        await asyncio.to_thread(self._records.write, rollouts, numbers, self.total_steps)

    # ---- inside ----

    @property
    def _open(self) -> Resources:
        assert self._resources is not None, "prepare() comes first"
        return self._resources

    @property
    def _steps(self) -> StepSource:
        steps = self._open.steps
        if steps is None:
            raise DataError(
                "there is no task set to explore; set buffer.explorer_input.taskset",
                key="buffer.explorer_input.taskset",
            )
        return steps

    @property
    def _is_done(self) -> bool:
        last = self.total_steps is not None and self._step >= self.total_steps
        return last or self._steps.is_exhausted

    async def _wait_for_tasks(self, version: int) -> int | None:
        """Wait until there are tasks or rollouts for a step; return the version loaded then, None if none will come.

        An asynchronous explorer loads new weights during the wait.
        """
        arriving = self._steps.arrival(self._is_over)
        if arriving is None:
            return version
        if not self._turn.is_shared:
            await self.load(version)
        await self._turn.end(self._open.pool)
        self._state = "serving" if self.config.mode == "serve" else "waiting for tasks"
        self._wait, self._usage_before_wait = self._steps, self._open.usage()
        waiting = arriving if self.is_synchronous else loading_meanwhile(arriving, self._load_newest)
        try:
            if not await waiting:
                return None
            return version if self._turn.is_shared else self.version or 0
        finally:
            self._wait = None

    async def _wait_for_gpu(self) -> bool:
        """Take the shared GPU; False if no further step is needed."""
        self._state, self._wait = "waiting for the GPU", self._turn
        try:
            return await self._turn.begin(self._open.pool, self._is_over)
        finally:
            self._wait = None

    def _is_over(self) -> bool:
        """True if no further step is needed. Raises `LineageChanged` if the trainer went back."""
        trainer = self._open.store.trainer()
        if trainer.lineage != self._lineage:
            raise LineageChanged("the trainer went back while the explorer waited for its next step")
        return self._stopping or self._watch.has_finished(trainer)

    async def _waited(self, wait: VersionWait | AdmissionWait) -> int | None:
        self._wait, timeout = wait, self.config.synchronizer.sync_timeout
        try:
            with self._records.spent("wait"):
                return await asyncio.get_running_loop().run_in_executor(DaemonThreads("weights"), wait.run, timeout)
        finally:
            self._wait = None

    async def _load_newest(self) -> None:
        """Load the newest version in the middle of a step; the tokens sampled so far keep their version."""
        newest = await asyncio.to_thread(self.weights.latest)
        if newest is not None and newest > (self.version or 0):
            with suppress(VersionGone):  # the next attempt finds a newer one, or the trainer has gone back
                await self._load(newest, "weight_sync_in_flight")

    def _is_stopping(self) -> bool:
        return self._stopping

    async def _engines_hold(self, version: int) -> bool:
        """True if the engines started with `version`, so that there is no need to wait for a trainer.

        False if there is a checkpoint: the trainer resumes from it and publishes its weights. False if they have slept.
        """
        holds_initial = self._has_initial_weights and self._open.pool.holds_weights
        is_at_start = version == 0 and holds_initial and not await asyncio.to_thread(self.weights.has, 0)
        return is_at_start and not (await asyncio.to_thread(self._open.store.trainer)).committed

    @property
    def _watch(self) -> TrainerWatch:
        assert self._trainer is not None, "run() comes first"
        return self._trainer

    def _start_over(self) -> None:
        """Continue at the position in the store; after a rewind the engines' weights count as unknown."""
        stored = self._open.store.position(self.name)
        self._steps.resume(stored.position, lambda: self._open.store.positions(self.name), self._open.store.stats)
        length = self.config.buffer.total_steps if self.total_steps else None
        self._trainer = self._trainer or TrainerWatch(self._open.store, self.name, self.total_steps, length)
        position = stored.position or {}
        lineage = position.get(LINEAGE, stored.lineage if position else 0) if self._lineage is None else self._lineage
        if lineage != stored.lineage:
            back = self._open.store.went_back_to(lineage)
            self.version, self._rewound_to = None, back if self._rewound_to is None else min(back, self._rewound_to)
        self._lineage, self._step = stored.lineage, stored.step
        self._evaluated = position.get("evaluated")
        self._open.operator_input.resume(stored.step)
        self._open.explored_file.resume(stored.step)
        if METRICS in position:
            self._records.restore(self._step, position[METRICS])
        explorers = self._open.store.stats().explorers
        self._failures.any_succeeded = stored.step > explorers[self.name].empty_steps
        self._failures.any_left = any(explorer.step > explorer.empty_steps for explorer in explorers.values())
        self._failures.has_others = lambda: bool(self._open.store.stats().explorers.keys() - {self.name})
        if self._step:
            log.info("explorer %s resumes after step %d", self.name, self._step)

    async def _evaluate(self, version: int, lineage: int | None = None) -> dict[str, float]:
        """Raises `LineageChanged`, and writes no score, if the trainer is no longer in `lineage` (None: any)."""
        self._state = f"evaluating version {version}"
        began, numbers = time.perf_counter(), dict[str, float]()
        for taskset in self._open.eval_tasksets:
            outcomes = await self._open.evaluated(taskset, version)
            numbers |= eval_numbers(taskset.name, outcomes)
            self._records.answered(taskset.name, outcomes)
        numbers["eval/seconds"] = time.perf_counter() - began
        if missing := unscored_sets(numbers):
            log.warning(
                "version %d has no score: no answer in the eval sets %s has a verdict", version, ", ".join(missing)
            )
        made_with = await asyncio.to_thread(score_fingerprint, self.config, version)
        metrics = MetricsFile(self.config.job_dir, "eval")
        if lineage is not None and await asyncio.to_thread(self._open.store.lineage) != lineage:
            raise LineageChanged(f"the trainer went back while version {version} was evaluated")
        await asyncio.to_thread(self._records.save_evaluation, version)
        await asyncio.to_thread(metrics.write, version, numbers, made_with=made_with)
        log.info("scores of step %d: %s", version, scores_text(by_eval_set(self.config, numbers)))
        self._evaluated = version
        return numbers

    def _summary(self) -> dict[str, Any]:
        total = self.total_steps if self._resources and self._resources.steps else None
        return {"step": self._step, "total_steps": total, "version": self.version or 0, "evaluated": self._evaluated}
