"""The process that runs experience operators for an explorer (`own_process`): the other end of `own_process.py`.

A message in is a step's experiences; the replies are JSON, `{"begins": operator}` before each operator, then
`{"dropped": …, "failed": …}` and the experiences that are left, or `{"error": …}`. It ends with its explorer: its
standard input closes, whatever an operator does at that time.
"""

from __future__ import annotations

import json
import logging
import os
import signal
import sys
import threading
from collections.abc import Callable
from multiprocessing.connection import Connection
from typing import Any

from trinity_core.config import Config
from trinity_core.data.experience import Experience, from_bytes, to_bytes
from trinity_core.errors import TransientFault, TrinityError
from trinity_core.pipelines.data_juicer.local import LocalDataJuicer, open_data_juicer
from trinity_core.pipelines.operators import FailedGroup, OperatorPipeline, pipeline
from trinity_core.plugins import load_plugins

log = logging.getLogger(__name__)


def main(descriptor: int, plugin_dir: str | None) -> None:
    """Serve until the socket closes. The first message is the configuration of the run, with arguments of plugins."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # a Ctrl-C at the terminal is the explorer's to handle
    threading.Thread(target=_end_with_parent, daemon=True).start()
    load_plugins(plugin_dir)
    connection = Connection(descriptor)
    config: Config = connection.recv()
    data_juicer = open_data_juicer(config, serves_models=True)
    processed = config.data_processor.experience_pipeline
    operators = pipeline(processed.operators if processed else [], data_juicer_server=data_juicer)
    try:
        while True:
            _serve(connection, operators, connection.recv_bytes())
    except (EOFError, ConnectionError):
        log.debug("the explorer has closed its end")
    finally:
        if isinstance(data_juicer, LocalDataJuicer):
            data_juicer.close()


def _serve(connection: Connection, operators: OperatorPipeline, given: bytes) -> None:
    """Answer one message."""
    failed: list[FailedGroup] = []
    announced = OperatorPipeline(
        [(name, _announced(connection, name, each)) for name, each in operators.operators], operators.in_a_row
    )
    try:
        left, dropped = announced.run(from_bytes(given) if given else [], failed.append)
        blob = to_bytes(left) if left else b""
    except Exception as error:  # the explorer raises it, but has no traceback
        log.error("the experience operators fail", exc_info=error)
        reply(connection, {"error": _text(error), "transient": isinstance(error, TransientFault)})
        return
    operators.in_a_row = announced.in_a_row
    groups = [{"group": each.group, "operator": each.operator, "error": _text(each.error)} for each in failed]
    reply(connection, {"dropped": dropped, "failed": groups})
    connection.send_bytes(blob)


def _announced(
    connection: Connection, name: str, operator: Callable[[list[Experience]], list[Experience]]
) -> Callable[[list[Experience]], list[Experience]]:
    """The operator, which tells the explorer when it begins."""

    def run(experiences: list[Experience]) -> list[Experience]:
        reply(connection, {"begins": name})
        return operator(experiences)

    return run


def reply(connection: Connection, message: dict[str, Any]) -> None:
    """Write JSON: the explorer unpickles nothing."""
    connection.send_bytes(json.dumps(message).encode())


def _text(error: Exception) -> str:
    return str(error) if isinstance(error, TrinityError) else f"{type(error).__name__}: {error}"


def _end_with_parent() -> None:
    sys.stdin.buffer.read()
    os._exit(0)
