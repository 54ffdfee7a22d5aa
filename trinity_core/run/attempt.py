"""One attempt at one stage, which owns the actors, the tracking thread and the stop request; and the frontend, which
calls and shows its steps: here as plain functions, by `tasks.frontend` as Prefect tasks and subflows."""

from __future__ import annotations

import logging
import shlex
import sys
import threading
import time
from collections.abc import Callable, Collection, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor, wait
from contextvars import copy_context
from dataclasses import replace
from functools import partial
from pathlib import Path
from types import TracebackType
from typing import Any, Protocol, TypeVar

from trinity_core.base.errors import TrinityError, on_failure
from trinity_core.base.program import keeping_dropped, raise_dropped
from trinity_core.config import Config
from trinity_core.exchange.checkpoints.huggingface import huggingface_folder
from trinity_core.exchange.sync.versions import run_versions
from trinity_core.exchange.tracking.answers import TaskAnswers
from trinity_core.exchange.tracking.metrics_file import explorer_source, metrics_path
from trinity_core.exchange.tracking.pauses import Decision, record_pause
from trinity_core.exchange.tracking.progress import ActorWaits, ProgressReport
from trinity_core.exchange.tracking.writers import RunOutcome, Writer
from trinity_core.hosting import actors
from trinity_core.hosting.actors import Trainers
from trinity_core.hosting.cluster import Cluster, close_cluster, open_cluster
from trinity_core.hosting.faults import (
    CANCEL_TOKEN,
    POLL_SECONDS,
    Stopped,
    answering,
    explorer_starts,
    first_error_stays,
    raise_most_telling,
    result_of,
    starting,
    withdraw,
)
from trinity_core.hosting.placement import components_of
from trinity_core.results.doctor import Diagnosis
from trinity_core.run.nodes import reserve
from trinity_core.run.pauses import PauseWatch, ask_at_terminal, stopped_by_person
from trinity_core.run.stage import Stage, StageRequest, unlock_run
from trinity_core.run.stop import StopRules, spent_by_stages
from trinity_core.run.tracking_thread import TrackingThread
from trinity_core.run.verdicts import with_verdicts

log = logging.getLogger(__name__)
T = TypeVar("T")


def open_attempt(stage: Stage, make: Callable[[Stage, Cluster], RunAttempt] | None = None) -> RunAttempt:
    """Start or join Ray and begin to load the engines; the trainer starts when it is first used."""
    components = components_of(stage.config, stage.placement)
    with on_failure(lambda: withdraw(stage.config, sys.exception(), components)):
        cluster = open_cluster(stage.config, stage.placement.gpu_per_node)
        with on_failure(partial(close_cluster, cluster)):
            stage = replace(stage, placement=reserve(cluster, stage.config, stage.placement))
        attempt = (make or RunAttempt)(stage, cluster).start()
    log.info(
        "Ray is up: %s engine(s), %s trainer worker(s), %s GPU(s) per node",
        stage.placement.engines, stage.placement.trainers, stage.placement.gpu_per_node,
    )  # fmt: skip
    return attempt


