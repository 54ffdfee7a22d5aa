"""Experience operators in a process of their own (`own_process`), so that what they compute holds up no explorer."""

from __future__ import annotations

import json
import logging
import socket
import subprocess
import sys
from collections.abc import Callable
from contextlib import suppress
from multiprocessing.connection import Connection
from typing import Any

from trinity_core.config import Config
from trinity_core.data.experience import Experience, from_bytes, to_bytes
from trinity_core.errors import TransientFault, TrinityError
from trinity_core.pipelines.operators import FailedGroup

log = logging.getLogger(__name__)

BOOT = (
    "import sys, json; sys.path[:] = json.loads(sys.argv[1]); "
    "from trinity_core.pipelines.operator_process import main; "
)
STARTS = 3
"""Times that a process is started for one step. One that dies loses nothing, as the experiences are still here."""
LOOK_SECONDS = 1.0
"""Between looks whether the run has ended meanwhile. The limit for a step is its caller's."""
END_SECONDS = 10.0
"""For a process that was killed to be gone."""


class OwnProcess:
    """As `Operators`. The process is started with the first experiences, and again with the next ones if it dies."""

    def __init__(self, config: Config) -> None:
        processed = config.data_processor.experience_pipeline
        self.names = [each.name for each in processed.operators] if processed else []
        self.running = ""
        """The operator that was begun last in the present process."""
        self._config = config
        self._process: subprocess.Popen[bytes] | None = None
        self._connection: Connection | None = None
        self._closed = False

    def run(
        self, experiences: list[Experience], failed: Callable[[FailedGroup], object]
    ) -> tuple[list[Experience], dict[str, dict[str, int]]]:
        """See `OperatorPipeline.run`. Raises TransientFault if each of `STARTS` processes dies."""
        given = to_bytes(experiences) if experiences else b""
        for attempt in range(1, STARTS + 1):
            try:
                answer, left = self._asked(given)
            except (EOFError, ConnectionError):
                died = self._death()
                if self._closed or attempt == STARTS:
                    raise TransientFault(died) from None
                log.warning("%s; it is started again, and given the step again", died)
                continue
            for each in answer["failed"]:
                failed(FailedGroup(each["group"], each["operator"], TrinityError(each["error"])))
            return left, answer["dropped"]
        raise AssertionError("one of the attempts returns or raises")

    def close(self) -> None:
        """End the process."""
        self._closed = True
        self._end()

    def _asked(self, given: bytes) -> tuple[dict[str, Any], list[Experience]]:
        connection = self._connection or self._started()
        connection.send_bytes(given)
        while True:
            answer = json.loads(self._received(connection))
            if "error" in answer:
                raise (TransientFault if answer["transient"] else TrinityError)(answer["error"])
            if "begins" not in answer:
                blob = self._received(connection)
                return answer, from_bytes(blob) if blob else []
            self.running = answer["begins"]

    def _received(self, connection: Connection) -> bytes:
        while not connection.poll(LOOK_SECONDS):
            if self._closed:
                raise EOFError
        return connection.recv_bytes()

    def _started(self) -> Connection:
        self._end()
        ours, theirs = socket.socketpair()
        arguments = (theirs.fileno(), self._config.plugin_dir)
        command = [sys.executable, "-c", BOOT + f"main(*{arguments!r})", json.dumps(sys.path)]
        with theirs:
            self._process = subprocess.Popen(command, pass_fds=[theirs.fileno()], stdin=subprocess.PIPE)
        self._connection = Connection(ours.detach())
        self._connection.send(self._config)
        return self._connection

    def _death(self) -> str:
        """Why there is no process any more."""
        process = self._process
        if process is not None:
            with suppress(subprocess.TimeoutExpired):
                process.wait(END_SECONDS)
        code, at = process.poll() if process else None, f" at {self.running}" if self.running else ""
        self._end()
        return f"the process of the experience operators ({', '.join(self.names)}) ended{at} with exit code {code}"

    def _end(self) -> None:
        process, connection = self._process, self._connection
        self._process = self._connection = None
        self.running = ""
        if process is not None and connection is not None:
            connection.close()
            process.kill()
            process.wait(END_SECONDS)
            assert process.stdin is not None
            process.stdin.close()
