"""The logs of all actors of a run as one stream: what `trinity log` prints.

Files grow and new ones appear while it is read; entries that are found together are put in order of time. An entry is a
line that begins with a time, and the lines below it that do not, as of a traceback. Nothing is written.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from fnmatch import fnmatchcase
from pathlib import Path

from trinity_core.errors import TrinityError
from trinity_core.layout import JobLayout
from trinity_core.waits import poll

LEVELS = ("DEBUG", "INFO", "WARNING", "ERROR", "CRITICAL")
"""Levels, the least severe one first."""
_BEGIN = re.compile(r"(?P<time>\d{4}-\d\d-\d\d \d\d:\d\d:\d\d,\d{3}) (?P<level>[A-Z]+) +")


@dataclass(frozen=True, slots=True)
class LogEntry:
    """What an actor has logged once."""

    time: str
    """As written, by the clock of the actor's node; compared as text. Empty for lines before a file's first entry."""
    level: str
    actor: str
    """The file's path in the log folder without `.log`: `explorer_engine_0`, `10.0.0.2/trainer_1`."""
    text: str
    """Logger and message; of several lines, if the message is."""


def parse(text: str, actor: str, before: LogEntry | None = None) -> list[LogEntry]:
    """The entries of whole lines of a log file; continuation lines of the entry `before` have its time and level."""
    entries: list[LogEntry] = []
    for line in text.splitlines():
        begin = _BEGIN.match(line)
        last = entries[-1] if entries else None
        if begin:
            entries.append(LogEntry(begin["time"], begin["level"], actor, line[begin.end() :]))
        elif last:
            entries[-1] = LogEntry(last.time, last.level, actor, f"{last.text}\n{line}")
        elif before:
            entries.append(LogEntry(before.time, before.level, actor, line))
        else:
            entries.append(LogEntry("", "INFO", actor, line))
    return entries


class LogStream:
    """Reads what has been added to the logs of these runs since the last `read`. Not thread-safe.

    `runs` gives the runs' folders at each `read`, as a pipeline's stages begin one after the other.
    """

    def __init__(self, runs: Callable[[], Sequence[Path]]) -> None:
        self._runs = runs
        self._positions: dict[Path, int] = {}
        self._last: dict[Path, LogEntry] = {}

    def read(self) -> list[LogEntry]:
        """New entries of all actors, by time. A line that is not written whole yet is left for the next time."""
        collected = []
        for path, actor in self._files():
            entries = parse(self._new_text(path), actor, self._last.get(path))
            if entries:
                self._last[path] = entries[-1]
            collected += entries
        return sorted(collected, key=lambda entry: entry.time)

    def _files(self) -> Iterator[tuple[Path, str]]:
        """Each log file and its actor, with the run's name in front where there are several runs."""
        runs = self._runs()
        for run in runs:
            folder = JobLayout(run).log
            for path in sorted(folder.rglob("*.log")):
                actor = path.relative_to(folder).with_suffix("").as_posix()
                yield path, actor if len(runs) == 1 else f"{run.name}/{actor}"

    def _new_text(self, path: Path) -> str:
        with path.open("rb") as file:
            size = file.seek(0, 2)
            start = self._positions.get(path, 0)
            file.seek(start if start <= size else 0)  # a file that has become shorter was rewritten
            begin = file.tell()
            data = file.read()
        whole = data.rfind(b"\n") + 1
        self._positions[path] = begin + whole
        return data[:whole].decode(errors="replace")


def stream_entries(stream: LogStream, follow: bool) -> Iterator[LogEntry]:
    """The entries so far and, with `follow`, those to come."""
    for _ in poll(pause=0.5):
        yield from stream.read()
        if not follow:
            return


def entry_filter(level: str, actors: Sequence[str]) -> Callable[[LogEntry], bool]:
    """Whether an entry is at least as severe as `level` and of one of these actors (patterns, such as `*engine*`).

    Without actors all of them count. Raises TrinityError for a level that does not exist.
    """
    if level.upper() not in LEVELS:
        raise TrinityError(f"--level is {level!r}; it may be one of {', '.join(LEVELS)}.", key="--level")
    least = _severity(level.upper())

    def passes(entry: LogEntry) -> bool:
        names = (entry.actor, entry.actor.rpartition("/")[2])
        named = any(fnmatchcase(name, pattern) for name in names for pattern in actors)
        return _severity(entry.level) >= least and (named or not actors)

    return passes


def entry_line(entry: LogEntry) -> str:
    """The entry as it is printed: time, level, actor, logger and message."""
    return f"{entry.time[5:] or '-':18} {entry.level:7} {entry.actor} {entry.text}"


def _severity(level: str) -> int:
    """The place in `LEVELS`; a level that is not there counts as INFO."""
    return LEVELS.index(level if level in LEVELS else "INFO")