class RunAttempt:
    """The processes of one attempt. A context manager: they end with the block, however it ends.

    Passed from task to task within one process, never stored.
    """

    def __init__(self, stage: Stage, cluster: Cluster) -> None:
        self.stage = stage
        self.config = stage.config
        self.placement = stage.placement
        self.cluster = cluster
        self.began = time.monotonic()
        self._stop = threading.Event()
        self._token = CANCEL_TOKEN.get()
        self._lock = threading.RLock()
        self._engines: list[Any] = []
        self._auxiliary: list[list[Any]] = []
        self._explorer: Any = None
        self._engines_started = False
        self._actors = actors.Actors(cluster, self.config, self.placement)
        elsewhere = spent_by_stages(stage.parent_dir, self.config.name) if stage.parent_dir else {}
        gpus = self.placement.gpu_per_node * self.config.cluster.node_num
        self.stop_rules = StopRules(self.config, gpus, elsewhere)
        self.stop_rules.reason = stopped_by_person(self.config, stage.resumed_step)
        self.pauses = PauseWatch(self.config)
        self._is_paused = False
        self.trainers = Trainers(
            self._actors, self.check, self.is_stopping, self._wait_for_shared_gpu, self._ends_early
        )
        self._tracking: TrackingThread | None = None

    def start(self) -> RunAttempt:
        """Open tracking and start the engines. On failure, everything that was started ends."""

        def end() -> None:
            with first_error_stays(succeeded=False):
                self.close(self._outcome(sys.exception()))

        with on_failure(end):
            self._tracking = self._track()
            self.engines()
        return self

    def _track(self) -> TrackingThread | None:
        return TrackingThread(self.stage)

    def __enter__(self) -> RunAttempt:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        outcome = self._outcome(error)
        self.stop()
        withdraw(self.config, error, self.components)
        with first_error_stays(error is None):
            try:
                if self.config.monitor.enable_ray_timeline and self.cluster.alive():
                    import ray

                    self.config.layout.monitor.mkdir(parents=True, exist_ok=True)
                    ray.timeline(filename=str(self.config.layout.monitor / "timeline.json"))
            finally:
                self.close(outcome)

    @property
    def components(self) -> set[str]:
        return components_of(self.config, self.placement)

    def is_stopping(self) -> bool:
        """True if the run must end at the next step boundary."""
        return self._stop.is_set() or (self._token is not None and self._token.cancelled)

    def stop(self) -> None:
        self._stop.set()

    def _ends_early(self) -> bool:
        """True once the run must save and end in its own time: it has had enough, or waits for a person."""
        return self.stop_rules.has_enough() or self.pauses.is_due()

    def begins_pause(self, trained: Mapping[str, Any] | None) -> bool:
        """True, and recorded, if the run has saved and waits for a person; `trained` is the trainer's summary."""
        pause = None if trained is None or self.stop_rules.reason else self.pauses.pause(trained)
        if pause is not None:
            record_pause(self.config.job_dir, pause)
        self._is_paused = pause is not None
        return self._is_paused

    def raise_if_cancelled(self) -> None:
        """Raise Stopped if the run has saved and ended because all runs of this process were asked to."""
        if self._token is not None:
            self._token.raise_if_cancelled()

    # ---- what the stage does ----

    def explore(self, loop: Callable[..., Any], report: type[ProgressReport] = ProgressReport) -> dict[str, Any]:
        """Run the explorer with `loop` until all tasks are done or the attempt is stopped; return the explorer's
        summary.

        Returns only when the trainer has ended too, because it may go back to a checkpoint.
        """
        progress = report(self.config, explorer_source(self.config.explorer.name))
        while True:
            rewinds = self.trainers.rewinds
            summary = self._explore(loop, progress)
            if "train" not in self.components or not self.trainers.wait_for_rewind(rewinds):
                return summary

    def _explore(self, loop: Callable[..., Any], report: ProgressReport) -> dict[str, Any]:
        explorer, check = self.explorer(), self._explorer_heartbeat()
        with explorer_starts(self.config):
            result_of(explorer.prepare.remote(), self._engines_wait(check), self.is_stopping)
        report.total_steps = result_of(explorer.progress.remote(), check, self.is_stopping)["total_steps"]
        report.actor = ActorWaits(lambda: explorer.progress.remote().future())
        run = explorer.run.remote(loop)
        [summary] = actors.run_until_done(
            [run], explorer.stop.remote, self.is_stopping, actors.EXPLORER_SECONDS, check, report,
            self._ends_early,
        )  # fmt: skip
        return summary

    def train(self, loop: Callable[..., Any], report: type[ProgressReport] = ProgressReport) -> dict[str, Any]:
        """Run the trainer's workers with `loop` until the last step or until the attempt is stopped; return rank 0's
        summary.

        After the loss of a worker, all go back to the latest checkpoint, and so does the explorer (`hosting.actors`).
        """
        summary = self.trainers.train(loop, report(self.config, "trainer"))
        self.pauses.note_end(summary)
        return summary

    def score(self, step: int, folder: Path | None) -> dict[str, float]:
        """Score the weights of `step` on every eval set; return metric → value.

        The weights are those of a Hugging Face folder, or (None) those that the engines started with.
        """
        return self._evaluated(lambda explorer: explorer.evaluate.remote(step, str(folder) if folder else None))

    def answer(self, version: int, folder: Path, taskset: str, rows: Sequence[int]) -> list[TaskAnswers]:
        """Answer these rows of an eval set with the weights of a Hugging Face folder, called `version` here."""
        return self._evaluated(lambda explorer: explorer.answer.remote(version, str(folder), taskset, rows))

    def _evaluated(self, begin: Callable[[Any], Any]) -> Any:
        """Return the result of a call of the explorer that samples."""
        explorer, check = self.explorer(), self._explorer_heartbeat()
        result_of(explorer.prepare.remote(), self._engines_wait(check), self.is_stopping)
        waits = ActorWaits(lambda: explorer.progress.remote().future())

        def check_and_tell() -> None:
            check()
            if news := waits.news():
                log.info("%s", news)

        return result_of(begin(explorer), check_and_tell, self.is_stopping)

    # ---- its processes ----

    def engines(self) -> list[Any]:
        with self._lock:
            if not self._engines and self.placement.engines:
                self._engines = self._actors.start_engines()
            if not self._auxiliary and self.placement.auxiliary_gpus:
                self._auxiliary = self._actors.start_auxiliary()
            return self._engines

    def explorer(self) -> Any:
        with self._lock:
            if self._explorer is None:
                self._explorer = self._actors.start_explorer(self.engines(), self._auxiliary)
            return self._explorer

    def huggingface_folder(self, step: int, merge: bool = True) -> Path:
        """Return the checkpoint of `step` in Hugging Face format, converted by the trainer if it runs.

        For an adapter, it is the folder in peft's format or, with `merge`, the whole model. The trainer has torch
        loaded; importing it in this process would take longer than converting a small model.
        """
        if self.trainers.workers:
            return self.trainers.convert(step, merge)
        return huggingface_folder(self.config, step, merge)

    def tracking(self) -> Writer | None:
        """Return the tracking system's writer once it is open, or None while it is away. Raises why it does not
        open."""
        assert self._tracking is not None, "start() comes first"
        return self._tracking.writer()

    def tracking_link(self) -> str:
        """Return the address of the tracked run, or the command that shows its metrics."""
        writer = self.tracking()
        return writer.link if writer is not None else shlex.join(["less", str(metrics_path(self.config.job_dir))])

    def check(self) -> None:
        """Raise the error, if any, that makes waiting for the run pointless: a dead Ray, or a permanent tracking
        error."""
        self.cluster.check()
        if self._tracking is not None:
            self._tracking.check()

    def _wait_for_shared_gpu(self) -> None:
        """Let the engines start first if the trainer shares their GPU. Only once, because lost engines get new handles.

        vLLM compares the free memory before and after a trial of its model (`vllm.utils.mem_utils`): a trainer that
        allocates meanwhile would reduce its KV cache.
        """
        if self.placement.shares_gpu and not self._engines_started:
            for engine in self.engines():
                result_of(engine.start.remote(), self._engines_wait(self.check), self.is_stopping)
            self._engines_started = True

    def _engines_wait(self, check: Callable[[], None]) -> Callable[[], None]:
        return starting(f"the engines of {self.config.explorer.name}", self.cluster.unplaced, check)

    def _explorer_heartbeat(self) -> Callable[[], None]:
        """Return `check` that also raises if the explorer does not answer."""
        return answering({self.config.explorer.name: self.explorer()}, self.check)

    def close(self, outcome: RunOutcome) -> None:
        """Forward the last metrics, and end every actor, whatever fails on the way."""
        try:
            if self._tracking is not None:
                self._tracking.close(outcome)
        finally:
            try:
                self._end_actors(outcome is RunOutcome.FINISHED)
            finally:
                close_cluster(self.cluster)
                unlock_run(self.stage)

    def _outcome(self, error: BaseException | None) -> RunOutcome:
        """Like `RunOutcome.of`. A part of an asynchronous run gets Stopped in its thread instead of the
        cancellation."""
        if self._is_paused and error is None:
            return RunOutcome.PAUSED
        cancelled = isinstance(error, Stopped) and self._token is not None and self._token.by_person
        return RunOutcome.CANCELLED if cancelled else RunOutcome.of(error)

    def _end_actors(self, succeeded: bool) -> None:
        explorer = [] if self._explorer is None else [self._explorer]
        auxiliary = [engine for engines in self._auxiliary for engine in engines]
        workers = self.trainers.workers
        mine = [*self._engines, *workers]
        kept = self._actors.keep(self._engines, workers) if succeeded else []
        try:
            self.trainers.remove_shared_weights()
        finally:
            self.cluster.kill([*explorer, *auxiliary, *(actor for actor in mine if actor not in kept)])
            self.cluster.release_after(kept, self.placement.nodes.release)
        if "train" in self.components:
            run_versions(self.config).remove()  # in this machine's shared memory, useless after the run


