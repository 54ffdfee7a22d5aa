"""A session: one attempt at one stage. It owns the actors, the tracking thread and the request to stop."""

from __future__ import annotations

import logging
import shlex
import threading
import time
from collections.abc import Callable
from pathlib import Path
from types import TracebackType
from typing import Any

from trinity_core.checkpoints.huggingface import huggingface_folder
from trinity_core.config import Config, public_dict
from trinity_core.errors import TransientFault
from trinity_core.layout import JobLayout
from trinity_core.plugins import load_plugins
from trinity_core.runlock import release
from trinity_core.runtime import actors
from trinity_core.runtime.cluster import Cluster, close_cluster, open_cluster
from trinity_core.runtime.ending import SHARED_END
from trinity_core.runtime.faults import first_error_stays, result_of
from trinity_core.runtime.placement import components_of
from trinity_core.runtime.progress import ActorWaits, ProgressReport
from trinity_core.runtime.pulse import Pulse
from trinity_core.runtime.stage import Stage, lock_names
from trinity_core.runtime.starting import Arrival, StartWait, withdraw
from trinity_core.runtime.trainers import Trainers
from trinity_core.tracking.forwarder import (
    CLOSE_SECONDS,
    FAILED_CLOSE_SECONDS,
    Forwarder,
    ForwarderThread,
    open_writer,
    warn_unsent,
)
from trinity_core.tracking.metrics_file import explorer_source, metrics_path, was_tracked
from trinity_core.tracking.prometheus import PrometheusPage
from trinity_core.tracking.run_outcome import RunOutcome
from trinity_core.tracking.writers import RunInfo, Writer, is_away

log = logging.getLogger(__name__)


def open_session(stage: Stage) -> Session:
    """Start or join Ray and begin to load the engines; the trainer starts when it is first used."""
    try:
        return Session(stage, open_cluster(stage.config, stage.placement.gpu_per_node)).start()
    except BaseException as error:
        _withdraw_explorer(stage, error)
        raise


def _withdraw_explorer(stage: Stage, error: BaseException) -> None:
    if "explore" in components_of(stage.config, stage.placement):
        with first_error_stays(succeeded=False):
            withdraw(stage.config, error)


