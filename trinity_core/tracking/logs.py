"""Log files of a run's actors: `<job_dir>/log/<actor>.log`, or `log/<node ip>/<actor>.log` with `log.group_by_node`.

The process that starts an actor passes it `log_environment`; the actor calls `start_log` first. Without that
environment (in a test or a user's program) nothing is written. Passwords and keys are masked.
"""

from __future__ import annotations

import logging
import os
import re
from collections.abc import Mapping
from pathlib import Path
from types import TracebackType

from trinity_core.addresses import own_address
from trinity_core.config import Config

FOLDER, ACTOR, LEVEL, BY_NODE = "TRINITY_LOG_DIR", "TRINITY_LOG_ACTOR", "TRINITY_LOG_LEVEL", "TRINITY_LOG_BY_NODE"
OURS = ("trinity_core", "tasks")
MASK = "***"
_SECRETS = (
    re.compile(r"(?<=://)([^/@:\s]*:)[^/@\s]+(?=@)"),
    re.compile(r"(\b\w*(?:api_?key|passwd|password|secret|token|credentials?)['\"]?\s*[=:]\s*['\"]?)(?!\d+\b)[^\s'\",}]+",
               re.IGNORECASE),
    re.compile(r"((?:Bearer|Basic)\s+)[\w.+/=-]{8,}"),
)  # fmt: skip


class ActorLog(logging.FileHandler):
    """The log of this process's actor."""


class Masking(logging.Formatter):
    """A formatter that masks passwords and keys in messages and tracebacks."""

    def format(self, record: logging.LogRecord) -> str:
        return masked(super().format(record))


def masked(text: str) -> str:
    """Replace passwords in URLs, and values called key, token or password, by `***`."""
    for pattern in _SECRETS:
        text = pattern.sub(rf"\g<1>{MASK}", text)
    return text


def log_name(actor: str) -> str:
    """Return the name of an actor's log without `.log`: `run/explorer/engine_0` writes `explorer_engine_0`."""
    return actor.partition("/")[2].replace("/", "_")


def log_environment(config: Config, actor: str) -> dict[str, str]:
    """Return the environment variables for `start_log` in the process of `actor` (its name in Ray)."""
    return {
        FOLDER: str(config.layout.log),
        ACTOR: log_name(actor),
        LEVEL: config.log.level,
        BY_NODE: str(int(config.log.group_by_node)),
    }


def start_log() -> Path | None:
    """Start writing this process's log to its file and return the path; None if the environment names none.

    Our own messages are written from `log.level` on, those of libraries from WARNING (or that level, if higher). A
    repeated call has no effect unless the environment names another file, which then replaces the first.
    """
    folder, actor = os.environ.get(FOLDER), os.environ.get(ACTOR)
    if not folder or not actor:
        return None
    place = Path(folder) / own_address() if os.environ.get(BY_NODE) == "1" else Path(folder)
    path = place / f"{actor}.log"
    root, level = logging.getLogger(), os.environ.get(LEVEL, "INFO")
    for handler in [handler for handler in root.handlers if isinstance(handler, ActorLog)]:
        if handler.baseFilename == str(path):
            return path
        root.removeHandler(handler)
        handler.close()
    place.mkdir(parents=True, exist_ok=True)
    handler = ActorLog(path, encoding="utf-8", delay=True)
    handler.setFormatter(Masking("%(asctime)s %(levelname)-7s %(name)s: %(message)s"))
    handler.setLevel(level)
    root.addHandler(handler)
    for name in OURS:
        logging.getLogger(name).setLevel(level)
    return path


def move_log(environment: Mapping[str, str]) -> None:
    """Redirect this process's log, if it writes one, to another run's `log_environment`, when a kept process gets its
    next stage."""
    if os.environ.get(ACTOR):
        os.environ.update(environment)
        start_log()


class Logged:
    """A context manager that logs a failure and lets the exception propagate: `with Logged("train", log): ...`."""

    def __init__(self, doing: str, log: logging.Logger) -> None:
        self._doing = doing
        self._log = log

    def __enter__(self) -> None:
        self._log.info("%s begins", self._doing)

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if error is None:
            self._log.info("%s ends", self._doing)
        elif isinstance(error, Exception):
            self._log.error("%s fails", self._doing, exc_info=error)
