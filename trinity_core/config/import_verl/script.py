"""The programs that a shell script starts: bash runs it in a sandbox in which interpreters and launchers are stand-ins.

bubblewrap shows bash this machine, read-only and without a network. A stand-in writes down its words and succeeds; a
program that is not installed is written down, too, and fails.
"""

from __future__ import annotations

import os
import re
import shutil
import subprocess
from collections.abc import Sequence
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import NamedTuple

_SECONDS = 10.0
_REMEDY = "write `trinity import-verl --` before the command in the script, and run the script"
_STAND_INS = (
    "python python3 python3.8 python3.9 python3.10 python3.11 python3.12 python3.13 python3.14 torchrun accelerate "
    "deepspeed ray conda pip pip3 uv sudo docker ssh srun nvidia-smi sleep"
)
_ISOLATED = (
    "--ro-bind / / --dev /dev --proc /proc --tmpfs /run --unshare-all --cap-drop ALL --die-with-parent --new-session "
    f"--setenv BASH_ENV /run/programs/prelude --setenv TMPDIR /run --setenv PATH /run/programs:{os.defpath}"
)
_PRELUDE = """\
ulimit -v 2097152 -f 2048  # KiB, of memory and of a file
command_not_found_handle() { record "$@"; return 127; }
"""
_RECORD = """#!/bin/bash
printf '%s\\0' "${0##*/}" "$@" > "/run/calls/$EPOCHREALTIME.$$"
"""
_INTERPRETER = re.compile(r"[^\s\"'=(]*/(python[\d.]*|torchrun)(?=[\s\"'}])")
"""An interpreter by its path, which is not that of a stand-in."""
_LOG = re.compile(r"""(?m)(?<=\S) +&?\d?>>? *("[^"\n]*"|[^\s"'|&;<>()]+)(?= *(2>&1)? *&? *$)""")
"""Output into a file at the end of a line: it cannot be made, so bash would not start the program."""
_OPTIONS = re.compile(r"(?m)^\s*set +[-+][a-z]+( +pipefail)?(?=\s*(?:#.*)?$)")
"""Options that end a script at a program that is not installed, or a variable that is not set."""


class UnreadableScript(Exception):
    """A script that bash does not understand or cannot run here; `line` is None if there is no location."""

    def __init__(self, reason: str, line: int | None = None) -> None:
        super().__init__(reason)
        self.line = line


class Trace(NamedTuple):
    commands: list[list[str]]
    """The words of each program that was started, in order."""
    errors: str
    """What bash printed to stderr."""


def trace(path: Path, arguments: Sequence[str]) -> Trace:
    """Return the programs that a script starts if called with `arguments`.

    Raises OSError or UnicodeDecodeError if it cannot be read, UnreadableScript if it cannot be run.
    """
    text = path.read_text(encoding="utf-8").replace("\r\n", "\n")
    sandbox, script = shutil.which("bwrap"), str(path.resolve())
    if sandbox is None:
        raise UnreadableScript(f"is run by bash within bubblewrap (bwrap), which is not installed: {_REMEDY}")
    with TemporaryDirectory() as folder:
        calls, programs = Path(folder, "calls"), Path(folder, "programs")
        calls.mkdir()
        programs.mkdir()
        (programs / "prelude").write_text(_PRELUDE)
        (programs / "script").write_text(
            _OPTIONS.sub(":", _LOG.sub("", _INTERPRETER.sub(r"\1", text))), encoding="utf-8"
        )
        for program in ("record", *_STAND_INS.split()):
            (programs / program).write_text(_RECORD)
            (programs / program).chmod(0o755)
        command = [
            sandbox,
            *_ISOLATED.split(),
            "--bind",
            str(calls),
            "/run/calls",
            "--ro-bind",
            str(programs),
            "/run/programs",
        ]
        command += ["--ro-bind", str(programs / "script"), script, "bash", script, *arguments]
        errors = _run(command)
        noted = [file.read_text(errors="replace").split("\0")[:-1] for file in sorted(calls.iterdir())]
    if broken := re.search(r"(?m)line (\d+): (syntax error.*|unexpected E.*)$", errors):
        raise UnreadableScript(broken[2], int(broken[1]))
    if not noted and errors.startswith("bwrap:"):
        raise UnreadableScript(f"is run in a sandbox, which this system does not permit ({errors.strip()}): {_REMEDY}")
    return Trace([words[words[0] == "record" :] for words in noted], errors)


def _run(command: Sequence[str]) -> str:
    """Return the error output; that of a script that does not end is cut off."""
    try:
        done = subprocess.run(command, stdin=subprocess.DEVNULL, capture_output=True, timeout=_SECONDS, check=False)
    except subprocess.TimeoutExpired:
        return ""
    return done.stderr.decode(errors="replace")
