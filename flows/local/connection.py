"""Flows in this process: against the server that is up here, or a temporary one."""

from __future__ import annotations

import importlib
import logging
import os
import sys
from collections.abc import Callable
from contextlib import ExitStack
from http.client import HTTPException
from pathlib import Path
from ssl import SSLError
from types import TracebackType
from typing import Any
from urllib.error import HTTPError, URLError
from urllib.request import urlopen

from flows.local.server import TemporaryServer, UpState, is_healthy, prefect_environment
from trinity_core.config import Config, stages
from trinity_core.config.public import without_password
from trinity_core.errors import TrinityError
from trinity_core.runtime.signals import ending_on_sigterm
from trinity_core.runtime.verdicts import asks_person

ANSWER_SECONDS = 10.0
"""For the server that PREFECT_API_URL names, which may be far away."""
PATIENCE = {
    "PREFECT_CLIENT_MAX_RETRIES": "7",
    "PREFECT_CLIENT_RETRY_EXTRA_CODES": "500",
    "PREFECT_LOGGING_INTERNAL_LEVEL": "CRITICAL",
}
"""Calls wait four minutes for a temporary server that is started again, or that answers without its database. Events
that nobody takes meanwhile are not printed."""
ASKING = ("pipeline", "sft")
"""Flows that may ask a person."""
WITHOUT_RAY = ("curate",)
"""Flows that mostly need no Ray, and start it themselves where they do."""
RECONNECTIONS = 300
"""Seconds that events wait for it."""


class PrefectConnection:
    """Makes Prefect's API available to the flows of this process, as a context.

    Prefect's API is, in this order: PREFECT_API_URL, the server of `trinity up`, a temporary server. The temporary
    server starts in the background: what is done before the first flow is asked for costs no time.
    """

    def __init__(self, root: Path | None = None) -> None:
        self._root = root
        self._temporary: TemporaryServer | None = None
        self._open = ExitStack()

    def __enter__(self) -> PrefectConnection:
        self._open.enter_context(ending_on_sigterm())
        os.environ.update(prefect_environment(self._root))
        known = known_server(self._root)
        if known is None:
            self._temporary = TemporaryServer(self._root)
            self._open.callback(self._temporary.stop)
            self._open.callback(_send_logs)
            known = self._temporary.api_url
            os.environ.update(PATIENCE | {name: os.environ[name] for name in PATIENCE if name in os.environ})
        os.environ["PREFECT_API_URL"] = known
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> bool | None:
        return self._open.__exit__(kind, error, trace)

    def flow(self, name: str, config: Config) -> Callable[..., Any]:
        """The flow of that name, once Prefect's API answers.

        Ray, if the flow is sure to need it, starts meanwhile, and ends with this context.
        Raises TrinityError if the flow would ask a person, and the server has no page to answer on.
        """
        found: Callable[..., Any] = getattr(importlib.import_module(f"flows.{name}"), name)
        _show_our_log()
        if self._temporary:
            if name in ASKING:
                require_nobody_asked(config)
            if name not in WITHOUT_RAY:
                runtime = importlib.import_module("trinity_core.runtime.pipeline")
                self._open.enter_context(runtime.early_cluster(config))
            self._temporary.wait()
            _be_patient()
        return found


def require_nobody_asked(config: Config) -> None:
    """Raises TrinityError if a stage waits for a person's verdicts, which a temporary server has no page for."""
    if asking := [stage.name for stage in stages(config) if asks_person(stage)]:
        raise TrinityError(
            f"{asking[0]} asks a person (human_verdicts) on Prefect's page, which this command does not serve: start "
            "`trinity up` first, in this folder, and then the run."
        )


def known_server(root: Path | None) -> str | None:
    """Prefect's API that PREFECT_API_URL names, or else that of `trinity up` here; None without either.

    Raises TrinityError if nobody answers at PREFECT_API_URL.
    """
    if given := os.environ.get("PREFECT_API_URL"):
        if reason := _silence(given):
            raise TrinityError(
                f"No Prefect server answers at PREFECT_API_URL={without_password(given)} ({reason}). Start it, or "
                "correct the variable, or unset it: then the server of `trinity up`, or a temporary one, is taken."
            )
        return given
    state = UpState.load(root)
    return state.api_url if state and is_healthy(state.api_url) else None


def _silence(api_url: str) -> str:
    """Why nobody answers there; empty where somebody does. Whether with the right key is for Prefect to say."""
    try:
        urlopen(f"{api_url}/health", timeout=ANSWER_SECONDS).close()  # noqa: S310 (the user's own address)
    except HTTPError:
        return ""
    except URLError as error:
        return "" if isinstance(error.reason, SSLError) else str(error.reason)
    except (OSError, ValueError, HTTPException) as error:
        return str(error)
    return ""


def _send_logs() -> None:
    """Prefect sends its log in the background; at exit it would try for a minute to reach a server that has gone."""
    if "prefect" in sys.modules:
        importlib.import_module("prefect.logging.handlers").APILogHandler().flush()


def _be_patient() -> None:
    """Let Prefect wait for a temporary server that is away: with a client's first call, and with events.

    By default the first call of a client fails at once; events are given up after 8 s, and each of them is printed.
    """
    base = importlib.import_module("prefect.client.base")
    for client in (base.PrefectHttpxAsyncClient, base.PrefectHttpxSyncClient):
        client._has_connected = property(lambda _: True, lambda _, connected: None)
    events = importlib.import_module("prefect.events.clients").PrefectEventsClient
    worker = importlib.import_module("prefect.events.worker").EventsWorker
    worker.set_client_override(events, reconnection_attempts=RECONNECTIONS)
    logging.getLogger(events.__module__).setLevel(logging.ERROR)


def _show_our_log() -> None:
    """Prefect's setting for extra loggers attaches its handler but leaves their level."""
    for name in ("trinity_core", "tasks"):
        logging.getLogger(name).setLevel(logging.INFO)