class Session:
    """The processes of one attempt. Use it as a context: they end with the block, however the block ends.

    Passed from task to task within one process, never stored.
    """

    def __init__(self, stage: Stage, cluster: Cluster) -> None:
        self.stage = stage
        self.config = stage.config
        self.placement = stage.placement
        self.cluster = cluster
        self.began = time.monotonic()
        self._stop = threading.Event()
        self._shared_end = SHARED_END.get()
        self._lock = threading.RLock()
        self._engines: list[Any] = []
        self._auxiliary: list[list[Any]] = []
        self._explorer: Any = None
        self.trainers = Trainers(cluster, self.config, self.placement, self.check, self.is_stopping)
        self._tracking: TrackingThread | None = None

    def start(self) -> Session:
        """Open tracking and start the engines. If that fails, everything that was started ends."""
        try:
            self._tracking = TrackingThread(self.stage)
            self.engines()
        except BaseException as error:
            with first_error_stays(succeeded=False):
                self.close(RunOutcome.of(error))
            raise
        return self

    def __enter__(self) -> Session:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        outcome = RunOutcome.of(error)
        self.stop()
        if error is not None:
            _withdraw_explorer(self.stage, error)
        with first_error_stays(error is None):
            try:
                if self.config.monitor.enable_ray_timeline and self.cluster.alive():
                    self.cluster.write_timeline(JobLayout(self.config.job_dir).monitor / "timeline.json")
            finally:
                self.close(outcome)

    @property
    def components(self) -> set[str]:
        """Which of `explore` and `train` this run consists of."""
        return components_of(self.config, self.placement)

    def is_stopping(self) -> bool:
        """Whether the run is to end at the next step boundary."""
        return self._stop.is_set() or (self._shared_end is not None and self._shared_end.asked)

    def stop(self) -> None:
        """Ask everything to save and end."""
        self._stop.set()

    def raise_if_ended(self) -> None:
        """Raise `Stopped` if the run has saved and ended because all runs of this process were asked to."""
        if self._shared_end is not None:
            self._shared_end.raise_if_asked()

    # ---- what the stage does ----

    def explore(self, loop: Callable[..., Any], report: ProgressReport | None = None) -> dict[str, Any]:
        """Run the explorer by `loop` until all tasks are done or the session stops; the explorer's summary.

        Returns when the trainer has ended too: until then it may go back to a checkpoint.
        """
        report = report or ProgressReport(self.config, explorer_source(self.config.explorer.name))
        while True:
            returns = self.trainers.returns
            summary = self._explore(loop, report)
            if "train" not in self.components or not self.trainers.wait_for_return(returns):
                return summary

    def _explore(self, loop: Callable[..., Any], report: ProgressReport) -> dict[str, Any]:
        explorer, check = self.explorer(), self._explorer_pulse().check
        starting = Arrival(self.config, self._engines_wait(check).check)
        result_of(explorer.prepare.remote(), starting.check, self.is_stopping)
        report.total_steps = result_of(explorer.progress.remote(), check, self.is_stopping)["total_steps"]
        report.actor = ActorWaits(lambda: explorer.progress.remote().future())
        run = explorer.run.remote(loop)
        [summary] = actors.run_until_done(
            [run], explorer.stop.remote, self.is_stopping, actors.EXPLORER_SECONDS, check, report
        )
        return summary

    def train(self, loop: Callable[..., Any], report: ProgressReport | None = None) -> dict[str, Any]:
        """Run the trainer's workers by `loop` until the last step or until the session stops; rank 0's summary.

        A lost worker takes them back to their latest checkpoint, and the explorer with them (`runtime.trainers`).
        """
        return self.trainers.train(loop, report or ProgressReport(self.config, "trainer"))

    def score(self, step: int, folder: Path | None) -> dict[str, float]:
        """Score the weights of `step` on every eval set: metric name -> value.

        They are those of a Hugging Face folder, or (None) what the engines started with.
        """
        explorer, check = self.explorer(), self._explorer_pulse().check
        result_of(explorer.prepare.remote(), self._engines_wait(check).check, self.is_stopping)
        return result_of(explorer.evaluate.remote(step, str(folder) if folder else None), check, self.is_stopping)

    # ---- its processes ----

    def engines(self) -> list[Any]:
        """The engines, started on first use."""
        with self._lock:
            if not self._engines and self.placement.engines:
                self._engines = actors.start_engines(self.cluster, self.config, self.placement)
            if not self._auxiliary and self.placement.auxiliary_gpus:
                self._auxiliary = actors.start_auxiliary(self.cluster, self.config, self.placement)
            return self._engines

    def explorer(self) -> Any:
        """The explorer, started on first use."""
        with self._lock:
            if self._explorer is None:
                engines = self.engines()
                self._explorer = actors.start_explorer(self.cluster, self.config, engines, self._auxiliary)
            return self._explorer

    def huggingface_folder(self, step: int) -> Path:
        """The checkpoint of `step` in Hugging Face format, converted by the trainer if it runs.

        The trainer has torch loaded; in this process its import alone takes longer than a small model's conversion.
        """
        if self.trainers.workers:
            return self.trainers.convert(step)
        return huggingface_folder(self.config, step)

    def tracking(self) -> Writer | None:
        """The tracking system's writer, once it is open, or None while it is away; raises why it does not open."""
        assert self._tracking is not None, "start() comes first"
        return self._tracking.writer()

    def tracking_link(self) -> str:
        """The address of the tracked run, or the command that shows its metrics."""
        writer = self.tracking()
        return writer.link if writer is not None else shlex.join(["less", str(metrics_path(self.config.job_dir))])

    def check(self) -> None:
        """Raise what keeps the run from its end while someone waits for it: a dead Ray, or lost tracking."""
        self.cluster.check()
        if self._tracking is not None:
            self._tracking.check()

    def _engines_wait(self, check: Callable[[], None]) -> StartWait:
        return StartWait(f"the engines of {self.config.explorer.name}", self.cluster.unplaced, check)

    def _explorer_pulse(self) -> Pulse:
        """For those who wait for the explorer: it must answer."""
        return Pulse({self.config.explorer.name: self.explorer()}, self.check)

    def close(self, outcome: RunOutcome) -> None:
        """Forward the last metrics, and end every actor. Nothing is left running, whatever fails on the way."""
        try:
            if self._tracking is not None:
                self._tracking.close(outcome)
        finally:
            try:
                self._end_actors(outcome is RunOutcome.FINISHED)
            finally:
                close_cluster(self.cluster)
                for name in lock_names(self.config, self.components):
                    release(self.config.job_dir, name)

    def _end_actors(self, succeeded: bool) -> None:
        explorer = [] if self._explorer is None else [self._explorer]
        auxiliary = [engine for engines in self._auxiliary for engine in engines]
        workers = self.trainers.workers
        mine = [*self._engines, *workers]
        kept = actors.keep(self.cluster, self.config, self.placement, self._engines, workers) if succeeded else []
        self.cluster.kill([*explorer, *auxiliary, *(actor for actor in mine if actor not in kept)])
        if "train" in self.components:
            remove_shared_weights(self.config)


