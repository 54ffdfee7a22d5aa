"""The doctor at work during a run: after its first train step, at each evaluation, and at the end."""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from contextvars import copy_context

from trinity_core.config import Config, store_url
from trinity_core.exchange.tracking.metrics_file import MetricLine, MetricsReader, stream_of
from trinity_core.results.doctor import Diagnosis, diagnose
from trinity_core.results.evidence import gather
from trinity_core.run.attempt import Frontend

log = logging.getLogger(__name__)
LOOK_SECONDS = 1.0
"""Interval at which new metrics are looked for."""
SHARE = 0.01
"""Largest share of the run's time that examinations of evaluations take; one that would exceed it is left out."""
END_SECONDS = 5.0
"""Time for an examination in progress to end with the run."""


def diagnoses(config: Config) -> list[Diagnosis]:
    """Return what `trinity doctor` finds, without the audit, which reads all rows. Empty for an explorer on its own:
    its trainer's run is examined."""
    if config.explores_alone:
        return []
    store = store_url(config) if config.algorithm_type.uses_rollouts and any(config.layout.buffer.glob("*")) else None
    return diagnose(gather(config.job_dir, store, audited=False))


def examine(config: Config, frontend: Frontend, reason: str) -> list[Diagnosis]:
    """Return what an examination finds; if it fails, warn and return nothing.

    A record that cannot be read, or a fault in one of the checks, must not cost a run that has trained.
    """
    try:
        return frontend.examine(f"doctor, {reason}", lambda: diagnoses(config))
    except Exception as error:  # noqa: BLE001 - a damaged record raises whatever its reader meets
        log.warning("the doctor could not examine the run at %s: %s: %s", reason, type(error).__name__, error)
        return []


@contextmanager
def examined(config: Config, frontend: Frontend, note: Callable[[Diagnosis], None]) -> Iterator[None]:
    """Within this context, examine the run in a thread whenever that is due, and `note` each new finding."""
    if config.mode == "bench" or config.explores_alone:
        yield
        return
    ended = threading.Event()
    examiner = Examiner(config, frontend, ended, note)
    thread = threading.Thread(target=copy_context().run, args=(examiner.work,), name="doctor", daemon=True)
    thread.start()
    try:
        yield
    finally:
        ended.set()
        thread.join(END_SECONDS)


class Examiner:
    """Follows the metrics of one attempt, and examines the run when it is due."""

    def __init__(
        self, config: Config, frontend: Frontend, ended: threading.Event, note: Callable[[Diagnosis], None]
    ) -> None:
        self._config, self._frontend, self._ended, self._note = config, frontend, ended, note
        self._metrics = MetricsReader(config.job_dir)
        list(self._metrics.read())  # of earlier attempts
        self._began, self._spent = time.monotonic(), 0.0
        self._has_begun = False
        self._told: set[str] = set()

    def work(self) -> None:
        """Examine until the run ends."""
        while not self._ended.wait(LOOK_SECONDS):
            for reason in [reason for line in self._metrics.read() if (reason := self._due(line))][-1:]:
                self._examine(reason)

    def _due(self, line: MetricLine) -> str:
        """Return why the run is to be examined after this line, or ""."""
        stream = stream_of(line.source)
        if stream == "trainer" and not self._has_begun:
            self._has_begun = True
            return f"train step {line.step}"
        evaluates = stream == "eval" or (stream == "trainer" and any(name.startswith("eval/") for name in line.metrics))
        has_time = self._spent <= SHARE * (time.monotonic() - self._began)
        return f"evaluation of step {line.step}" if evaluates and has_time else ""

    def _examine(self, reason: str) -> None:
        began = time.thread_time()
        found = examine(self._config, self._frontend, reason)
        self._spent += time.thread_time() - began
        for diagnosis in found:
            if diagnosis.check not in self._told:
                self._told.add(diagnosis.check)
                log.warning("at %s: %s", reason, diagnosis)
                self._note(diagnosis)
