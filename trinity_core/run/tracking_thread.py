"""The thread that opens a run's tracking system and then forwards its metrics."""

from __future__ import annotations

import logging
import threading
from functools import partial
from pathlib import Path

from trinity_core.base.errors import TransientFault
from trinity_core.base.plugins import load_plugins
from trinity_core.config import public_dict
from trinity_core.exchange.store.run_store import identity_of
from trinity_core.exchange.tracking.forwarder import (
    CLOSE_SECONDS,
    FAILED_CLOSE_SECONDS,
    TRAIN_AND_EVALUATE,
    Forwarder,
    ForwarderThread,
    open_writer,
    target_of,
    warn_unsent,
)
from trinity_core.exchange.tracking.metrics_file import was_tracked
from trinity_core.exchange.tracking.prometheus import PrometheusPage
from trinity_core.exchange.tracking.run_record import changes_since, record_end, record_start
from trinity_core.exchange.tracking.scores import valid_scores
from trinity_core.exchange.tracking.writers import RunInfo, RunOutcome, Writer, is_away
from trinity_core.run.nodes import software
from trinity_core.run.stage import Stage

log = logging.getLogger(__name__)

OPEN_SECONDS = 300.0
"""Time for the tracking system to open: a new MLflow database on a busy machine takes a minute."""
AGAIN_SECONDS = 5.0


class TrackingThread:
    """Opens the tracking system in a thread, then forwards to it in another.

    MLflow's import and a new database take seconds, in which the engines start. If the tracking system of an already
    tracked run does not answer, the run continues, and tracking opens later. At a run's first start the address may be
    wrong, so there it is a TransientFault.
    """

    def __init__(self, stage: Stage) -> None:
        self._stage = stage
        self._info = info = _run_info(stage)
        versions = software(str(stage.config.plugin_dir or ""))
        if not info.keeps_status and (changes := changes_since(info.job_dir, info.config, stage.stage, versions)):
            log.warning("%s: %s", info.job_dir, changes)
        self._record = record_start(info.job_dir, info.config, stage.stage, info.keeps_status, versions)
        self._writer: Writer | None = None
        self._forwarder: ForwarderThread | None = None
        self._page: PrometheusPage | None = None
        self._error: BaseException | None = None
        self._settled = threading.Event()
        """Set once it is open, away, or has been given up."""
        self._closing = threading.Event()
        self._handing_over = threading.Lock()
        self._given_up: RunOutcome | None = None
        """How the run ended, once opening the tracking system has been given up."""
        self._opening = threading.Thread(target=self._open, name="tracking", daemon=True)
        self._opening.start()

    def writer(self) -> Writer | None:
        """Return the writer once it is open; None while the tracking system is away. Raises why it does not open."""
        if not self._settled.wait(OPEN_SECONDS):
            raise TransientFault(f"the tracking system did not open within {OPEN_SECONDS:g} s (section monitor)")
        if self._error is not None:
            raise self._error
        return self._writer

    def check(self) -> None:
        """Raise why tracking has been given up. A tracking system that is temporarily away is no reason."""
        if self._error is not None:
            raise self._error
        if self._forwarder is not None:
            self._forwarder.check()

    def close(self, outcome: RunOutcome) -> None:
        """Forward what is left, and end the run in the tracking system. If that is away, it is tried a last time."""
        record_end(self._stage.config.job_dir, self._record, outcome)
        if outcome.is_success:
            self.writer()
        self._closing.set()
        self._opening.join(CLOSE_SECONDS if outcome.is_success else FAILED_CLOSE_SECONDS)
        with self._handing_over:
            self._given_up = outcome
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
            load_plugins(config.plugin_dir)  # a plugin may define the monitor
            self._writer = self._opened()
            with self._handing_over:
                if self._writer is not None and self._given_up is not None:
                    self._writer.close(self._given_up)
                elif self._writer is not None:
                    if config.monitor.prometheus_port:
                        self._page = PrometheusPage(config.monitor.prometheus_port, config.project, config.name)
                    evaluates = config.mode == "train" and config.evaluates_beside
                    forwarder = Forwarder(
                        config.job_dir, self._writer, TRAIN_AND_EVALUATE if evaluates else config.mode,
                        config.explorer.name, self._page,
                        target=target_of(config.monitor), scores=partial(valid_scores, config),
                    )  # fmt: skip
                    self._forwarder = ForwarderThread(forwarder)
        except BaseException as error:  # noqa: BLE001 - raised to whoever asks for the writer
            self._error = error
        finally:
            self._settled.set()

    def _opened(self) -> Writer | None:
        """Return the writer; None if the tracking system was away until the run ended."""
        monitor = self._stage.config.monitor.monitor_type
        while True:
            last = self._closing.is_set()
            try:
                return open_writer(monitor, self._info, Path(self._stage.config.checkpoint_root_dir))
            except Exception as error:
                if not is_away(error):
                    raise
                if not was_tracked(self._info.job_dir):
                    raise TransientFault(str(error)) from error
                if not self._settled.is_set():
                    log.warning("the tracking system does not answer (%s): metrics are sent when it does", error)
            self._settled.set()
            if last:
                return None
            self._closing.wait(AGAIN_SECONDS)


def _run_info(stage: Stage) -> RunInfo:
    config = stage.config
    return RunInfo(
        project=config.project,
        name=config.name,
        job_dir=config.job_dir,
        config=public_dict(config),
        parent_dir=stage.parent_dir,
        args=config.monitor.monitor_args,
        tags={"stage": stage.stage, "algorithm": config.algorithm.algorithm_type},
        keeps_status=config.mode == "bench" or config.explores_alone,
        explorer=config.explorer.name if config.explores_alone else "",
        identity=identity_of(config.job_dir),
    )
