"""How a program of ours ends: SIGTERM and the end of its terminal close whatever is open, and errors for users are
printed without a traceback."""

from __future__ import annotations

import gc
import os
import signal
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from types import FrameType
from typing import NoReturn

import typer

from trinity_core.errors import TransientFault, TrinityError
from trinity_core.files import expanded

TERMINATED = 128 + signal.SIGTERM
"""The exit code that shells give a process ended by SIGTERM."""
NEW_OBJECTS = 50_000
"""Between two looks for garbage. With Python's 700 a seventh of the time of a flow's imports goes into looks at what
stays."""


@contextmanager
def ending_on_sigterm() -> Iterator[None]:
    """Within this context SIGTERM ends the process as an exit does, through every `with` and `finally`.

    During a flow Prefect handles it: the flow saves and ends its actors. Then Prefect sends the signal once more, to
    the handler that stood before its own; with Python's default the process would go and leave Ray behind. Further
    signals do not disturb the closing. A terminal that is closed (SIGHUP) counts as SIGTERM, except under `nohup`;
    once, although a shell and then the kernel each send it: Prefect would take the second for the wish to end unsaved.
    """
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    before, hangup = signal.signal(signal.SIGTERM, _end), signal.getsignal(signal.SIGHUP)
    if hangup is signal.SIG_DFL:
        signal.signal(signal.SIGHUP, _hang_up)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before)
        signal.signal(signal.SIGHUP, hangup)


def _end(number: int, frame: FrameType | None) -> NoReturn:
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    raise SystemExit(TERMINATED)


def _hang_up(number: int, frame: FrameType | None) -> None:
    signal.signal(signal.SIGHUP, signal.SIG_IGN)
    signal.raise_signal(signal.SIGTERM)


def _open_outputs() -> None:
    """Open input and outputs that are closed, to nowhere: the next file would take what our children print."""
    while (opened := os.open(os.devnull, os.O_RDWR)) <= 2:
        os.set_inheritable(opened, True)
    os.close(opened)
    sys.stdout = sys.stdout or open(1, "w", closefd=False)  # noqa: SIM115 - of a descriptor, for good
    sys.stderr = sys.stderr or open(2, "w", closefd=False)  # noqa: SIM115


def run_app(application: Callable[[], object]) -> None:
    """Run a command line; the process ends with 0, 1 after one clear message, 2 after wrong usage, 130 after Ctrl+C."""
    gc.set_threshold(NEW_OBJECTS)
    _open_outputs()
    if expanded("~") == Path("~"):  # no HOME, and a user without an account: our libraries ask for it at import
        os.environ["HOME"] = "/"  # as Docker has it
    try:
        application()
    except KeyboardInterrupt:
        sys.exit(130)
    except (TrinityError, TransientFault) as error:
        if os.environ.get("TRINITY_TRACEBACK"):
            raise
        typer.secho(f"error: {error}", fg=typer.colors.RED if sys.stderr.isatty() else None, err=True)
        sys.exit(1)
