"""The sessions of mode `serve`: open, with feedback, dropped, or taken by an explore step. Without a server.

A session ends with its feedback, or after a time without any. Sessions with feedback wait for an explore step; if
rollouts are compared, until there are enough of the same task.

The `Journal` has a file for each session until an explore step stores it. An answer is written before its client gets
it, and feedback before it is confirmed: a restarted server knows both. Data is handed to the kernel, so it survives the
process but not a power cut.
"""

from __future__ import annotations

import errno
import json
import os
import threading
import time
from collections import defaultdict
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Annotated, Any

import numpy as np
from pydantic import BaseModel, ConfigDict, Field

from trinity_core.base.files import private_folder
from trinity_core.data.turns import Call
from trinity_core.rollout.inference.requests import Sample
from trinity_core.rollout.openai_api.recorded_session import Kept, RecordedSession, SessionTerms
from trinity_core.rollout.openai_api.session_auth import Refusal

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
        private_folder(folder)

    def begin(self, name: str, task: str) -> None:
        self._append(name, {"task": task})

    def answers(self, name: str, setting: str, kept: Sequence[Kept]) -> None:
        self._append(name, {"setting": setting, "answers": [_line(call, history) for call, history in kept]})

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


WITHOUT_FEEDBACK = "without_feedback"
WITHOUT_GROUP = "without_group"
TAKEN_BACK = "weights_taken_back"
REMEMBERED = 100_000
"""Number of ended sessions whose reason is kept."""


GREATEST = 1e6
"""Limit on the size of a reward or a metric: squares of greater ones overflow in the trainer's float32."""
Text = Annotated[str, Field(max_length=10_000)]
Number = Annotated[float, Field(ge=-GREATEST, le=GREATEST)]
MetricName = Annotated[str, Field(max_length=100, pattern=r"^\w[\w\-. ]*(/\w[\w\-. ]*)*$")]
"""Names that tracking systems accept."""


class Feedback(BaseModel):
    model_config = ConfigDict(extra="forbid", strict=True)
    reward: Number
    metrics: dict[MetricName, Number] = {}
    comment: Text = ""


@dataclass(eq=False)
class ServedSession:
    """A session with its task, its last use and its feedback."""

    session: RecordedSession
    task: str
    seen: float
    """Time of the last request or feedback."""
    feedback: Feedback | None = None
    taken_back: bool = False
    """True if some tokens were sampled by weights that the trainer no longer has."""

    @property
    def name(self) -> str:
        return self.session.name

    @property
    def key(self) -> str:
        """The key of its group: its task, or its first prompt."""
        return self.task or f"prompt {self.session.first_prompt}"


@dataclass(frozen=True, slots=True)
class ServedGroup:
    """Sessions of one task; `dropped` is why they are not trained on ("": they are)."""

    sessions: Sequence[ServedSession]
    dropped: str = ""


