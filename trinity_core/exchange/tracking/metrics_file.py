"""`<job_dir>/monitor/metrics.jsonl`: every metric of a run, one line per step and source, for people and scripts.

Each source (trainer, explorer, eval, …) has one writer; lines appear atomically. The flow process tails the file and
forwards it to MLflow, TensorBoard or W&B, so that no tracking server can slow down or stop an actor.
"""

from __future__ import annotations

import errno
import json
import math
import os
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from pathlib import Path

from trinity_core.base.files import private_folder, read_json, sync_file, temporary_sibling, when_room
from trinity_core.base.runlock import one_at_a_time

LOCK_POLL = 0.01
"""Seconds between attempts to lock the file; writing a line takes well under a millisecond."""
LOCK_SECONDS = 60.0
FORWARDED_PREFIX = "forwarded_"
DROPPED = b"\t"
"""Each byte of a line that `rewind` drops becomes this one, so that the positions of other lines stay. It may stand
around a JSON value, and no line contains it otherwise."""
STREAMS = ("trainer", "explorer", "eval")
"""Groups of sources that are forwarded independently of each other."""


@dataclass(frozen=True, slots=True)
class MetricLine:
    """The metrics of one source at one of its steps. `time` is in Unix seconds."""

    step: int
    source: str
    time: float
    metrics: dict[str, float] = field(default_factory=dict)
    made_with: str = ""
    """Fingerprint of the settings and data behind an evaluation's scores."""
    weights: str = ""
    """Digest of the policy's trained weights after a train step (`training.state.weights_digest`)."""
    total_steps: int | None = None
    """Length of the run at that train step, on which its learning rate may depend."""
    updates: int | None = None
    """Updates of the policy so far, by the optimizer's own count."""


def metrics_path(job_dir: Path | str) -> Path:
    return Path(job_dir) / "monitor" / "metrics.jsonl"


class MetricsFile:
    """Writes metrics. It opens the file for each line, so that `rewind` may replace the file between two lines."""

    def __init__(self, job_dir: Path | str, source: str) -> None:
        self.path = metrics_path(job_dir)
        self.source = source
        private_folder(self.path.parent)

    def write(
        self, step: int, metrics: Mapping[str, float], made_with: str = "", total_steps: int | None = None,
        weights: str = "", updates: int | None = None,
    ) -> None:  # fmt: skip
        """Append one line; non-finite numbers are written as null, so that every line is plain JSON."""
        line: dict[str, object] = {
            "step": int(step),
            "source": self.source,
            "time": round(time.time(), 3),
            "metrics": {name: _finite(value) for name, value in metrics.items()},
        }
        if made_with:
            line["made_with"] = made_with
        if weights:
            line |= {"weights": weights, "total_steps": total_steps, "updates": updates}
        when_room(lambda: self._append(line), self.path)

    def flush(self) -> None:
        """Flush the file to the disk, to survive a power cut."""
        if self.path.exists():
            sync_file(self.path)

    def has(self, step: int) -> bool:
        return any(line.step == step and line.source == self.source for line in read_metrics(self.path.parent.parent))

    def _append(self, line: dict[str, object]) -> None:
        with _locked(self.path):
            file = os.open(self.path, os.O_RDWR | os.O_APPEND | os.O_CREAT, 0o644)
            try:
                size = os.fstat(file).st_size
                cut_short = size > 0 and os.pread(file, 1, size - 1) not in (b"\n", DROPPED)
                text = ("\n" * cut_short + json.dumps(line) + "\n").encode()
                if os.write(file, text) < len(text):
                    raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), str(self.path))
            finally:
                os.close(file)


