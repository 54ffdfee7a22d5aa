"""Live sessions: which are open, what they recorded, and the requests that they have in flight."""

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

from trinity_core.data.turns import Call, Message, TokenSequence
from trinity_core.inference.openai_api.sessions import Recorder

Kept = tuple[Call, Sequence[Message] | None]
"""An answer, and its messages with itself as the last; None if it cannot be continued."""


@dataclass(frozen=True, slots=True)
class SessionTerms:
    """What holds for all requests of a session."""

    seed: int | None = None
    """Requests without a seed get one that follows from this and their number."""
    defaults: Mapping[str, Any] = field(default_factory=dict)
    """Sampling arguments of requests that set none."""
    pinned: Mapping[str, Any] = field(default_factory=dict)
    """Sampling arguments of all requests, whatever they set."""


@dataclass(eq=False)
class RecordedSession:
    """One rollout of one task, as the server sees it. Safe to use from several threads."""

    terms: SessionTerms = field(default_factory=SessionTerms)
    name: str = field(default_factory=lambda: secrets.token_urlsafe(12))
    ended: bool = False
    dropped_tokens: int = 0
    """Sampled for requests whose answer no client got."""
    keeps: Callable[[str, Sequence[Kept]], None] | None = None
    """Told of the setting and the answers of each request before they are recorded, and before the client has them."""
    _recorder: Recorder = field(default_factory=Recorder)
    _requests: int = 0
    _lock: threading.Lock = field(default_factory=threading.Lock)
    _live: set[Exchange] = field(default_factory=set)

    def begin(self) -> Exchange | None:
        """A new request; None if the session has ended."""
        with self._lock:
            if self.ended:
                return None
            exchange = Exchange(self, self._requests)
            self._requests += 1
            self._live.add(exchange)
            return exchange

    def end(self) -> None:
        """Record no more. Requests in flight are given up; what was sampled for them is dropped."""
        with self._lock:
            self.ended = True
            live = self._live.copy()
        for exchange in live:
            exchange.give_up()

    def sequences(self) -> list[TokenSequence]:
        """The fewest sequences that hold each sampled token once."""
        with self._lock:
            return self._recorder.sequences()

    def continued(self, setting: str, messages: Sequence[Message]) -> tuple[Call, int] | None:
        """See `Recorder.continued`."""
        with self._lock:
            return self._recorder.continued(setting, messages)

    @property
    def in_flight(self) -> int:
        """Requests that are being served."""
        with self._lock:
            return len(self._live)

    @property
    def digests(self) -> list[str]:
        """Those of the recorded answers."""
        with self._lock:
            return [call.digest for call in self._recorder.calls]

    @property
    def sampled_tokens(self) -> int:
        """Tokens of the recorded answers."""
        with self._lock:
            return sum(len(call.sample.tokens) for call in self._recorder.calls)

    @property
    def newest_version(self) -> int:
        """The newest weights that sampled a recorded token; -1 if there is none."""
        with self._lock:
            return max((int(call.sample.versions.max()) for call in self._recorder.calls), default=-1)

    @property
    def first_prompt(self) -> str:
        """A short name of its first prompt, equal for equal ones; "" if nothing was recorded."""
        with self._lock:
            calls = self._recorder.calls[:1]
            return blake2b(calls[0].prompt.tobytes(), digest_size=8).hexdigest() if calls else ""

    def _keep(self, exchange: Exchange, answers: Mapping[int, Message] | None) -> None:
        with self._lock:
            if self.ended:
                return
            kept = exchange.histories(answers)
            if self.keeps is not None:
                self.keeps(exchange.setting, kept)
            self._record(exchange.setting, kept)
            exchange.kept = True

    def restore(self, setting: str, kept: Sequence[Kept]) -> None:
        """Record the answers of a request that an earlier process served."""
        with self._lock:
            self._requests += 1
            self._record(setting, kept)

    def _record(self, setting: str, kept: Sequence[Kept]) -> None:
        for call, history in kept:
            self._recorder.record(call, setting, history)

    def _close(self, exchange: Exchange) -> None:
        with self._lock:
            self._live.discard(exchange)
            if not exchange.kept:
                self.dropped_tokens += sum(len(call.sample.tokens) for call in exchange.calls.values())


@dataclass(eq=False)
class Exchange:
    """One request of a session and its answers, of which the client may get several."""

    session: RecordedSession
    number: int
    messages: Sequence[Message] | None = None
    """None where an answer cannot be continued by messages."""
    setting: str = ""
    """What else its prompt depends on."""
    recorded: int = 0
    """Tokens at the start of its prompt that are a recorded conversation."""
    calls: dict[tuple[str, int], Call] = field(default_factory=dict)
    """By request and choice: the answers that are complete, or that were cut when the client went away."""
    kept: bool = False
    _task: tuple[asyncio.AbstractEventLoop, asyncio.Task[Any]] | None = None

    @property
    def seed(self) -> int | None:
        """The seed of this request if it sets none."""
        seed = self.session.terms.seed
        return None if seed is None else (seed + 7919 * self.number) % (1 << 31)

    def keep(self, answers: Mapping[int, Message] | None = None) -> None:
        """The client gets this: record it. `answers`: by choice, the message of each."""
        self.session._keep(self, answers)

    def histories(self, answers: Mapping[int, Message] | None) -> list[Kept]:
        """Its answers, each with its messages up to and with the answer where that can be continued."""
        found: list[Kept] = []
        for (_, choice), call in sorted(self.calls.items(), key=lambda item: item[0]):
            answer = None if answers is None or self.messages is None else answers.get(choice)
            found.append((call, None if answer is None else [*(self.messages or ()), answer]))
        return found

    def runs_in(self, task: asyncio.Task[Any]) -> None:
        """The task that `give_up` ends."""
        self._task = (task.get_loop(), task)
        if self.session.ended:  # meanwhile, before there was a task to end
            self.give_up()

    def give_up(self) -> None:
        """End it from any thread."""
        if self._task is not None:
            loop, task = self._task
            with suppress(RuntimeError):  # the server has ended, and with it the request
                loop.call_soon_threadsafe(task.cancel)

    def close(self) -> None:
        """It is over; what was sampled and not kept is dropped."""
        self.session._close(self)


EXCHANGE: ContextVar[Exchange | None] = ContextVar("EXCHANGE", default=None)
"""The request that is being served, if it belongs to a session."""


def setting_of(arguments: Mapping[str, Any]) -> str:
    """The arguments of a chat template as a text."""
    return json.dumps(arguments, sort_keys=True, default=str)
