"""Another process that holds a part of a run, as its trainer or an explorer does."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

from trinity_core.config import Config

HOLDER = """
import pathlib, sys
from trinity_core.base import runlock
runlock.hold(pathlib.Path(sys.argv[1]), sys.argv[2]); print(); input()
"""


def other_process(config: Config, part: str) -> subprocess.Popen[str]:
    """A process that holds a part of the run until it is written to or killed."""
    return process_holding(config.job_dir, part)


def process_holding(job_dir: Path, part: str) -> subprocess.Popen[str]:
    """The same for the run in a folder."""
    command = [sys.executable, "-c", HOLDER, str(job_dir), part]
    process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
    assert process.stdout is not None and process.stdout.readline() == "\n"
    return process
