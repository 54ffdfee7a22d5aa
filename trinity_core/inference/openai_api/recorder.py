"""Records a session's completions, and finds the fewest sequences that hold each sampled token once. Pure: no server,
no vLLM.

A session is one rollout of one task. Its completions form a tree: a request whose messages continue a recorded answer
is served on the recorded token ids, so its prompt begins with them; any other request begins a new tree.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from hashlib import blake2b

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

    def forget(self, calls: Sequence[Call]) -> None:
        """Remove answers that their client never received."""
        gone = {id(call) for call in calls}
        self.calls = [call for call in self.calls if id(call) not in gone]
        self._answers = {digest: call for digest, call in self._answers.items() if id(call) not in gone}

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
        """Return the fewest sequences in which each sampled token has mask 1 exactly once, oldest answer first."""
        return [joined([self.calls[i] for i in chain]) for chain in fewest_chains(_before(self.calls))]


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


def fewest_chains(before: Sequence[Sequence[int]]) -> list[list[int]]:
    """Partition items into the fewest chains, each in order; chains are sorted by first item.

    `before[i]`: the items that may precede i in a chain, preferred first; a transitive relation. The number of chains
    is the number of items minus a maximum matching of items to their predecessors (Fulkerson 1956, "Note on Dilworth's
    decomposition theorem for partially ordered sets"), found by augmenting paths.
    """
    follower: dict[int, int] = {}
    leader: dict[int, int] = {}
    for item in range(len(before)):
        _augment(item, before, follower, leader)
    chains = []
    for start in [item for item in range(len(before)) if item not in leader]:
        chain = [start]
        while chain[-1] in follower:
            chain.append(follower[chain[-1]])
        chains.append(chain)
    return chains


def _augment(item: int, before: Sequence[Sequence[int]], follower: dict[int, int], leader: dict[int, int]) -> None:
    """Give `item` a predecessor, reassigning others if necessary; does nothing if that is impossible."""
    wanted_by: dict[int, int] = {}
    waiting = deque([item])
    while waiting:
        current = waiting.popleft()
        for one in before[current]:
            if one in wanted_by:
                continue
            wanted_by[one] = current
            if one in follower:
                waiting.append(follower[one])
                continue
            free: int | None = one
            while free is not None:  # each item on the path takes its new predecessor and frees the old one
                taker = wanted_by[free]
                freed = leader.get(taker)
                follower[free], leader[taker] = taker, free
                free = freed
            return


def _before(calls: Sequence[Call]) -> list[list[int]]:
    """For each call, return the calls whose tokens its prompt begins with, longest first."""
    tokens = [call.tokens for call in calls]
    earlier = []
    for call in calls:
        prompt = call.prompt
        fitting = [i for i, those in enumerate(tokens) if len(those) <= len(prompt) and _begins(prompt, those)]
        earlier.append(sorted(fitting, key=lambda i: -len(tokens[i])))
    return earlier


def _begins(tokens: np.ndarray, those: np.ndarray) -> bool:
    return tokens[len(those) - 1] == those[-1] and np.array_equal(tokens[: len(those)], those)
