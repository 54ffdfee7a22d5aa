"""Open sessions, their recordings, the sequences that hold these, and their requests in flight.

A session is one rollout of one task. Its completions form a tree: a request whose messages continue a recorded answer
is served on the recorded token ids, so its prompt begins with them; any other request begins a new tree.
"""

from __future__ import annotations

import asyncio
import json
import secrets
import threading
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from contextvars import ContextVar
from dataclasses import dataclass, field
from hashlib import blake2b
from typing import Any

import numpy as np

from trinity_core.data.messages import canonical, parsed, said
from trinity_core.data.turns import Call, Message, TokenSequence, joined


@dataclass(frozen=True, slots=True)
class Entry:
    """An answer, with the digests that identify requests that continue it."""

    call: Call
    following: Mapping[bytes, Message]
    """The message that came next, by digest of setting and preceding history."""
    endings: Sequence[bytes]
    """Digests of its setting and entire history, for each spelling of the answer; empty if it cannot be continued."""

    @classmethod
    def of(cls, call: Call, setting: str, history: Sequence[Message] | None) -> Entry:
        if history is None:
            return cls(call, {}, ())
        digests = _digests(setting, history)
        endings = [digests[-1]]
        if (repaired := _repaired(history[-1])) is not None:
            endings.append(_digests(setting, [*history[:-1], repaired])[-1])
        return cls(call, dict(zip(digests, history, strict=False)), endings)


@dataclass
class Recorder:
    """The completions of one session, in the order in which they ended."""

    calls: list[Call] = field(default_factory=list)
    _answers: dict[bytes, Call] = field(default_factory=dict)
    """The newest call, by digest of setting and history, its answer included."""
    _next: dict[bytes, Message] = field(default_factory=dict)
    """The newest message, by digest of setting and preceding history."""

    def record(self, call: Call, setting: str = "", history: Sequence[Message] | None = None) -> None:
        """Keep an answer. `history`: its messages with the answer as the client got it; None: it cannot be continued.

        `setting` is what else the prompt depends on, such as the tools. An answer without tokens is not kept.
        """
        self.add(Entry.of(call, setting, history))

    def add(self, entry: Entry) -> None:
        """Keep an answer that was prepared by `Entry.of`. Cannot fail."""
        if len(entry.call.sample.tokens):
            self.calls.append(entry.call)
            self._next.update(entry.following)
            self._answers.update(dict.fromkeys(entry.endings, entry.call))

    def continued(self, setting: str, messages: Sequence[Message]) -> tuple[Call, int] | None:
        """Return the newest recorded answer that `messages` continue, and the number of messages up to it.

        None if there is none. Of several, the one with the longest history.
        """
        digests = _digests(setting, messages)
        for count in range(len(messages) - 1, 0, -1):
            if messages[count - 1].get("role") == "assistant" and (call := self._answers.get(digests[count])):
                return call, count
        return None

    def departure(self, setting: str, messages: Sequence[Message]) -> str | None:
        """Return which of `messages` begins a new sequence, and why; None if none does, and for the first request."""
        if not self._next:
            return None
        digests = _digests(setting, messages)
        places = (n for n, digest in enumerate(digests) if digest in self._next or digest in self._answers)
        known = max(places, default=-1)
        if known < 0:
            return "its tools or chat template arguments differ from all earlier ones of the session"
        if known == len(messages):
            return "all of its messages occurred before: it asks for another answer"
        expected, message = self._next.get(digests[known]), messages[known]
        if expected is None:
            return None
        where = f"message {known + 1} of {len(messages)} ({message.get('role')})"
        if not known:
            return f"{where} does not begin a conversation that the session had before"
        if message.get("role") != "assistant" or expected.get("role") != "assistant":
            return f"{where} replaces another message of role {expected.get('role')}"
        sent, answered = said(message), said(expected)
        parts = [name for name in answered if sent[name] != answered[name]]
        return f"{where} differs from the answer that was given in {' and '.join(parts)}"

    def sequences(self) -> list[TokenSequence]:
        """Return sequences in which each sampled token has mask 1 exactly once, oldest answer first."""
        return [joined(chain) for chain in prefix_chains(self.calls)]


def _digests(setting: str, messages: Sequence[Message]) -> list[bytes]:
    """Return the digest of the setting, and for each message that of the setting and all messages up to it."""
    so_far = blake2b(setting.encode(), digest_size=16)
    digests = [so_far.digest()]
    for message in messages:
        so_far.update(b"\0" + canonical(message).encode())  # JSON contains no NUL
        digests.append(so_far.digest())
    return digests