OPEN_SECONDS = 300.0
"""For the tracking system to open: a new MLflow database on a busy machine takes a minute."""
AGAIN_SECONDS = 5.0
"""Between two attempts to open one that is away."""


class TrackingThread:
    """Opens the tracking system in a thread, then forwards to it in another.

    MLflow's import and a new database take seconds, in which the engines start. A run that has been tracked before goes
    on while its tracking system is away, as it does when that goes away later; it is opened as soon as it is back. Of a
    run's first start the address may be wrong, so that is a `TransientFault`.
    """

    def __init__(self, stage: Stage) -> None:
        self._stage = stage
        self._writer: Writer | None = None
        self._forwarder: ForwarderThread | None = None
        self._page: PrometheusPage | None = None
        self._error: BaseException | None = None
        self._settled = threading.Event()
        """Set once it is open, away, or has been given up."""
        self._closing = threading.Event()
        self._handing_over = threading.Lock()
        self._is_late = False
        """True once nobody waits for it to open any more."""
        self._opening = threading.Thread(target=self._open, name="tracking", daemon=True)
        self._opening.start()

    def writer(self) -> Writer | None:
        """The writer, once it is open; None while the tracking system is away. Raises why it does not open."""
        if not self._settled.wait(OPEN_SECONDS):
            raise TransientFault(f"the tracking system did not open within {OPEN_SECONDS:g} s (section monitor)")
        if self._error is not None:
            raise self._error
        return self._writer

    def check(self) -> None:
        """Raise why tracking has been given up. A tracking system that does not answer now is no such reason."""
        if self._error is not None:
            raise self._error
        if self._forwarder is not None:
            self._forwarder.check()

    def close(self, outcome: RunOutcome) -> None:
        """Forward what is left, and end the run in the tracking system. One that is away is tried a last time."""
        if outcome is RunOutcome.FINISHED:
            self.writer()
        self._closing.set()
        self._opening.join(CLOSE_SECONDS if outcome is RunOutcome.FINISHED else FAILED_CLOSE_SECONDS)
        with self._handing_over:
            self._is_late = True
        if self._forwarder is not None:
            try:
                self._forwarder.close(outcome)
            finally:
                if self._page is not None:
                    self._page.close()
        elif self._error is None:
            warn_unsent("it could not be opened", self._stage.config.job_dir)

    def _open(self) -> None:
        try:
            config = self._stage.config
            info = RunInfo(
                project=config.project,
                name=config.name,
                job_dir=config.job_dir,
                config=public_dict(config),
                parent_dir=self._stage.parent_dir,
                args=config.monitor.monitor_args,
                tags={"stage": self._stage.stage, "algorithm": config.algorithm.algorithm_type},
                keeps_status=config.mode == "bench" or config.explores_alone,
                explorer=config.explorer.name if config.explores_alone else "",
            )
            load_plugins(config.plugin_dir)  # one of them may bring the monitor
            self._writer = self._opened(info)
            with self._handing_over:
                if self._writer is not None and self._is_late:
                    self._writer.close(RunOutcome.FAILED)
                elif self._writer is not None:
                    if config.monitor.prometheus_port:
                        self._page = PrometheusPage(config.monitor.prometheus_port, config.project, config.name)
                    forwarder = Forwarder(config.job_dir, self._writer, config.mode, config.explorer.name, self._page)
                    self._forwarder = ForwarderThread(forwarder)
        except BaseException as error:  # noqa: BLE001 - raised to whoever asks for the writer
            self._error = error
        finally:
            self._settled.set()

    def _opened(self, info: RunInfo) -> Writer | None:
        """The writer; None if the tracking system was away until the run ended."""
        monitor = self._stage.config.monitor.monitor_type
        while True:
            last = self._closing.is_set()
            try:
                return open_writer(monitor, info, Path(self._stage.config.checkpoint_root_dir))
            except Exception as error:
                if not is_away(error):
                    raise
                if not was_tracked(info.job_dir):
                    raise TransientFault(str(error)) from error
                if not self._settled.is_set():
                    log.warning("the tracking system is away (%s): metrics are kept and sent when it is back", error)
            self._settled.set()
            if last:
                return None
            self._closing.wait(AGAIN_SECONDS)


def remove_shared_weights(config: Config) -> None:
    """Remove the weights published through shared memory, which are of no use after the run."""
    from trinity_core.sync.methods import run_versions

    run_versions(config).remove()