class Stoppable(Protocol):
    """A run attempt, or a token that several of them share."""

    def stop(self) -> None:
        """Ask everything to save and end."""

    def check(self) -> None:
        """Raise the error, if any, that makes waiting pointless."""


class Frontend:
    """Calls each step as a plain function; shows log lines only."""

    report: type[ProgressReport] = ProgressReport

    def __init__(self, decision: Decision | None = None) -> None:
        """`decision`: made before the run begins, at the pause at which it waits."""
        self.decision = decision

    def call(self, name: str, step: Callable[[], T], retries: bool = False) -> T:
        """Run a named step and return its result. With `retries` it may be tried again, if the frontend can."""
        return step()

    def examine(self, name: str, find: Callable[[], list[Diagnosis]]) -> list[Diagnosis]:
        """Run an examination of the run and return its findings. May be called in a thread of its own."""
        return find()

    def subflow(self, request: StageRequest, run: Callable[[], T]) -> T:
        return run()

    def run_components(self, run: Stoppable, components: Mapping[str, Callable[[], T]]) -> dict[str, T]:
        """Run components concurrently; return name → result.

        When one fails, the others are asked to save and end. Then a failure is raised, a permanent one first.
        """
        with ThreadPoolExecutor(max_workers=max(len(components), 1)) as threads:
            futures = {name: threads.submit(copy_context().run, call) for name, call in components.items()}
            wait_for_all(run, futures.values(), lambda future: future.exception() is not None)
        raise_most_telling([error for future in futures.values() if (error := future.exception()) is not None])
        return {name: future.result() for name, future in futures.items()}

    def begun_by(self) -> str:
        """Return an id that all attempts at one run share; "" if there is only this attempt."""
        return ""

    def is_retry(self) -> bool:
        """True for a later attempt: preflight's result may be outdated."""
        return False

    def announce(self, config: Config, stage: str, ending: str = "") -> None:
        """Announce the run that starts: a stage's, `pipeline` or `async`. `ending`: of its name, as shown."""

    def with_human_verdicts(self, stage: Stage) -> Stage:
        """Return the stage with a person's verdicts as its data, if it needs them. Raises TrinityError if there are
        none."""
        return replace(stage, config=with_verdicts(stage.config))

    def decides(self, config: Config, text: str) -> Decision | None:
        """Ask a person how a paused run continues; return the decision, or None if nobody decides here or in time."""
        return ask_at_terminal(text)

    def approves(self, config: Config, text: str) -> str | None:
        """Ask a person whether the candidate is promoted; return the reason, or None if not. Raises TrinityError, as
        only a flow can ask."""
        raise TrinityError(
            "gate.needs_approval asks a person, which only a flow can: use `trinity promote` or a deployment",
            key="gate.needs_approval",
        )

    def show(self, config: Config, summary: dict[str, Any], is_pipeline: bool = False) -> None:
        """Show the results of a run, or of a whole pipeline."""

    def show_so_far(self, config: Config, summary: dict[str, Any], running: str) -> None:
        """Show the results of a pipeline's stages that have ended, and the title of the run that begins."""


PLAIN = Frontend()


def wait_for_all(run: Stoppable, futures: Collection[Future[Any]], has_failed: Callable[[Future[Any]], bool]) -> None:
    """Wait until all futures are done; after a failure ask the others to save and end, and wait for that.

    A cancellation (an exception in this, the main thread) and a permanent tracking error have the same effect.
    `has_failed` is called with futures that are done.
    """
    try:
        with keeping_dropped():
            while not all(future.done() for future in futures):
                if any(future.done() and has_failed(future) for future in futures):
                    break
                run.check()
                raise_dropped()
                time.sleep(POLL_SECONDS)
    finally:
        if not all(future.done() for future in futures):
            run.stop()
            wait(futures)