def _repaired(answer: Message) -> Message | None:
    """Return the answer as sent back by clients that cannot parse its tool arguments: with empty ones. None if they
    can."""
    calls = list(answer.get("tool_calls") or ())
    wrong = [not isinstance(parsed((call.get("function") or {}).get("arguments")), dict) for call in calls]
    if not any(wrong):
        return None
    emptied = [{**call, "function": {**call["function"], "arguments": "{}"}} for call in calls]
    return {
        **answer,
        "tool_calls": [new if bad else call for new, call, bad in zip(emptied, calls, wrong, strict=True)],
    }


def prefix_chains(calls: Sequence[Call]) -> list[list[Call]]:
    """Partition calls, in the order in which they ended, into sequences, oldest first: each continues the one whose
    tokens are the longest beginning of its prompt, or begins a sequence of its own."""
    chains: list[list[Call]] = []
    for call in calls:
        begun = [chain for chain in chains if _begins(call.prompt, chain[-1].tokens)]
        if begun:
            max(begun, key=lambda chain: len(chain[-1].tokens)).append(call)
        else:
            chains.append([call])
    return chains


def _begins(tokens: np.ndarray, those: np.ndarray) -> bool:
    size = len(those)
    return size <= len(tokens) and bool(tokens[size - 1] == those[-1]) and np.array_equal(tokens[:size], those)


Kept = tuple[Call, Sequence[Message] | None]
"""An answer, and its messages including it; None if it cannot be continued."""


@dataclass(frozen=True, slots=True)
class SessionTerms:
    """Settings for all requests of a session."""

    seed: int | None = None
    """Seed of the session; combined with the seed of a request, or else with its number."""
    defaults: Mapping[str, Any] = field(default_factory=dict)
    """Sampling arguments of requests that set none."""
    pinned: Mapping[str, Any] = field(default_factory=dict)
    """Sampling arguments of all requests, whatever they set."""
    max_tokens: int | None = None
    """Token limit of an answer whose request sets none; the context may allow less."""


@dataclass(eq=False)
class RecordedSession:
    """One rollout of one task, as the server sees it. Safe to use from several threads."""

    terms: SessionTerms = field(default_factory=SessionTerms)
    name: str = field(default_factory=lambda: secrets.token_urlsafe(12))
    ended: bool = False
    dropped_tokens: int = 0
    """Tokens sampled for requests whose answer no client got."""
    keeps: Callable[[str, Sequence[Kept]], None] | None = None
    """Called with the setting and answers of each request before they are recorded and sent to the client."""
    _recorder: Recorder = field(default_factory=Recorder)
    _requests: int = 0
    _lock: threading.Lock = field(default_factory=threading.Lock)
    _live: set[Exchange] = field(default_factory=set)

    def begin(self) -> Exchange | None:
        """Begin a new request; None if the session has ended."""
        with self._lock:
            if self.ended:
                return None
            exchange = Exchange(self, self._requests)
            self._requests += 1
            self._live.add(exchange)
            return exchange

    def end(self) -> None:
        """Record no more. Requests in flight are cancelled; their sampled tokens are dropped."""
        with self._lock:
            self.ended = True
            live = self._live.copy()
        for exchange in live:
            exchange.give_up()

    def sequences(self) -> list[TokenSequence]:
        """Return the sequences that hold each sampled token once."""
        with self._lock:
            return self._recorder.sequences()

    def continued(self, setting: str, messages: Sequence[Message]) -> tuple[Call, int] | None:
        with self._lock:
            return self._recorder.continued(setting, messages)

    def departure(self, setting: str, messages: Sequence[Message]) -> str | None:
        with self._lock:
            return self._recorder.departure(setting, messages)

    @property
    def in_flight(self) -> int:
        with self._lock:
            return len(self._live)

    @property
    def digests(self) -> list[str]:
        with self._lock:
            return [call.digest for call in self._recorder.calls]

    @property
    def sampled_tokens(self) -> int:
        with self._lock:
            return sum(len(call.sample.tokens) for call in self._recorder.calls)

    @property
    def guided(self) -> tuple[int, int]:
        """Number of recorded guided answers, and of their tokens that a grammar chose: those carry no loss."""
        with self._lock:
            free = [call.free for call in self._recorder.calls if call.free is not None]
            return len(free), sum(int((~mask).sum()) for mask in free)

    @property
    def newest_version(self) -> int:
        """The newest version that sampled a recorded token; -1 if there is none."""
        with self._lock:
            return max((int(call.sample.versions.max()) for call in self._recorder.calls), default=-1)

    @property
    def first_prompt(self) -> str:
        """A short digest of its first prompt; "" if nothing was recorded."""
        with self._lock:
            calls = self._recorder.calls[:1]
            return blake2b(calls[0].prompt.tobytes(), digest_size=8).hexdigest() if calls else ""

    def _keep(self, exchange: Exchange, answers: Mapping[int, Sequence[Message]] | None) -> None:
        with self._lock:
            if self.ended:
                return
            kept = exchange.histories(answers)
            entries = [Entry.of(call, exchange.setting, history) for call, history in kept]
            if self.keeps is not None:
                self.keeps(exchange.setting, kept)
            for entry in entries:  # nothing can fail from here on: journal, record and client agree
                self._recorder.add(entry)
            exchange.kept = True

    def restore(self, setting: str, kept: Sequence[Kept]) -> None:
        """Record the answers to a request that an earlier process served."""
        with self._lock:
            self._requests += 1
            for call, history in kept:
                self._recorder.record(call, setting, history)

    def _close(self, exchange: Exchange) -> None:
        with self._lock:
            self._live.discard(exchange)
            if not exchange.kept:
                self.dropped_tokens += exchange.sampled_tokens


