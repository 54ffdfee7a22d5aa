"""Experience operators in a separate process (`own_process`), so that slow ones do not hold up the explorer."""

from __future__ import annotations

import logging
import pickle
from collections.abc import Callable
from functools import partial
from typing import Any

from trinity_core.base.children import CallFailed, NoAnswer, Worker
from trinity_core.base.errors import TransientFault, TrinityError, on_failure
from trinity_core.base.plugins import load_plugins
from trinity_core.config import Config
from trinity_core.data.experience import Experience, from_bytes, to_bytes
from trinity_core.pipelines.data_juicer.local import LocalDataJuicer, open_data_juicer
from trinity_core.pipelines.operators import FailedGroup, pipeline

log = logging.getLogger(__name__)

STARTS = 3
"""Maximum number of process starts per step. A dying process loses nothing, because the experiences are still here."""


class OwnProcess:
    """See `Operators`. The process starts with the first experiences, and restarts with the next ones if it dies."""

    def __init__(self, config: Config) -> None:
        self.names = [operator.name for operator in config.data_processor.experience_pipeline.operators]
        self.running = ""
        self._config = config
        self._worker: Worker | None = None
        self._closed = False

    def run(
        self, experiences: list[Experience], failed: Callable[[FailedGroup], object]
    ) -> tuple[list[Experience], dict[str, dict[str, int]]]:
        """See `OperatorPipeline.run`. Raises TransientFault if each of `STARTS` processes dies."""
        data = to_bytes(experiences) if experiences else b""
        for attempt in range(1, STARTS + 1):
            try:
                left, dropped, groups = self._run_there(data)
            except NoAnswer as failure:
                names, at = ", ".join(self.names), f" in {self.running}" if self.running else ""
                death = f"the process of the experience operators ({names}) {failure}{at}"
                if self._closed or attempt == STARTS:
                    raise TransientFault(death) from None
                log.warning("%s; it is restarted and gets the step again", death)
                continue
            except CallFailed as failure:
                if "TransientFault" in failure.kinds:
                    raise TransientFault(str(failure)) from None
                raise TrinityError(str(failure), key=failure.key) from None
            for group in groups:
                failed(FailedGroup(group["group"], group["operator"], TrinityError(group["error"])))
            return left, dropped
        raise AssertionError("one of the attempts returns or raises")

    def close(self) -> None:
        """End the process, even while another thread waits for it."""
        self._closed = True
        if self._worker is not None:
            self._worker.kill()

    def _run_there(self, data: bytes) -> tuple[list[Experience], dict[str, dict[str, int]], list[dict[str, str]]]:
        """Return the remaining experiences, the dropped ones, and the failed groups. The caller limits the time per
        step."""
        worker = self._started()
        worker.call("begin", data)
        for index, name in enumerate(self.names):
            self.running = name
            worker.call("apply", index)
        outcome, left = worker.call("outcome"), worker.call("left")
        return from_bytes(left) if left else [], outcome["dropped"], outcome["failed"]

    def _started(self) -> Worker:
        if self._worker is None or not self._worker.alive:
            self.running = ""
            self._worker = Worker("trinity_core.pipelines.own_process:HostedOperators")
            with on_failure(self._worker.kill):
                self._worker.make({"plugin_dir": self._config.plugin_dir, "config": pickle.dumps(self._config)})
        return self._worker


class HostedOperators:
    """The operators inside the process of `OwnProcess`, with the current step's experiences."""

    def __init__(self, plugin_dir: str | None, config: bytes) -> None:
        load_plugins(plugin_dir)  # before the configuration, which may contain plugins' arguments
        loaded: Config = pickle.loads(config)  # noqa: S301 - the explorer's
        self._data_juicer = open_data_juicer(loaded, serves_models=True)
        processed = loaded.data_processor.experience_pipeline
        self._operators = pipeline(processed.operators, data_juicer_server=self._data_juicer)

    def begin(self, experiences: bytes) -> None:
        self._experiences = from_bytes(experiences) if experiences else []
        self._dropped: dict[str, dict[str, int]] = {}
        self._failed: list[FailedGroup] = []

    def apply(self, index: int) -> None:
        """Run one operator. A final failure is logged here, because the explorer gets no traceback, and raised."""
        with on_failure(partial(log.exception, "the experience operator '%s' fails", self._operators.names[index])):
            self._experiences = self._operators.apply(index, self._experiences, self._failed.append, self._dropped)

    def outcome(self) -> dict[str, Any]:
        """Return what the operators dropped, and the groups on which they failed."""
        failed = [{"group": lost.group, "operator": lost.operator, "error": _text(lost.error)} for lost in self._failed]
        return {"dropped": self._dropped, "failed": failed}

    def left(self) -> bytes:
        return to_bytes(self._experiences) if self._experiences else b""

    def close(self) -> None:
        if isinstance(self._data_juicer, LocalDataJuicer):
            self._data_juicer.close()


def _text(error: Exception) -> str:
    return str(error) if isinstance(error, TrinityError) else f"{type(error).__name__}: {error}"
