"""The peak memory of each process of a command, as Linux counts it (VmHWM of /proc/PID/status)."""

from __future__ import annotations

import os
import re
import subprocess
import threading
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import psutil

POLL_SECONDS = 0.1
"""Between two looks. The peak itself is kept by Linux; what a process takes after the last look is missed."""
FIELDS = ("VmHWM", "RssAnon", "RssFile", "RssShmem")


@dataclass(slots=True)
class Peak:
    """One process: its title, and bytes of its peak and of the parts at the last look at which the peak had grown."""

    title: str
    bytes: int = 0
    anonymous: int = 0
    files: int = 0
    shared: int = 0
    grown_at: float = 0.0
    """Seconds after the start of the command."""


class Peaks:
    """Watches all descendants of a process from a thread."""

    def __init__(self, pid: int) -> None:
        self.found: dict[int, Peak] = {}
        self._root = psutil.Process(pid)
        self._began = time.monotonic()
        self._ended = threading.Event()
        self._thread = threading.Thread(target=self._watch, daemon=True)
        self._thread.start()

    def end(self) -> list[Peak]:
        """Stop watching; the peaks of all processes seen."""
        self._ended.set()
        self._thread.join()
        return list(self.found.values())

    def _watch(self) -> None:
        while not self._ended.wait(POLL_SECONDS):
            try:
                processes = [self._root, *self._root.children(recursive=True)]
            except psutil.NoSuchProcess:
                return
            for process in processes:
                self._look(process.pid)

    def _look(self, pid: int) -> None:
        try:
            status = Path(f"/proc/{pid}/status").read_text()
            title = Path(f"/proc/{pid}/cmdline").read_text().replace("\0", " ").strip()
        except OSError:  # it has ended meanwhile
            return
        read = {name: int(found[1]) * 1024 for name in FIELDS if (found := re.search(rf"{name}:\s+(\d+)", status))}
        if len(read) < len(FIELDS):
            return
        peak = self.found.setdefault(pid, Peak(title))
        peak.title = title or peak.title
        if read["VmHWM"] > peak.bytes:
            peak.bytes, peak.anonymous, peak.files, peak.shared = (read[name] for name in FIELDS)
            peak.grown_at = time.monotonic() - self._began


def peaks_of(command: Sequence[str], log: Path, **environment: str) -> tuple[int, list[Peak]]:
    """Run a command with its output in `log`; its exit code and the peaks of its processes."""
    with log.open("w") as output:
        started = subprocess.Popen(command, stdout=output, stderr=output, env=os.environ | environment)
        watched = Peaks(started.pid)
        code = started.wait()
    return code, watched.end()