@dataclass(eq=False)
class Exchange:
    """One request of a session and its answers; the client may get several."""

    session: RecordedSession
    number: int
    messages: Sequence[Message] | None = None
    """None if answers cannot be continued by messages."""
    setting: str = ""
    """What else its prompt depends on, as a string."""
    recorded: int = 0
    """Tokens at the start of its prompt that are a recorded conversation."""
    max_tokens: int | None = None
    """The session's token limit of an answer, if the request sets none."""
    guided: bool = False
    """True if the client requested an answer in a grammar."""
    calls: dict[tuple[str, int], Call] = field(default_factory=dict)
    """Answers that are complete, or were cut when the client left, by request and choice."""
    kept: bool = False
    _tasks: list[asyncio.Task[Any]] = field(default_factory=list)

    def seed(self, requested: int | None) -> int | None:
        """Return the seed of this request, which itself sets `requested`.

        A seed set by a request counts within its session: otherwise agents with a fixed seed would produce equal
        rollouts.
        """
        seed = self.session.terms.seed
        if seed is None:
            return requested
        if requested is None:
            return (seed + 7919 * self.number) % (1 << 31)
        return int.from_bytes(blake2b(f"{seed}|{requested}".encode(), digest_size=4).digest(), "little") >> 1

    @property
    def sampled_tokens(self) -> int:
        return sum(len(call.sample.tokens) for call in self.calls.values())

    def keep(self, answers: Mapping[int, Sequence[Message]] | None = None) -> None:
        """Record the answers that the client gets. `answers`: the messages of each, by choice."""
        self.session._keep(self, answers)

    def histories(self, answers: Mapping[int, Sequence[Message]] | None) -> list[Kept]:
        """Return its answers, each with its messages including the answer if it can be continued."""
        branches: list[Kept] = []
        for (_, choice), call in sorted(self.calls.items(), key=lambda item: item[0]):
            answer = None if answers is None or self.messages is None else answers.get(choice)
            branches.append((call, None if answer is None else [*(self.messages or ()), *answer]))
        return branches

    def runs_in(self, task: asyncio.Task[Any]) -> None:
        """Add a task that `give_up` cancels."""
        self._tasks.append(task)
        if self.session.ended:  # the session ended before there was a task to cancel
            self.give_up()

    def give_up(self) -> None:
        """Cancel it from any thread."""
        with suppress(RuntimeError):  # the server has ended, and with it the request
            for task in self._tasks.copy():
                task.get_loop().call_soon_threadsafe(task.cancel)

    def close(self) -> None:
        """End the exchange; sampled tokens that were not kept are dropped."""
        self.session._close(self)


EXCHANGE: ContextVar[Exchange | None] = ContextVar("EXCHANGE", default=None)
"""The request that is being served, if it belongs to a session."""


def setting_of(arguments: Mapping[str, Any]) -> str:
    return json.dumps(arguments, sort_keys=True, default=str)
