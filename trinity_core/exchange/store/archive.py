"""Experiences as JSON lines for people and scripts.

`buffer/experience_buffer.jsonl` records what was trained on, also after it leaves the store. A line is one experience
of a batch; lines are sorted by trainer step, so that a step is found by bisection. Lines are appended before a
checkpoint is named, and a resumed run drops the lines after its checkpoint, so after any crash the file is the history
of the weights next to it. An explorer with `storage_type: file` writes what it explored in the same way, step by step.
Files are UTF-8: half of a surrogate pair is written as `?`.
"""

from __future__ import annotations

import json
import os
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from itertools import chain, repeat
from pathlib import Path
from typing import IO, Any

import numpy as np

from trinity_core.base.errors import TrinityError
from trinity_core.base.files import clear_errors, read_json, sync_file, when_room, write_json
from trinity_core.base.runlock import one_at_a_time
from trinity_core.data.experience import Experience, arrays_json, as_json

Line = dict[str, Any]
Advantage = float | list[float]
"""A row's advantage in its line: the same for all its tokens in the loss, or one for each of them."""
RowAdvantage = float | np.ndarray | None
"""The same in memory, where it stays until a checkpoint is saved; float16 for each token. None: the row has none."""
Advantages = Mapping[int, Sequence[RowAdvantage]]
"""Train step → the advantages of its rows, in the order of the batch."""
SHORT = 4096
"""Range in bytes below which lines are read one by one."""
EVERY_STEP = 2**63 - 1
HEADER = re.compile(rb'\{"step": (\d+), "group": ("(?:[^"\\]|\\.)*"), ')
"""How `as_line` begins a line."""


def first_line_of(file: IO[bytes], step: int) -> int:
    """Return the offset of the first line of `step` (or of a later step), or of a line shortly before it.

    All lines before that offset belong to earlier steps. Reads only about 20 lines.
    """
    low, high = 0, file.seek(0, os.SEEK_END)
    while high - low > SHORT:
        middle = (low + high) // 2
        file.seek(middle)
        file.readline()  # the rest of a line
        start = file.tell()
        header = line_header(file.readline())
        if start >= high or header is None or header[0] >= step:
            high = middle
        else:
            low = start
    return low


def line_header(raw: bytes) -> tuple[int, str] | None:
    """Return step and group of a line; None for an incomplete or missing one."""
    if not raw.endswith(b"\n"):
        return None
    if header := HEADER.match(raw):
        return int(header[1]), json.loads(header[2])
    line = json.loads(raw)
    return int(line["step"]), line["group"]


def whole_lines(path: Path, first: int = 0, last: int = EVERY_STEP) -> Iterator[tuple[int, str, bytes]]:
    """Yield step, group and text of the lines of train steps `first` to `last`; none if there is no file."""
    if not path.exists():
        return
    with path.open("rb") as file:
        file.seek(first_line_of(file, first))
        for raw in file:
            header = line_header(raw)
            if header is None or header[0] > last:
                return
            if header[0] >= first:
                yield *header, raw


def lines_of(path: Path, step: int) -> list[Line]:
    return [json.loads(raw) for _, _, raw in whole_lines(path, step, step)]