class MetricsReader:
    """Reads the file incrementally: each `read` returns the complete lines appended since the last one.

    After a `rewind`, which replaces the file, or once the file is gone, it calls `forget` and starts over. An inode may
    be in use once more, so the last line must be there too. Not thread-safe.
    """

    def __init__(self, job_dir: Path | str, forget: Callable[[], object] = lambda: None) -> None:
        self.path = metrics_path(job_dir)
        self.evaluations: list[MetricLine] = []
        """Lines of evaluations (a run has few) among those read."""
        self.start = 0
        """Position of the line that `read` has yielded; a `rewind` moves no line."""
        self._forget = forget
        self._position, self._last, self._inode = 0, b"", 0

    def read(self) -> Iterator[MetricLine]:
        """Yield new lines in the order they were written; none while there is no file."""
        try:
            file = self.path.open("rb")
        except (FileNotFoundError, NotADirectoryError):
            self._begin_anew()
            return
        with file:
            file.seek(self._position - len(self._last))
            inode = os.fstat(file.fileno()).st_ino
            if file.read(len(self._last)) != self._last or inode != self._inode:
                file.seek(0)
                self._begin_anew()
                self._inode = inode
            for raw in file:
                if not raw.endswith(b"\n"):
                    return
                self._position, self._last = self._position + len(raw), raw
                self.start = self._position - len(raw.lstrip(DROPPED))
                for line in parse(raw):
                    if stream_of(line.source) == "eval":
                        self.evaluations.append(line)
                    yield line

    def _begin_anew(self) -> None:
        if self._position:
            self._position, self._last, self.evaluations = 0, b"", []
            self._forget()


def read_metrics(job_dir: Path | str) -> list[MetricLine]:
    """Return all complete lines in the order they were written; empty if the file does not exist."""
    return list(MetricsReader(job_dir).read())


def read_evaluations(job_dir: Path | str) -> list[MetricLine]:
    """Return the evaluations in `read_metrics` without parsing other lines, of which a long run has many."""
    path = metrics_path(job_dir)
    if not path.exists():
        return []
    evaluations = b"".join(raw for raw in path.read_bytes().splitlines(keepends=True) if b'"source": "eval' in raw)
    return [line for line in parse(evaluations) if stream_of(line.source) == "eval"]


def series(lines: list[MetricLine], name: str, source: str | None = None) -> dict[int, float]:
    """Return step → value of one metric; if a resumed run wrote a step twice, the later line counts."""
    values = {
        line.step: line.metrics[name]
        for line in lines
        if name in line.metrics and (source is None or line.source == source)
    }
    return dict(sorted(values.items()))


def explorer_source(name: str) -> str:
    """Return the source name of an explorer's metrics. All share a prefix, by which `rewind` recognises explore steps.

    Names are unique per explorer.
    """
    return name if name.startswith("explorer") and not name.startswith("explorer.") else f"explorer.{name}"


def stream_of(source: str) -> str:
    """Return the stream of a source; sources with other names are explorers."""
    return next((stream for stream in STREAMS if source.startswith(stream)), "explorer")


class Tail:
    """Reads one stream: each `read` returns the lines appended since the last one.

    With `own`, an explorer's source, the stream `explorer` is limited to that explorer. The position is saved in
    `monitor/forwarded_<stream>.json` (`forwarded_<own>.json`), so that no line is forwarded twice, neither by a resumed
    run nor by several flows of one job. Call `advance` after the lines have arrived, within the same `exclusive`.
    `target` identifies the tracking system they are forwarded to: a new one gets all lines.
    """

    def __init__(self, job_dir: Path | str, stream: str, own: str = "", target: str = "") -> None:
        self._target = target
        self.path = metrics_path(job_dir)
        self._stream = stream
        self._own = own if stream == "explorer" else ""
        self._state = self.path.with_name(f"{FORWARDED_PREFIX}{self._own or stream}.json")

    def exclusive(self) -> AbstractContextManager[None]:
        """Return a lock that keeps other flows from forwarding this stream."""
        return _locked(self._state)

    @property
    def is_new(self) -> bool:
        """True if the tracking system has got nothing of the stream yet."""
        return self._target not in self._positions()

    def takes(self, source: str) -> bool:
        return source == self._own if self._own else stream_of(source) == self._stream

    def read(self) -> tuple[list[MetricLine], int]:
        """Return the stream's new complete lines, and the position after them."""
        position = self._positions().get(self._target, 0)
        if not self.path.exists():
            return [], position
        with self.path.open("rb") as file:
            file.seek(position)
            blob = file.read()
        end = blob.rfind(b"\n") + 1
        return [line for line in parse(blob[:end]) if self.takes(line.source)], position + end

    def advance(self, position: int) -> None:
        """Record that everything before `position` has been forwarded."""
        positions = self._positions()
        if position != positions.get(self._target):
            _replace(self._state, json.dumps({"positions": positions | {self._target: position}}).encode())

    def _positions(self) -> dict[str, int]:
        """Return tracking system → offset up to which it has the lines. Empty, so that all are sent again, if the file
        is missing or was damaged by a power cut."""
        return read_json(self._state).get("positions", {})