class ServedSessions:
    """Safe to use from several threads."""

    def __init__(
        self,
        journal: Journal,
        terms: SessionTerms,
        patience: float,
        repeats: int = 1,
        ended: Mapping[str, str] | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """`patience`: seconds from the last answer of a session to its feedback. `repeats`: sessions of a group.

        `ended`: sessions of earlier processes, with the reason.
        """
        self._journal, self._terms, self._patience, self._repeats = journal, terms, patience, repeats
        self._clock = clock
        self._lock = threading.RLock()
        self._open: dict[str, ServedSession] = {}
        self._judged: list[ServedSession] = []
        self._dropped: list[ServedGroup] = []
        self._taken: list[ServedGroup] = []
        self._ended: dict[str, str] = dict(ended or {})
        self._began = 0.0
        """Since when there has been a complete group."""
        for entry in journal.read():
            self._restore(entry)

    def _restore(self, entry: JournalEntry) -> None:
        session = self._session(entry.name)
        for setting, kept in entry.requests:
            session.restore(setting, kept)
        mine = ServedSession(session, entry.task, self._clock(), taken_back=entry.taken_back)
        if entry.feedback is None:
            self._open[mine.name] = mine
            self._ended.pop(mine.name, None)
        else:
            session.end()
            self._judge(mine, Feedback(**entry.feedback))

    @property
    def sessions(self) -> list[RecordedSession]:
        with self._lock:
            return [mine.session for mine in self._open.values()]

    @property
    def judged(self) -> list[RecordedSession]:
        """Sessions with feedback that are in no explore step yet."""
        with self._lock:
            return [mine.session for mine in self._judged]

    # ---- for clients ----

    def begin(self, task: str = "") -> RecordedSession:
        """Open a session. Sessions with the same `task` are compared with each other."""
        session = self._session()
        self._journal.begin(session.name, task)
        with self._lock:
            self._open[session.name] = ServedSession(session, task, self._clock())
        return session

    def used(self, name: str) -> None:
        """Called when a request of the session is over."""
        with self._lock:
            if mine := self._open.get(name):
                mine.seen = self._clock()

    def forget(self, session: RecordedSession) -> bool:
        """Remove a session in which nothing was recorded; True if it was removed."""
        with self._lock:
            if session.sampled_tokens or self._open.pop(session.name, None) is None:
                return False
        self._journal.remove(session.name)
        return True

    def give(self, name: str, feedback: Feedback) -> RecordedSession:
        """Record feedback: the session ends, and waits for an explore step. Raises Refusal."""
        with self._lock:
            mine = self._open.get(name)
            if mine is None:
                raise self._gone(name)
            if not mine.session.sampled_tokens:
                message = "nothing was sampled in this session yet, so there is nothing to judge."
                raise Refusal(409, "nothing_sampled", message, "session_id")
            self._journal.feedback(name, feedback.model_dump(include={"reward", "metrics", "comment"}))
            mine.session.end()
            del self._open[name]
            self._judge(mine, feedback)
        return mine.session

    def _gone(self, name: str) -> Refusal:
        if name not in self._ended:
            return Refusal(404, "session_not_found", "there is no such session.", "session_id")
        if self._ended[name] == WITHOUT_FEEDBACK:
            message = f"this session ended without feedback, {self._patience:g} s after its last answer."
            return Refusal(410, "session_ended", message, "session_id")
        return Refusal(409, "feedback_already_given", "this session has its feedback already.", "session_id")

    # ---- for the explorer ----

    def expire(self) -> list[RecordedSession]:
        """End and return the sessions that waited too long for feedback; drop those that waited too long for group
        members."""
        with self._lock:
            due = self._clock() - self._patience
            late = [mine for mine in self._open.values() if mine.seen <= due and not mine.session.in_flight]
            for mine in late:
                mine.session.end()
                del self._open[mine.name]
                self._note_end(mine.name, WITHOUT_FEEDBACK)
                if mine.session.sampled_tokens:
                    self._dropped.append(ServedGroup([mine], WITHOUT_FEEDBACK))
                else:
                    self._journal.remove(mine.name)
            for members, complete in list(self._by_task()):
                if not complete and members[0].seen <= due:
                    self._judged.remove(members[0])
                    self._dropped.append(ServedGroup(members, WITHOUT_GROUP))
            return [mine.session for mine in late]

    def complete(self) -> tuple[int, float]:
        """Return the number of groups that can be taken, and for how many seconds there has been one."""
        with self._lock:
            count, now = len(self._groups()), self._clock()
            if not count:
                self._began = now
            return count, now - self._began

    @property
    def counts(self) -> tuple[int, int, int]:
        """Number of sessions that are open, that wait for an explore step, and that were dropped since the last one."""
        with self._lock:
            return len(self._open), len(self._judged), sum(len(group.sessions) for group in self._dropped)

    def take(self, most: int, version: int) -> list[ServedGroup]:
        """Return up to `most` groups, and all dropped sessions. They count as taken until `stored` or `resume`.

        Sessions with tokens of weights that the trainer took back, or newer than `version`, are dropped.
        """
        with self._lock:
            for mine in [one for one in self._judged if one.taken_back or one.session.newest_version > version]:
                self._judged.remove(mine)
                self._dropped.append(ServedGroup([mine], TAKEN_BACK))
            groups = self._groups()[:most]
            names = {mine.name for group in groups for mine in group.sessions}
            self._judged = [mine for mine in self._judged if mine.name not in names]
            self._taken = [*groups, *self._dropped]
            self._dropped = []
            self._began = self._clock()
            return list(self._taken)

    def take_back(self, version: int) -> None:
        """Called when the trainer went back to `version`: it will assign the later numbers again.

        Marks sessions with newer tokens, and those with a request in flight, which older weights began.
        """
        with self._lock:
            for mine in [*self._open.values(), *self._judged]:
                if not mine.taken_back and (mine.session.newest_version > version or mine.session.in_flight):
                    mine.taken_back = True
                    self._journal.take_back(mine.name)

    def stored(self) -> None:
        """Called when the taken sessions are in the store."""
        with self._lock:
            groups, self._taken = self._taken, []
        for group in groups:
            for mine in group.sessions:
                self._journal.remove(mine.name)

    def resume(self, stored: Collection[str]) -> list[RecordedSession]:
        """Take back sessions that were taken but not stored; forget those of the last stored step.

        Returns those of the forgotten sessions that were open.
        """
        with self._lock:
            for group in self._taken:
                self._dropped += [group] if group.dropped else []
                self._judged += [] if group.dropped else group.sessions
            self._taken = []
            names = set(stored)
            self._judged = [mine for mine in self._judged if mine.name not in names]
            self._dropped = [group for group in self._dropped if group.sessions[0].name not in names]
            again = [self._open.pop(name) for name in names if name in self._open]
            for mine in again:
                self._note_end(mine.name, WITHOUT_FEEDBACK)
        for name in names:
            self._journal.remove(name)
        return [mine.session for mine in again]

    # ---- inside ----

    def _session(self, name: str | None = None) -> RecordedSession:
        session = RecordedSession(self._terms) if name is None else RecordedSession(self._terms, name)
        session.keeps = partial(self._journal.answers, session.name)
        return session

    def _judge(self, mine: ServedSession, feedback: Feedback) -> None:
        mine.feedback, mine.seen = feedback, self._clock()
        self._judged.append(mine)
        self._note_end(mine.name, "")

    def _note_end(self, name: str, why: str) -> None:
        self._ended[name] = why
        while len(self._ended) > REMEMBERED:
            del self._ended[next(iter(self._ended))]

    def _groups(self) -> list[ServedGroup]:
        """Return complete groups. A group that has waited too long for members is complete with two."""
        return [ServedGroup(members) for members, complete in self._by_task() if complete]

    def _by_task(self) -> Iterator[tuple[list[ServedSession], bool]]:
        """Yield candidate groups, and whether each is complete."""
        by_key: dict[str, list[ServedSession]] = defaultdict(list)
        for number, mine in enumerate(self._judged):
            by_key[str(number) if self._repeats == 1 else mine.key].append(mine)
        due = self._clock() - self._patience
        for members in by_key.values():
            for start in range(0, len(members), self._repeats):
                some = members[start : start + self._repeats]
                yield some, len(some) == self._repeats or (len(some) > 1 and some[0].seen <= due)