class Archive:
    """Writes the file; there must be only one writer."""

    def __init__(
        self, path: Path, line: Callable[[int, Experience], Line] | None = None, owner: Mapping[str, str] | None = None
    ) -> None:
        """`line` converts an experience to a line, which contains its `step`; by default `as_line`.

        `owner` identifies the writer, in case others are given the same path; it is recorded next to the file.
        """
        self.path = path
        self._owner = dict(owner or {})
        self._line = line or as_line
        self._last: int | None = None

    def extend(
        self, upto: int, batch: Callable[[int], Sequence[Experience]], advantages: Advantages | None = None
    ) -> None:
        """Append the batches that are not in the file yet, up to step `upto`, with the advantages that are known."""
        if self._last is None:
            self._last = self._kept(EVERY_STEP)[0]
        if upto <= self._last:
            return
        last = self._last
        size = self.path.stat().st_size if self.path.exists() else 0
        with clear_errors("writing", self.path):
            when_room(lambda: self._append(size, range(last + 1, upto + 1), batch, advantages or {}), self.path)
        self._last = upto

    def _append(
        self, size: int, steps: Sequence[int], batch: Callable[[int], Sequence[Experience]], advantages: Advantages
    ) -> None:
        with self.path.open("a", encoding="utf-8", errors="replace") as file:
            file.truncate(size)
            for step in steps:
                for row, advantage in zip(batch(step), chain(advantages.get(step, ()), repeat(None)), strict=False):
                    line = self._line(step, row) | ({} if advantage is None else {"advantage": _in_line(advantage)})
                    file.write(f"{json.dumps(line, ensure_ascii=False, default=as_json)}\n")
        sync_file(self.path)

    def rewind(self, step: int) -> None:
        """Cut the file after `step`. Its writer must call this first.

        Raises TrinityError if the file has another owner.
        """
        if self._owner:
            with clear_errors("writing", self.path):
                self._claim()
        self._last, size = self._kept(step)
        if self.path.exists() and size < self.path.stat().st_size:
            with clear_errors("writing", self.path):
                os.truncate(self.path, size)
                sync_file(self.path)

    def _claim(self) -> None:
        """Record the owner of the file."""
        record = self.path.with_name(f".{self.path.name}.owner.json")
        with one_at_a_time(record.with_suffix(".lock")):
            recorded = read_json(record) if self.path.exists() else self._owner
            if not recorded and not self.path.stat().st_size:
                recorded = self._owner
            if recorded != self._owner:
                writer = ", ".join(f"{key} {value}" for key, value in recorded.items()) or "an unknown process"
                raise TrinityError(
                    f"{self.path} is written by {writer}, and this is {', '.join(self._owner.values())}: each run, and "
                    "each explorer of a run, needs its own file. Give another path (or a folder, in which it is "
                    "named after the explorer), or move that file away if it is no longer needed."
                )
            self.path.touch()
            write_json(record, self._owner)

    def _kept(self, upto: int) -> tuple[int, int]:
        """Return the last step up to `upto` with complete lines, and the offset where they end."""
        last, size = 0, 0
        if self.path.exists():
            with self.path.open("rb") as file:
                size = file.seek(first_line_of(file, upto + 1))
                for raw in file:
                    header = line_header(raw)
                    if header is None or header[0] > upto:
                        break
                    last, size = header[0], size + len(raw)
        return last, size


def _in_line(advantage: float | np.ndarray) -> Advantage:
    """Round to 4 digits."""
    if isinstance(advantage, np.ndarray):
        return [float(f"{value:.4g}") for value in advantage.tolist()]
    return float(f"{advantage:.4g}")


def whole_line(step: int, experience: Experience) -> Line:
    """Like `as_line`, with tokens, mask, log-probs and versions, from which `data.experience.from_json` restores it.

    Its `reward` excludes token-level rewards.
    """
    return as_line(step, experience) | {"reward": experience.reward} | arrays_json(experience)


def as_line(step: int, experience: Experience) -> Line:
    """Return an experience as JSON: texts, reward and origin, without tokens.

    The workflow's `info` is included, but cannot overwrite the line's own fields, because `rewind` relies on `step`.
    Step and group come first, so that they can be read without the texts (`line_header`).
    """
    versions = experience.versions
    fields = {
        "step": step,
        "group": experience.group,
        "run": experience.run,
        "turn": experience.turn,
        "task_index": experience.task_index,
        "reward": experience.total_reward,
        "policy_version": None if versions is None else int(versions.max()),
        "prompt_tokens": experience.prompt_length,
        "response_tokens": len(experience.tokens) - experience.prompt_length,
        "truncated": experience.truncated,
        "is_expert": experience.is_expert,
        "metrics": experience.metrics,
    }
    return {"step": step, "group": experience.group} | experience.info | fields
