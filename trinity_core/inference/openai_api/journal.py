"""A file for each session of mode `serve`, until an explore step stores it: the answers and the feedback.

An answer is written before its client gets it, and feedback before it is confirmed: a restarted server knows both. Data
is handed to the kernel, so it survives the process but not a power cut.
"""

from __future__ import annotations

import errno
import json
import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from trinity_core.data.turns import Call
from trinity_core.inference.openai_api.recorded_session import Kept
from trinity_core.inference.requests import Sample

SUFFIX = ".jsonl"


@dataclass(slots=True)
class JournalEntry:
    name: str
    task: str = ""
    requests: list[tuple[str, list[Kept]]] = field(default_factory=list)
    """Setting and answers of each request."""
    feedback: dict[str, Any] | None = None
    taken_back: bool = False
    """True if some tokens were sampled by weights that the trainer no longer has."""


class Journal:
    """The files in a folder that only its owner may read."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        folder.mkdir(parents=True, exist_ok=True, mode=0o700)

    def begin(self, name: str, task: str) -> None:
        self._append(name, {"task": task})

    def answers(self, name: str, setting: str, kept: Sequence[Kept]) -> None:
        self._append(name, {"setting": setting, "answers": [_line(call, history) for call, history in kept]})

    def drop(self, name: str, number: int) -> None:
        """Record that the client of answered request `number` left before it had the answers."""
        self._append(name, {"unread": number})

    def feedback(self, name: str, feedback: Mapping[str, Any]) -> None:
        self._append(name, {"feedback": dict(feedback)})

    def take_back(self, name: str) -> None:
        """Record that the trainer went back to before weights that sampled part of the session."""
        self._append(name, {"taken_back": True})

    def remove(self, name: str) -> None:
        """Remove a session that is stored, or was empty."""
        (self._folder / f"{name}{SUFFIX}").unlink(missing_ok=True)

    def read(self) -> list[JournalEntry]:
        """Return all sessions, oldest first. A truncated line is skipped: its request was never answered."""
        paths = sorted(self._folder.glob(f"*{SUFFIX}"), key=lambda path: path.stat().st_mtime)
        return [self._read(path) for path in paths]

    def _read(self, path: Path) -> JournalEntry:
        entry = JournalEntry(path.name.removesuffix(SUFFIX))
        with path.open("rb+") as file:
            whole = 0
            for raw in file:
                if not raw.endswith(b"\n"):
                    break
                whole += len(raw)
                _add(entry, json.loads(raw))
            file.truncate(whole)
        return entry

    def _append(self, name: str, value: Mapping[str, Any]) -> None:
        data = (json.dumps(value, default=str) + "\n").encode()
        with open(self._folder / f"{name}{SUFFIX}", "ab", buffering=0, opener=_private) as file:
            whole = file.tell()
            try:
                if file.write(data) < len(data):
                    raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), file.name)
            except OSError:
                file.truncate(whole)  # a partial line was never acknowledged; the next one stays readable
                raise


def _private(path: str, flags: int) -> int:
    return os.open(path, flags, 0o600)


def _line(call: Call, history: Sequence[Any] | None) -> dict[str, Any]:
    sample = call.sample
    arrays = {"prompt": call.prompt, "tokens": sample.tokens, "logprobs": sample.logprobs, "versions": sample.versions}
    others = {"reason": sample.reason, "temperature": call.temperature, "history": history}
    others["free"] = None if call.free is None else call.free.tolist()
    return {name: array.tolist() for name, array in arrays.items()} | others


def _add(entry: JournalEntry, line: Mapping[str, Any]) -> None:
    if "answers" in line:
        entry.requests.append((line["setting"], [_kept(answer) for answer in line["answers"]]))
    elif "feedback" in line:
        entry.feedback = line["feedback"]
    elif "taken_back" in line:
        entry.taken_back = True
    elif "unread" in line:
        entry.requests[line["unread"]] = ("", [])
    else:
        entry.task = line["task"]


def _kept(line: Mapping[str, Any]) -> Kept:
    sample = Sample(
        np.array(line["tokens"], np.int32),
        np.array(line["logprobs"], np.float32),
        np.array(line["versions"], np.int32),
        line["reason"],
    )
    prompt = np.array(line["prompt"], np.int32)
    free = None if line.get("free") is None else np.array(line["free"], np.bool_)
    return Call(prompt, sample, line.get("temperature"), free), line["history"]
