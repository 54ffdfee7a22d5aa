"""Open sessions: what they record, the sequences that hold it, and their requests in flight.

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

from trinity_core.data.messages import canonical, parsed, thoughts_of
from trinity_core.data.turns import Call, Message, TokenSequence, joined


def _digests(setting: str, messages: Sequence[Message]) -> list[bytes]:
    """Return the digest of the setting, and for each message that of the setting and all messages up to it."""
    so_far = blake2b(setting.encode(), digest_size=16)
    digests = [so_far.digest()]
    for message in messages:
        so_far.update(b"\0" + canonical(message).encode())  # JSON contains no NUL
        digests.append(so_far.digest())
    return digests


def _continuations(setting: str, history: Sequence[Message] | None) -> tuple[list[bytes], list[bytes]]:
    """Return the digests of a history that a message followed, and those of the whole one, for each spelling of its
    last message; none for an answer that cannot be continued (None)."""
    if history is None:
        return [], []
    *followed, whole = _digests(setting, history)
    repaired = _repaired(history[-1])
    return followed, [whole] if repaired is None else [whole, _digests(setting, [*history[:-1], repaired])[-1]]


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


def _thoughts(messages: Sequence[Message]) -> list[Any]:
    """Return the thoughts of each answer in a history; None for one without."""
    thoughts = [thoughts_of(message) for message in messages if message.get("role") == "assistant"]
    return [thought.strip() if isinstance(thought, str) else thought for thought in thoughts]


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


def _begins(tokens: np.ndarray, prefix: np.ndarray) -> bool:
    size = len(prefix)
    return size <= len(tokens) and bool(tokens[size - 1] == prefix[-1]) and np.array_equal(tokens[:size], prefix)


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
    """One rollout of one task, as the server sees it: its completions in the order in which they ended. Safe to use
    from several threads."""

    terms: SessionTerms = field(default_factory=SessionTerms)
    name: str = field(default_factory=lambda: secrets.token_urlsafe(12))
    ended: bool = False
    dropped_tokens: int = 0
    """Tokens sampled for requests whose answer no client got."""
    keeps: Callable[[str, Sequence[Kept]], None] | None = None
    """Called with the setting and answers of each request before they are recorded and sent to the client."""
    _calls: list[Call] = field(default_factory=list)
    _answers: dict[bytes, list[tuple[Call, list[Any]]]] = field(default_factory=dict)
    """Calls, oldest first, by digest of setting and history, its answer included; each with its history's thoughts."""
    _followed: set[bytes] = field(default_factory=set)
    """Digests of settings and histories that a message followed."""
    _requests: int = 0
    _lock: threading.RLock = field(default_factory=threading.RLock)
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

    def record(self, setting: str, kept: Sequence[Kept], note: Callable[[], None] = lambda: None) -> None:
        """Record the answers to a request; those without tokens are left out. `note` is called in between, after which
        nothing can fail: what it writes, record and client agree.

        `setting` is what else the prompt depends on, such as the tools.
        """
        with self._lock:
            entries = [(call, _thoughts(history or ()), *_continuations(setting, history)) for call, history in kept]
            note()
            for call, thoughts, followed, endings in entries:
                if len(call.sample.tokens):
                    self._calls.append(call)
                    self._followed.update(followed)
                    for ending in endings:
                        self._answers.setdefault(ending, []).append((call, thoughts))

    def restore(self, setting: str, kept: Sequence[Kept]) -> None:
        """Record the answers to a request that an earlier process served."""
        self._requests += 1
        self.record(setting, kept)

    def continued(self, setting: str, messages: Sequence[Message]) -> tuple[Call, int] | None:
        """Return the recorded answer that `messages` continue, and the number of messages up to it.

        None if there is none. Of several, one with the longest history; of these, one whose thoughts are those in
        `messages`; of these, the oldest that no request has continued, else the newest.
        """
        digests = _digests(setting, messages)
        with self._lock:
            for count in range(len(messages) - 1, 0, -1):
                if messages[count - 1].get("role") == "assistant" and (calls := self._answers.get(digests[count])):
                    return self._branch(calls, _thoughts(messages[:count])), count
        return None

    def _branch(self, calls: Sequence[tuple[Call, list[Any]]], sent: Sequence[Any]) -> Call:
        """Return which of several calls with equal answers a client continues that `sent` these thoughts, None where
        it sent none."""
        same = [
            call
            for call, thoughts in calls
            if all(theirs in (None, ours) for theirs, ours in zip(sent, thoughts, strict=True))
        ]
        branches = same or [call for call, _ in calls]
        if len(branches) == 1:
            return branches[0]
        prompts = [call.prompt for call in self._calls]
        served = {exchange.continues for exchange in self._live}
        unused = (
            branch
            for branch in branches
            if branch not in served and not any(_begins(prompt, branch.tokens) for prompt in prompts)
        )
        return next(unused, branches[-1])

    def departure(self, setting: str, messages: Sequence[Message]) -> str | None:
        """Return which of `messages` begins a new sequence; None if none does, and for the first request."""
        digests = _digests(setting, messages)
        with self._lock:
            if not self._followed:
                return None
            matches = [n for n, digest in enumerate(digests) if digest in self._followed or digest in self._answers]
            if not matches:
                return "its tools or chat template arguments differ from all earlier ones of the session"
            if matches[-1] == len(messages):
                return "all of its messages occurred before: it asks for another answer"
            if digests[matches[-1]] not in self._followed:
                return None
        number, role = matches[-1] + 1, messages[matches[-1]].get("role")
        return f"message {number} of {len(messages)} ({role}) differs from all that the session had in its place"

    def sequences(self) -> list[TokenSequence]:
        """Return sequences in which each sampled token has mask 1 exactly once, oldest answer first."""
        with self._lock:
            return [joined(chain) for chain in prefix_chains(self._calls)]

    @property
    def in_flight(self) -> int:
        with self._lock:
            return len(self._live)

    @property
    def digests(self) -> list[str]:
        with self._lock:
            return [call.digest for call in self._calls]

    @property
    def sampled_tokens(self) -> int:
        with self._lock:
            return sum(len(call.sample.tokens) for call in self._calls)

    @property
    def guided(self) -> tuple[int, int]:
        """Number of recorded guided answers, and of their tokens that a grammar chose: those carry no loss."""
        with self._lock:
            free = [call.free for call in self._calls if call.free is not None]
            return len(free), sum(int((~mask).sum()) for mask in free)

    @property
    def newest_version(self) -> int:
        """The newest version that sampled a recorded token; -1 if there is none."""
        with self._lock:
            return max((int(call.sample.versions.max()) for call in self._calls), default=-1)

    @property
    def first_prompt(self) -> str:
        """A short digest of its first prompt; "" if nothing was recorded."""
        with self._lock:
            calls = self._calls[:1]
            return blake2b(calls[0].prompt.tobytes(), digest_size=8).hexdigest() if calls else ""

    def _keep(self, exchange: Exchange, answers: Mapping[int, Sequence[Message]] | None) -> None:
        with self._lock:
            if not self.ended:
                kept, keeps = exchange.histories(answers), self.keeps
                self.record(exchange.setting, kept, lambda: keeps(exchange.setting, kept) if keeps else None)
                exchange.kept = True

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
    continues: Call | None = None
    """The recorded answer that it continues."""
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
