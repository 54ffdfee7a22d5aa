"""Flows in this process: against the server that is up here, or a temporary one."""

from __future__ import annotations

import importlib
import logging
import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from tasks.server import TemporaryServer, Up, environment, is_healthy

FlowFinder = Callable[[str], Callable[..., Any]]


@contextmanager
def run_here(root: Path | None = None) -> Iterator[FlowFinder]:
    """Yields a function that finds a flow by name, once Prefect's API answers.

    The API is, in this order: PREFECT_API_URL, the server of `trinity up`, a temporary server. The temporary server
    starts in the background: what is done before the first flow is asked for costs no time.
    """
    os.environ.update(environment(root))
    known = _known_server(root)
    temporary = None if known else TemporaryServer(root)
    os.environ["PREFECT_API_URL"] = known or temporary.api_url  # type: ignore[union-attr]

    def find(name: str) -> Callable[..., Any]:
        found: Callable[..., Any] = getattr(importlib.import_module(f"flows.{name}"), name)
        _show_our_log()
        if temporary:
            temporary.wait()
        return found

    try:
        yield find
    finally:
        if temporary:
            temporary.stop()


def _known_server(root: Path | None) -> str | None:
    if os.environ.get("PREFECT_API_URL"):
        return os.environ["PREFECT_API_URL"]
    state = Up.load(root)
    return state.api_url if state and is_healthy(state.api_url) else None


def _show_our_log() -> None:
    """Prefect's setting for extra loggers attaches its handler but leaves their level."""
    for name in ("trinity_core", "tasks"):
        logging.getLogger(name).setLevel(logging.INFO)