def was_tracked(job_dir: Path | str) -> bool:
    return any(metrics_path(job_dir).parent.glob(f"{FORWARDED_PREFIX}*.json"))


def rewind(job_dir: Path | str, step: int, explorer_steps: Callable[[], Mapping[str, int]] = dict) -> int:
    """Drop the lines after `step`, for a run that resumes from that checkpoint; return their number.

    Explorers count explore steps: `explorer_steps` returns the last step of each by name; lines of unlisted explorers
    stay. It is called while no process can write, because an active explorer stores a step before it writes the line.
    """
    path = metrics_path(job_dir)
    if not path.exists():
        return 0

    def drop() -> int:
        with _locked(path):
            last = {explorer_source(name): number for name, number in explorer_steps().items()}

            def is_later(line: MetricLine) -> bool:
                return line.step > (last.get(line.source, math.inf) if stream_of(line.source) == "explorer" else step)

            return _drop(path, is_later)

    return when_room(drop, path)


def _drop(path: Path, is_later: Callable[[MetricLine], bool]) -> int:
    """Overwrite the lines that are broken or for which `is_later` is true with `DROPPED`; return their number."""
    lines = path.read_bytes().splitlines(keepends=True)
    dropped = 0
    for index, raw in enumerate(lines):
        line = next(parse(raw), None)
        if raw.strip() and (line is None or is_later(line)):
            lines[index] = DROPPED * len(raw)
            dropped += 1
    if dropped:
        content = b"".join(lines)
        kept = content.rstrip(DROPPED)  # the file still ends with a whole line, if there is one
        _replace(path, kept[:-1] + DROPPED * (len(content) - len(kept)) + kept[-1:])
    return dropped


def _replace(path: Path, content: bytes) -> None:
    """Replace the content of a file at once. Raises OSError on a full disk: whoever holds a lock does not wait."""
    temporary = temporary_sibling(path)
    try:
        temporary.write_bytes(content)
        temporary.replace(path)
    finally:
        temporary.unlink(missing_ok=True)


def parse(blob: bytes) -> Iterator[MetricLine]:
    """Yield the complete lines in a piece of the file; truncated and damaged ones are skipped."""
    for raw in blob.splitlines():
        try:
            entry = json.loads(raw)
        except ValueError:
            continue
        numbers = {name: math.nan if value is None else value for name, value in entry["metrics"].items()}
        others = {name: entry[name] for name in ("made_with", "weights", "total_steps", "updates") if name in entry}
        yield MetricLine(entry["step"], entry["source"], entry["time"], numbers, **others)


def _finite(value: float) -> float | None:
    number = float(value)
    return number if math.isfinite(number) else None


def _locked(path: Path) -> AbstractContextManager[None]:
    return one_at_a_time(path.with_suffix(".lock"), LOCK_SECONDS, LOCK_POLL)
