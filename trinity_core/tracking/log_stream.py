"""The logs of all actors of a run as one stream: the output of `trinity log`.

Files may grow and new ones appear meanwhile; entries read together are sorted by time. An entry is a line that begins
with a time, plus continuation lines, such as a traceback. Nothing is written.
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
"""Levels, the least severe first."""
_BEGIN = re.compile(r"(?P<time>\d{4}-\d\d-\d\d \d\d:\d\d:\d\d,\d{3}) (?P<level>[A-Z]+) +")


@dataclass(frozen=True, slots=True)
class LogEntry:
    time: str
    """As written, by the clock of the actor's node; compared as text. Empty for lines before a file's first entry."""
    level: str
    actor: str
    """The file's path in the log folder without `.log`: `explorer_engine_0`, `10.0.0.2/trainer_1`."""
    text: str


def parse(text: str, actor: str, before: LogEntry | None = None) -> list[LogEntry]:
    """Parse complete lines of a log file; continuation lines of the entry `before` get its time and level."""
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
    """Reads what was added to the logs of these runs since the last `read`. Not thread-safe.

    `runs` is called at each `read`, because a pipeline's stages begin one after another.
    """

    def __init__(self, runs: Callable[[], Sequence[Path]]) -> None:
        self._runs = runs
        self._positions: dict[Path, int] = {}
        self._last: dict[Path, LogEntry] = {}

    def read(self) -> list[LogEntry]:
        """Return new entries of all actors, by time. Incomplete lines are left for the next call."""
        collected = []
        for path, actor in self._files():
            entries = parse(self._new_text(path), actor, self._last.get(path))
            if entries:
                self._last[path] = entries[-1]
            collected += entries
        return sorted(collected, key=lambda entry: entry.time)

    def _files(self) -> Iterator[tuple[Path, str]]:
        """Yield each log file with its actor, prefixed with the run's name if there are several runs."""
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
            file.seek(start if start <= size else 0)  # a file that became shorter was rewritten
            begin = file.tell()
            data = file.read()
        whole = data.rfind(b"\n") + 1
        self._positions[path] = begin + whole
        return data[:whole].decode(errors="replace")


def stream_entries(stream: LogStream, follow: bool) -> Iterator[LogEntry]:
    """Yield the entries so far and, with `follow`, future ones."""
    for _ in poll(pause=0.5):
        yield from stream.read()
        if not follow:
            return


def entry_filter(level: str, actors: Sequence[str]) -> Callable[[LogEntry], bool]:
    """Return a predicate: entry at least as severe as `level`, and actor matches a pattern such as `*engine*`.

    Without patterns all actors match. Raises TrinityError for an unknown level.
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
    return f"{entry.time[5:] or '-':18} {entry.level:7} {entry.actor} {entry.text}"


def _severity(level: str) -> int:
    """Return the index in `LEVELS`; unknown levels count as INFO."""
    return LEVELS.index(level if level in LEVELS else "INFO")
