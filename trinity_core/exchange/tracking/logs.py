"""Log files of a run's actors: `<job_dir>/log/<actor>.log`, or `log/<node ip>/<actor>.log` with `log.group_by_node`.

The process that starts an actor passes it `log_environment`; the actor calls `start_log` first. Without that
environment (in a test or a user's program) nothing is written. Passwords and keys are masked.

`LogStream` reads the logs of all actors as one, for `trinity log`. An entry is a line that begins with a time, plus
continuation lines, such as a traceback; entries read together are sorted by time.
"""

from __future__ import annotations

import logging
import os
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from fnmatch import fnmatchcase
from pathlib import Path

from trinity_core.base.addresses import own_address
from trinity_core.base.errors import TrinityError
from trinity_core.base.files import private_folder
from trinity_core.base.layout import JobLayout
from trinity_core.base.waits import poll
from trinity_core.config import Config

FILE, LEVEL = "TRINITY_LOG_FILE", "TRINITY_LOG_LEVEL"
NODE = "{node}"
"""Part of the file's path that stands for the address of the actor's node."""
OURS = ("trinity_core", "tasks")
MASK = "***"
_NAMES = (
    r"(?<![\w-])[\w-]*(?:api[_-]?keys?|(?:private|access|secret)[_-]?keys?|passwd|passwords?|secrets?|credentials?|auth"
    r"|authorization)"
)
"""Matches names of secrets, besides a plain `key=` and tokens, whose numbers are counts."""
_SECRETS = (
    re.compile(r"(?<=://)([^/@:\s]*:)[^/@\s]+(?=@)"),
    re.compile(rf"((?:{_NAMES}['\"]?\s*[=:]\s*|(?<![\w-])keys?=)['\"]?(?:(?:basic|bearer|token)\s+)?)[^\s'\",}}]+",
               re.IGNORECASE),
    re.compile(r"((?<![\w-])[\w-]*token['\"]?\s*[=:]\s*['\"]?)(?!\d+\b)[^\s'\",}]+", re.IGNORECASE),
    re.compile(r"((?<![\w-])--[\w-]*(?:key|password|secret|token)(?:\s+|['\"],\s+['\"]))[^\s'\",]+", re.IGNORECASE),
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
    folder = config.layout.log / NODE if config.log.group_by_node else config.layout.log
    return {FILE: str(folder / f"{log_name(actor)}.log"), LEVEL: config.log.level}


def start_log() -> Path | None:
    """Start writing this process's log to its file and return the path; None if the environment names none.

    Our own messages are written from `log.level` on, those of libraries from WARNING (or that level, if higher). A
    repeated call has no effect unless the environment names another file, which then replaces the first.
    """
    if not (file := os.environ.get(FILE)):
        return None
    path = Path(file.replace(NODE, own_address()) if NODE in file else file)
    root, level = logging.getLogger(), os.environ.get(LEVEL, "INFO")
    for handler in [handler for handler in root.handlers if isinstance(handler, ActorLog)]:
        if handler.baseFilename == str(path):
            return path
        root.removeHandler(handler)
        handler.close()
    private_folder(path.parent)
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
    if FILE in os.environ:
        os.environ.update(environment)
        start_log()


@contextmanager
def logged(activity: str, log: logging.Logger) -> Iterator[None]:
    """Log the begin and the end of an activity, or its failure."""
    log.info("%s begins", activity)
    try:
        yield
    except Exception:
        log.exception("%s fails", activity)
        raise
    log.info("%s ends", activity)


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


def parse(text: str, actor: str, previous: LogEntry | None = None) -> list[LogEntry]:
    """Parse complete lines of a log file; continuation lines of the entry `previous` get its time and level."""
    entries: list[LogEntry] = []
    for line in text.splitlines():
        begin = _BEGIN.match(line)
        last = entries[-1] if entries else None
        if begin:
            entries.append(LogEntry(begin["time"], begin["level"], actor, line[begin.end() :]))
        elif last:
            entries[-1] = LogEntry(last.time, last.level, actor, f"{last.text}\n{line}")
        elif previous:
            entries.append(LogEntry(previous.time, previous.level, actor, line))
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

    return lambda entry: _severity(entry.level) >= least and (not actors or is_selected(entry.actor, actors))


def is_selected(actor: str, patterns: Sequence[str]) -> bool:
    names = (actor, actor.rpartition("/")[2])
    return any(fnmatchcase(name, pattern) for name in names for pattern in patterns)


def entry_line(entry: LogEntry) -> str:
    return f"{entry.time[5:] or '-':18} {entry.level:7} {entry.actor} {entry.text}"


def _severity(level: str) -> int:
    """Return the index in `LEVELS`; unknown levels count as INFO."""
    return LEVELS.index(level if level in LEVELS else "INFO")
