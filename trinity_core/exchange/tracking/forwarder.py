"""The forwarder tails a job's metrics, rollouts and checkpoints and sends them to the tracking system.

It runs only in the flow process. Lines that cannot be sent now, because the tracking server does not answer, are sent
later: the position is saved only after they have arrived.
"""

from __future__ import annotations

import logging
import os
import threading
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path

from trinity_core.base.errors import TransientFault, TrinityError
from trinity_core.base.layout import MANIFEST, JobLayout
from trinity_core.base.waits import poll
from trinity_core.config.schema.monitor import MonitorConfig
from trinity_core.config.secrets import without_password
from trinity_core.exchange.tracking import mlflow_writer as mlflow_writer  # registers it
from trinity_core.exchange.tracking.metrics_file import (
    STREAMS,
    MetricLine,
    MetricsReader,
    Tail,
    explorer_source,
    metrics_path,
    was_tracked,
)
from trinity_core.exchange.tracking.prometheus import PrometheusPage
from trinity_core.exchange.tracking.rollouts import read_rollouts, rollout_files, rollouts_text, traces_dir
from trinity_core.exchange.tracking.run_record import config_path
from trinity_core.exchange.tracking.scores import latest_scores
from trinity_core.exchange.tracking.writers import (
    MONITORS,
    RunInfo,
    RunOutcome,
    Writer,
    is_away,
)

log = logging.getLogger(__name__)

TRAIN_AND_EVALUATE = "train, eval"
ROLES = {
    "both": STREAMS,
    "train": ("trainer",),
    TRAIN_AND_EVALUATE: ("trainer", "eval"),
    "explore": ("explorer", "eval"),
    "serve": ("explorer", "eval"),
    "bench": ("eval",),
}
"""`mode` → streams that a flow of this mode forwards: explorer and trainer of a job may be separate flows, and so may
evaluations. A trainer may also evaluate beside training."""
REGISTERING = ("train", TRAIN_AND_EVALUATE, "both")
"""Modes whose flow registers checkpoints; every flow sends scores."""


def open_writer(monitor_type: str, info: RunInfo, checkpoint_root_dir: Path) -> Writer:
    """Open the tracking system named by `monitor.monitor_type`, with those of `info.args` that it takes."""
    monitor = MONITORS.resolve(monitor_type)
    model = MONITORS.arguments(monitor, monitor_type)
    args = {name: value for name, value in info.args.items() if model is None or name in model.model_fields}
    writer = monitor(info, checkpoint_root_dir, **args)
    if not isinstance(writer, Writer):
        raise TrinityError(
            f"monitor '{monitor_type}' makes a {type(writer).__name__}, which is no "
            "trinity_core.exchange.tracking.writers.Writer: derive its class from that one.",
            key="monitor.monitor_type",
        )
    return writer


MOST_TRACES = 50
"""Maximum number of steps whose rollouts wait to be sent as traces; MLflow takes about twenty traces a second."""
OPEN_SECONDS = 300.0
"""Time for the tracking system to open: a new MLflow database on a busy machine takes a minute."""
AGAIN_SECONDS = 5.0
"""Time between two attempts to open a tracking system that is away."""
CLOSE_SECONDS = 60.0
"""Time for the tracking system to take the last metrics at the end of a run."""
FAILED_CLOSE_SECONDS = 5.0
"""The same after a failed or stopped run: Prefect kills it 30 s after asking it to end."""
FILES_SECONDS = 1800.0
"""Further time for an attempt in progress to send files."""


