"""How our programs end: on SIGTERM or when the terminal closes, everything open is closed; errors for users are printed
without a traceback."""

from __future__ import annotations

import gc
import os
import re
import signal
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from types import FrameType
from typing import Any, NoReturn

import typer
from typer._click.exceptions import MissingParameter, NoSuchOption
from typer.core import TyperGroup

from trinity_core.base.errors import Paused, TransientFault, TrinityError
from trinity_core.base.files import expanded

TERMINATED = 128 + signal.SIGTERM
"""The exit code that shells give a process ended by SIGTERM."""
PAUSED = 3
"""The exit code of a run that waits for a person's decision."""


@contextmanager
def ending_on_sigterm() -> Iterator[None]:
    """Within this context, SIGTERM ends the process through every `with` and `finally`, as `sys.exit` does.

    During a flow Prefect handles the signal: the flow saves and ends its actors. Prefect then sends the signal again to
    the previous handler; Python's default would end the process and leave Ray running. Further signals do not disturb
    the shutdown. A closed terminal (SIGHUP) counts as SIGTERM, except under `nohup`. It counts once, although a shell
    and then the kernel each send it: Prefect would take the second for a request to end without saving.

    Of a signal in a finalizer, see `keeping_dropped`.
    """
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    handler, hangup = signal.signal(signal.SIGTERM, _end), signal.getsignal(signal.SIGHUP)
    if hangup is signal.SIG_DFL:
        signal.signal(signal.SIGHUP, _hang_up)
    try:
        with keeping_dropped():
            yield
    finally:
        signal.signal(signal.SIGTERM, handler)
        signal.signal(signal.SIGHUP, hangup)
        _dropped.clear()


def _end(number: int, frame: FrameType | None) -> NoReturn:
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    raise SystemExit(TERMINATED)


def _hang_up(number: int, frame: FrameType | None) -> None:
    signal.signal(signal.SIGHUP, signal.SIG_IGN)
    signal.raise_signal(signal.SIGTERM)


_dropped: list[BaseException] = []


@contextmanager
def keeping_dropped() -> Iterator[None]:
    """Within this context, keep what the handler of a signal (Python's, ours or Prefect's) raises in a finalizer, where
    Python drops it, for `raise_dropped`."""
    hook = sys.unraisablehook

    def keep(unraised: sys.UnraisableHookArgs) -> None:
        is_main = threading.current_thread() is threading.main_thread()
        if is_main and unraised.exc_value is not None and not isinstance(unraised.exc_value, Exception):
            _dropped.append(unraised.exc_value)
        else:
            hook(unraised)

    sys.unraisablehook = keep
    try:
        yield
    finally:
        sys.unraisablehook = hook


def raise_dropped() -> None:
    """Raise in the main thread what `keeping_dropped` has kept, once."""
    if _dropped and threading.current_thread() is threading.main_thread():
        error = _dropped.pop()
        _dropped.clear()
        raise error


MARKS = (
    (re.compile(r"^(\w[^\n]*)(?=\n {2,4}\S)", re.MULTILINE), {"bold": True}),
    (re.compile(r"^(error:[^\n]*)", re.MULTILINE), {"fg": "red"}),
    (re.compile(r"^( *warning:[^\n]*)", re.MULTILINE), {"fg": "yellow"}),
    (re.compile(r"^( +→ [^\n]*)", re.MULTILINE), {"fg": "cyan"}),
    (re.compile(r"^( +[\d.]+ [KMGT]?i?B)(?=  \S)", re.MULTILINE), {"bold": True}),
    (re.compile(r"^( +[\d.]+ [KMGT]?i?B {4}[^\n]*)", re.MULTILINE), {"dim": True}),
    (re.compile(r"^( +\?  [^\n]*)", re.MULTILINE), {"fg": "yellow"}),
    (re.compile(r"^( +place +not on this machine[^\n]*)", re.MULTILINE), {"fg": "red"}),
)
"""What is coloured on a terminal: a line above indented ones, errors, warnings, next steps; in plans also totals, their
parts, what is not known, and what this machine lacks."""


def coloured(text: str) -> str:
    """Return text with colours, which `typer.echo` leaves out where its output is no terminal."""
    for mark, style in MARKS:
        text = mark.sub(lambda match, style=style: typer.style(match[1], **style), text)  # type: ignore[misc]
    return text


class Commands(TyperGroup):
    """Commands whose errors of usage say what to write instead."""

    def invoke(self, ctx: Any) -> Any:
        try:
            return super().invoke(ctx)
        except MissingParameter as error:
            if error.param is not None and error.param.param_type_name == "option" and error.param.metavar:
                error.param_hint = f"'{error.param.opts[0]} {error.param.metavar}'"
            raise
        except NoSuchOption as error:
            error.possibilities = [option for option in error.possibilities or () if option != "--help"]
            if error.ctx is not None and any(param.name == "overrides" for param in error.ctx.command.params):
                error.message += "; settings are given as key=value"
            raise


def _open_outputs() -> None:
    """Open closed standard streams on /dev/null, or the next opened file would receive what our children print."""
    while (opened := os.open(os.devnull, os.O_RDWR)) <= 2:
        os.set_inheritable(opened, True)
    os.close(opened)
    sys.stdout = sys.stdout or open(1, "w", closefd=False)  # noqa: SIM115 - of a descriptor, for good
    sys.stderr = sys.stderr or open(2, "w", closefd=False)  # noqa: SIM115


def run_app(application: Callable[[], object]) -> None:
    """Run a command line. Exit codes: 0; 1 after an error message; 2 for wrong usage or a refused configuration; 3 for
    a paused run; 130 after Ctrl+C."""
    _open_outputs()
    if expanded("~") == Path("~"):  # no HOME, and a user without an account: our libraries need one at import
        os.environ["HOME"] = "/"  # as Docker has it
    try:
        application()
    except KeyboardInterrupt:
        sys.exit(130)
    except Paused as pause:
        typer.echo(f"paused: {pause}", err=True)
        sys.exit(PAUSED)
    except (TrinityError, TransientFault, PermissionError) as error:
        if os.environ.get("TRINITY_TRACEBACK"):
            raise
        text = str(error)
        if isinstance(error, PermissionError) and error.filename:
            text = f"{error.filename}: permission denied; the files of a run are for its owner only"
        typer.secho(f"error: {text}", fg=typer.colors.RED if sys.stderr.isatty() else None, err=True)
        sys.exit(error.exit_code if isinstance(error, TrinityError) else 1)
    finally:
        # As it ends, Python looks for garbage among all that was imported: after a run 2.3 core-seconds. Triton, which
        # a conversion loads, prints 40 lines about objects that are left.
        if "triton._C.libtriton" not in sys.modules:
            gc.freeze()
