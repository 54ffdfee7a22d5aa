"""`buffer/sessions-<explorer>.jsonl`: digests of the answers sampled in each session of the OpenAI API, written at its
end.

The server writes it from the engines' output, independently of the experiences made later. The audit compares the two:
every token in a loss was sampled in a session that ended, after exactly the tokens before it, with its log-prob.
"""

from __future__ import annotations

import json
import logging
import os
import threading
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import suppress
from hashlib import blake2b
from pathlib import Path
from typing import Any

import numpy as np

from trinity_core.base.errors import TrinityError
from trinity_core.base.files import clear_errors, is_full, private_folder, when_room
from trinity_core.data.experience import Experience

log = logging.getLogger(__name__)

SESSION, ANSWERS = "session", "answers"
"""Keys in `info` of an experience: the name of its session, and first and last + 1 position of each answer that
counts."""
WHY = "why"
"""Key of a line: why the session ended, if not normally."""


def answer_digest(tokens: np.ndarray, start: int, logprobs: np.ndarray, versions: np.ndarray) -> str:
    """Return the digest of an answer: int32 [P + T] tokens up to its end, P = `start`, and its log-probs and versions
    [T]."""
    parts = ((tokens, "<i4"), ([start], "<i8"), (logprobs, "<f4"), (versions, "<i4"))
    return blake2b(b"".join(np.asarray(part, kind).tobytes() for part, kind in parts), digest_size=16).hexdigest()


def answers_in_loss(experience: Experience) -> tuple[list[str], int]:
    """Return the digests of the answers that carry loss, and the number of loss-carrying tokens outside of answers."""
    assert experience.logprobs is not None and experience.versions is not None
    digests, left = [], experience.action_mask.copy()
    for start, end in experience.info.get(ANSWERS, ()):
        span = slice(start - experience.prompt_length, end - experience.prompt_length)
        if experience.action_mask[span].any():
            left[span] = False
            digests.append(
                answer_digest(experience.tokens[:end], start, experience.logprobs[span], experience.versions[span])
            )
    return digests, int(left.sum())


class SessionLog:
    """Appends sessions to the file. Safe to use from several threads.

    Sessions end in event loops, which must not wait for room on a full disk: lines without room are kept in memory.
    """

    def __init__(self, path: Path) -> None:
        self._path = path
        self._lock = threading.Lock()
        self._waiting: list[bytes] = []
        private_folder(path.parent)

    def add(self, session: str, answers: Sequence[str], why: str = "") -> None:
        """Log an ended session with the digests of its answers; `why` if it did not end normally."""
        ended = {SESSION: session, ANSWERS: list(answers)} | ({WHY: why} if why else {})
        line = json.dumps(ended).encode() + b"\n"
        with self._lock:
            self._waiting.append(line)
            try:
                self._write()
            except TrinityError as error:
                if not is_full(error):
                    raise
                log.warning("%s; %d ended sessions wait to be noted", error, len(self._waiting))

    def close(self) -> None:
        """Write the lines kept in memory, once there is room."""
        with self._lock:
            when_room(self._write, self._path)

    def _write(self) -> None:
        if self._waiting:
            with clear_errors("writing", self._path), self._path.open("ab+") as file:
                if file.tell() and (file.seek(-1, os.SEEK_END), file.read())[1] != b"\n":
                    file.write(b"\n")  # after a line that a crash or a full disk cut off
                file.write(b"".join(self._waiting))
            self._waiting.clear()


def session_log_path(buffer: Path, explorer: str) -> Path:
    return buffer / f"sessions-{explorer}.jsonl"


def read_sessions(buffer: Path) -> dict[str, Counter[str]]:
    """Return digests of answers, by session, of all explorers. Truncated lines are left out."""
    return {line[SESSION]: Counter(line[ANSWERS]) for line in _lines(buffer)}


def read_endings(buffer: Path) -> dict[str, str]:
    """Return why each session of all explorers ended, by its name; "" if normally."""
    return {line[SESSION]: line.get(WHY, "") for line in _lines(buffer)}


def _lines(buffer: Path) -> Iterator[dict[str, Any]]:
    for path in sorted(buffer.glob("sessions-*.jsonl")):
        with path.open("rb") as file:
            for raw in file:
                with suppress(json.JSONDecodeError):
                    yield json.loads(raw)