class Forwarder:
    """Forwards what has appeared since the last `poll`. Not thread-safe.

    `explorer` is the name of this flow's explorer. If each explorer has its own run in the tracking system, the flow
    forwards only that explorer. `page` shows the same metrics, even while the tracking system is away. `target`
    identifies the tracking system: a new one receives everything, and so does a new run in the same one. `scores`
    returns the scores that count, by step; the default is `latest_scores`.
    """

    def __init__(
        self,
        job_dir: Path,
        writer: Writer,
        role: str = "both",
        explorer: str = "",
        page: PrometheusPage | None = None,
        target: str = "",
        scores: Callable[[], dict[int, float]] | None = None,
    ) -> None:
        self.job_dir = Path(job_dir)
        self.writer = writer
        self.page = page
        self._registers = role in REGISTERING
        own = explorer_source(explorer) if explorer and writer.per_explorer else ""
        run = f"{target} {writer.run_id}".rstrip()
        evals = f"{target} {writer.evals_id}".rstrip() if writer.per_explorer else run
        self._tails = [Tail(self.job_dir, stream, own, evals if stream == "eval" else run) for stream in ROLES[role]]
        tables = [(source, path.with_suffix(".md")) for source, _, path in rollout_files(self.job_dir)]
        self._tables_due = {table for tail in self._tails if tail.is_new for name, table in tables if tail.takes(name)}
        """Tables that another tracking system may have."""
        self._checkpoints_seen: set[int] = set()
        self._read_scores = scores or partial(latest_scores, self.job_dir)
        self._scores: dict[int, float] = {}
        self._metrics = MetricsReader(self.job_dir)
        self._evaluations: list[MetricLine] = []
        """The evaluations when `_scores` was read; determining their settings takes a while."""
        self._scores_sent: dict[int, float] = {}
        self._best: int | None = None
        self.dropped_traces = 0

    def poll(self) -> int:
        count = sum(self._forward_lines(tail) for tail in self._tails)
        self._forward_rollouts()
        self._forward_checkpoints()
        self._forward_traces()
        return count

    def close(self, outcome: RunOutcome) -> None:
        """Forward the rest and end the run, before sending files if the tracking system accepts them afterwards."""
        for tail in self._tails:
            self._forward_lines(tail)
        if self.writer.closes_before_files:  # an artifact store may refuse files, or take minutes
            self.writer.close(outcome)
        self.poll()
        if self.dropped_traces:
            log.warning("the rollouts of %d steps were not sent as traces", self.dropped_traces)
        for file in (self.job_dir / "monitor" / "curve.png", config_path(self.job_dir), self.job_dir / "summary.json"):
            if file.exists():
                self.writer.artifact(file)
        if not self.writer.closes_before_files:
            self.writer.close(outcome)

    def _forward_lines(self, tail: Tail) -> int:
        with tail.exclusive():
            lines, position = tail.read()
            if lines and self.page is not None:
                self.page.show(lines)
            if lines:
                self.writer.log(lines)
            tail.advance(position)
        return len(lines)

    def _forward_rollouts(self) -> None:
        """Send a table of each sample. One that was sent has its sample's time, which a run that goes back changes."""
        for source, step, path in rollout_files(self.job_dir):
            table, written = path.with_suffix(".md"), path.stat().st_mtime_ns
            was_sent = table not in self._tables_due and table.exists() and table.stat().st_mtime_ns == written
            if not was_sent and any(tail.takes(source) for tail in self._tails):
                table.write_text(f"# {source}, step {step}\n\n{rollouts_text(read_rollouts(path))}\n", "utf-8")
                self.writer.artifact(table, "rollouts")
                os.utime(table, ns=(written, written))
                self._tables_due.discard(table)

    def _forward_traces(self) -> None:
        """Send the newest `MOST_TRACES` waiting steps and drop earlier ones; metrics never wait for traces."""
        for tail in self._tails if self.writer.takes_traces else []:
            with tail.exclusive():
                waiting = [
                    file for file in rollout_files(self.job_dir, traces_dir(self.job_dir)) if tail.takes(file[0])
                ]
                for _, _, path in waiting[:-MOST_TRACES]:
                    self._drop_traces(path, f"more than {MOST_TRACES} steps wait")
                for source, step, path in waiting[-MOST_TRACES:]:
                    self._send_traces(source, step, path)

    def _send_traces(self, source: str, step: int, path: Path) -> None:
        try:
            self.writer.traces(source, step, read_rollouts(path), path.stat().st_mtime_ns)
            path.unlink()
        except self.writer.faults as error:
            if is_away(error):
                raise
            self._drop_traces(path, str(error))

    def _drop_traces(self, path: Path, why: str) -> None:
        if not self.dropped_traces:
            log.warning("rollouts of some steps are not sent as traces (%s)", why)
        self.dropped_traces += 1
        path.unlink()

    def _forward_checkpoints(self) -> None:
        whole = complete_checkpoints(self.job_dir)
        for step, path in whole.items():
            if self._registers and step not in self._checkpoints_seen:
                self.writer.checkpoint(step, path)
                self._checkpoints_seen.add(step)
        for _ in self._metrics.read():
            pass
        if (lines := self._metrics.evaluations) != self._evaluations:
            self._scores, self._evaluations = self._read_scores(), [*lines]
        for step, value in self._scores.items():
            if step in whole and self._scores_sent.get(step) != value and self.writer.score(step, value):
                self._scores_sent[step] = value
        recorded = sorted(self._scores.keys() & self._scores_sent.keys())
        best = max(recorded, key=lambda step: self._scores[step], default=None)  # the earlier one of equals
        if best is not None and best != self._best:
            self.writer.best(best)
            self._best = best


