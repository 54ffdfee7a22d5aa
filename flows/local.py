"""Flows in this process: against the server that is up here, or a temporary one."""

from __future__ import annotations

import importlib
import logging
import os
import sys
from collections.abc import Callable
from contextlib import ExitStack
from pathlib import Path
from types import TracebackType
from typing import Any

from tasks.server import TemporaryServer, Up, environment, is_healthy
from tasks.signals import ending_on_sigterm
from trinity_core.config import Config


class Here:
    """A place to run flows in, as a context.

    Prefect's API is, in this order: PREFECT_API_URL, the server of `trinity up`, a temporary server. The temporary
    server starts in the background: what is done before the first flow is asked for costs no time.
    """

    def __init__(self, root: Path | None = None) -> None:
        self._root = root
        self._temporary: TemporaryServer | None = None
        self._open = ExitStack()

    def __enter__(self) -> Here:
        self._open.enter_context(ending_on_sigterm())
        os.environ.update(environment(self._root))
        known = _known_server(self._root)
        if known is None:
            self._temporary = TemporaryServer(self._root)
            self._open.callback(self._temporary.stop)
            self._open.callback(_send_logs)
            known = self._temporary.api_url
        os.environ["PREFECT_API_URL"] = known
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> bool | None:
        return self._open.__exit__(kind, error, trace)

    def flow(self, name: str, config: Config) -> Callable[..., Any]:
        """The flow of that name, once Prefect's API answers. Ray starts meanwhile, and ends with this context."""
        found: Callable[..., Any] = getattr(importlib.import_module(f"flows.{name}"), name)
        _show_our_log()
        if self._temporary:
            self._open.enter_context(importlib.import_module("tasks.stages").early_cluster(config))
            self._temporary.wait()
        return found


def _known_server(root: Path | None) -> str | None:
    if os.environ.get("PREFECT_API_URL"):
        return os.environ["PREFECT_API_URL"]
    state = Up.load(root)
    return state.api_url if state and is_healthy(state.api_url) else None


def _send_logs() -> None:
    """Prefect sends its log in the background; at exit it would try for a minute to reach a server that has gone."""
    if "prefect" in sys.modules:
        importlib.import_module("prefect.logging.handlers").APILogHandler().flush()


def _show_our_log() -> None:
    """Prefect's setting for extra loggers attaches its handler but leaves their level."""
    for name in ("trinity_core", "tasks"):
        logging.getLogger(name).setLevel(logging.INFO)