class ForwarderThread:
    """Opens the tracking system, polls its forwarder every few seconds, and ends the run there, all in one thread.

    MLflow's import and a new database take seconds, in which the engines start. If the tracking system of an already
    tracked run does not answer, the run continues, and tracking opens later. At a run's first start the address may be
    wrong, so there it is a TransientFault.
    """

    def __init__(self, job_dir: Path, make: Callable[[], Forwarder], seconds: float = 2.0) -> None:
        """`make` opens the tracking system."""
        self._job_dir, self._make, self._seconds = job_dir, make, seconds
        self._forwarder: Forwarder | None = None
        self._error: BaseException | None = None
        self._settled = threading.Event()
        """Set once the tracking system is open, away, or has been given up."""
        self._ends = threading.Event()
        """Set at the end of the run, with `_outcome` and `_deadline`."""
        self._outcome = RunOutcome.FINISHED
        self._deadline = 0.0
        self._is_closing = self._warned = False
        self._thread = threading.Thread(target=self._run, name="tracking", daemon=True)
        self._thread.start()

    def writer(self) -> Writer | None:
        """Return the writer once it is open; None while the tracking system is away. Raises why it does not open."""
        if not self._settled.wait(OPEN_SECONDS):
            raise TransientFault(f"the tracking system did not open within {OPEN_SECONDS:g} s (section monitor)")
        self.check()
        return None if self._forwarder is None else self._forwarder.writer

    def check(self) -> None:
        """Raise why tracking has been given up. A tracking system that is temporarily away is no reason."""
        if self._error is not None:
            raise self._error

    def close(self, outcome: RunOutcome) -> None:
        """Forward the rest and end the run in the tracking system, for up to `CLOSE_SECONDS` (`FAILED_CLOSE_SECONDS`).

        What the tracking system does not take, because it is away or the run was deleted there, is sent at the next
        start of the run. Other errors of the last attempt are raised.
        """
        known = self._error
        if outcome.is_success and self._forwarder is None:
            self.writer()
        patience = CLOSE_SECONDS if outcome.is_success else FAILED_CLOSE_SECONDS
        self._outcome, self._deadline = outcome, time.monotonic() + patience
        self._ends.set()
        self._thread.join(patience)
        if self._is_closing:
            self._thread.join(FILES_SECONDS)
        if self._thread.is_alive():
            warn_unsent("it is still being opened" if self._forwarder is None else "it does not answer", self._job_dir)
        if self._error is not None and self._error is not known:
            raise self._error

    def _run(self) -> None:
        try:
            self._forwarder = self._open()
            if self._forwarder is None:
                warn_unsent("it could not be opened", self._job_dir)
                return
            self._settled.set()
            faults = (*self._forwarder.writer.faults, TransientFault)
            self._poll(self._forwarder, faults)
            self._close(self._forwarder, faults)
        except BaseException as error:  # noqa: BLE001 - raised to whoever asks for the writer
            self._error = error
        finally:
            self._settled.set()
            if self._forwarder is not None and self._forwarder.page is not None:
                self._forwarder.page.close()

    def _open(self) -> Forwarder | None:
        """Return the forwarder; None if the tracking system was away until the run ended."""
        while True:
            is_last = self._ends.is_set()
            try:
                return self._make()
            except Exception as error:
                if not is_away(error):
                    raise
                if not was_tracked(self._job_dir):
                    raise TransientFault(str(error)) from error
                self._warn(error)
            self._settled.set()
            if is_last:
                return None
            self._ends.wait(AGAIN_SECONDS)

    def _poll(self, forwarder: Forwarder, faults: tuple[type[Exception], ...]) -> None:
        while not self._ends.wait(self._seconds):
            try:
                forwarder.poll()
                self._warned = False
            except faults as error:
                self._warn(error)
            except Exception as error:  # noqa: BLE001 - raised by `check`, which ends the run
                self._error = self._error or error

    def _close(self, forwarder: Forwarder, faults: tuple[type[Exception], ...]) -> None:
        self._is_closing = True
        for _ in poll(self._deadline - time.monotonic(), self._seconds):
            try:
                forwarder.close(self._outcome)
                return
            except faults as error:
                self._warn(error)
                fault = error
        if not is_away(fault):
            raise fault
        warn_unsent(fault, self._job_dir)

    def _warn(self, error: Exception) -> None:
        if not self._warned:
            log.warning("the tracking system does not accept metrics now (%s); they are kept and sent later", error)
        self._warned = True


def warn_unsent(why: object, job_dir: Path) -> None:
    """Log where the metrics are that the tracking system did not take, if the run has any."""
    if not metrics_path(job_dir).exists():
        return
    log.warning(
        "the tracking system did not take the last metrics (%s): they are in %s, and are sent when the run is "
        "started again", why, metrics_path(job_dir),
    )  # fmt: skip


def target_of(monitor: MonitorConfig) -> str:
    """Return the monitor type and, if it has one, the address of its store without a password."""
    address = monitor.monitor_args.get("uri") or monitor.monitor_args.get("base_url") or ""
    return f"{monitor.monitor_type} {without_password(str(address))}".strip()


def complete_checkpoints(job_dir: Path) -> dict[int, Path]:
    """Return step → folder of each complete checkpoint, that is, with a manifest.

    A folder without a manifest only holds weights for weight sync, and is removed once newer ones exist.
    """
    layout = JobLayout(job_dir)
    return {step: layout.step(step) for step in layout.steps() if (layout.step(step) / MANIFEST).exists()}
