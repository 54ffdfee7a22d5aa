"""Sampled answers and the sequences that hold them: sampled tokens are never tokenised again.

The next prompt of a conversation is its recorded tokens plus the tokens of what the chat template writes after them.
The sessions of the OpenAI API and `workflows.trajectory` both use this.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np

from trinity_core.base.errors import DataError
from trinity_core.data.experience import Experience
from trinity_core.data.session_log import answer_digest

Message = Mapping[str, Any]
Render = Callable[[list[Message], bool], str]
MARK = "\ue000answer\ue001"
"""Placeholder for an answer, to find out what a template writes after one. Private-use characters occur in no real
text."""


class Sampled(Protocol):
    """Sample for a prompt: T tokens, the end token included."""

    @property
    def tokens(self) -> np.ndarray:
        """int32 [T]."""

    @property
    def logprobs(self) -> np.ndarray:
        """float32 [T]."""

    @property
    def versions(self) -> np.ndarray:
        """int32 [T]: the policy version of each token."""

    @property
    def reason(self) -> str:
        """`stop` if the policy ended it."""


@dataclass(frozen=True, slots=True, eq=False)
class Call:
    """One answer: the prompt tokens of the engine and the tokens it sampled."""

    prompt: np.ndarray
    """int32 [P]."""
    sample: Sampled
    temperature: float | None = None
    """Temperature of its log-probs; None if unknown."""
    free: np.ndarray | None = None
    """bool [T]: tokens of a guided answer that the policy chose freely; None: all. The others carry no loss."""

    @property
    def counts(self) -> bool:
        """True if any of its tokens carries loss."""
        return self.free is None or bool(self.free.any())

    @property
    def tokens(self) -> np.ndarray:
        """int32 [P + T]: prompt and answer."""
        return np.concatenate([self.prompt, self.sample.tokens])

    @property
    def digest(self) -> str:
        return answer_digest(self.tokens, len(self.prompt), self.sample.logprobs, self.sample.versions)


@dataclass(frozen=True, slots=True, eq=False)
class TokenSequence:
    """Tokens with the answers that count here; an answer that counts in another sequence is context in this one."""

    tokens: np.ndarray
    """int32 [P + T]."""
    prompt_length: int
    """P: tokens before the first answer that counts here."""
    mask: np.ndarray
    """bool [T]."""
    logprobs: np.ndarray
    """float32 [T], 0 if not sampled here."""
    versions: np.ndarray
    """int32 [T], -1 if not sampled here."""
    answers: tuple[tuple[int, int], ...]
    """First and last + 1 position in `tokens` of each answer that counts here."""
    truncated: bool
    """True if its last answer was cut by a limit."""
    temperature: float | np.ndarray | None = None
    """Temperature of the log-probs; float32 [T] if answers differ (1 if not sampled here), None if unknown."""

    def experience(self, **fields: Any) -> Experience:
        """Return the experience of this sequence, with `fields` (reward, run, turn, metrics, info …) set on it."""
        fields = {"temperature": self.temperature, **fields}
        return Experience(
            tokens=self.tokens,
            prompt_length=self.prompt_length,
            action_mask=self.mask,
            logprobs=self.logprobs,
            versions=self.versions,
            truncated=self.truncated,
            **fields,
        )


def text_after_answer(render: Render, messages: Sequence[Message], count: int) -> str | None:
    """Return what the template writes after the answer in message number `count` (from 1), up to the next answer.

    `render` takes messages and whether the start of the next answer follows, and raises DataError if the template
    refuses them. The template sees a mark instead of the answer, so its rendering of the answer and of earlier messages
    does not matter: if it refuses several calls in one turn, it sees only one. None if the mark is lost, or a template
    writes tool calls that cannot be separated from what follows. Raises DataError if the template refuses that too.
    """
    earlier, answer, new = list(messages[: count - 1]), messages[count - 1], list(messages[count:])
    calls = answer.get("tool_calls") or []
    try:
        return _after_answer(render, earlier, answer, new)
    except DataError:
        others = [message for message in earlier if not (message.get("tool_calls") or message.get("role") == "tool")]
        if len(calls) < 2 and len(others) == len(earlier):
            raise
    return _after_answer(render, others, {**answer, "tool_calls": calls[:1]} if calls else answer, new)


def _after_answer(render: Render, earlier: list[Message], answer: Message, new: list[Message]) -> str | None:
    marked = {**answer, "content": MARK}
    rest = text_after_mark(render([*earlier, marked, *new], True))
    if not answer.get("tool_calls"):
        return rest
    end = text_after_mark(render([*earlier, {"role": "assistant", "content": MARK}], False))
    turn = text_after_mark(render([*earlier, marked], False))
    if rest is None:  # the content of an answer with calls is left out
        turn, rest = render([*earlier, answer], False), render([*earlier, answer, *new], True)
    if end is None or turn is None or not turn.endswith(end):
        return None
    calls = turn[: len(turn) - len(end)]
    return rest[len(calls) :] if rest.startswith(calls) else None


def text_after_mark(text: str) -> str | None:
    """Return what follows the mark; None unless it occurs once."""
    parts = text.split(MARK)
    return parts[1] if len(parts) == 2 else None


def continued_prompt(call: Call, rest: Sequence[int]) -> np.ndarray:
    """int32 [P']: the recorded tokens, then `rest`, the tokens of the text after the answer.

    The template ends the answer with the token with which the policy may have ended it; that token is not repeated.
    """
    ended = call.sample.reason == "stop" and len(rest) > 0 and rest[0] == call.sample.tokens[-1]
    return np.concatenate([call.tokens, np.asarray(rest[1:] if ended else rest, dtype=np.int32)])


def nothing_sampled(token: int) -> TokenSequence:
    """Return a placeholder for a rollout in which nothing was sampled, for example after a prompt that is too long: it
    is judged, but has no token to learn from."""
    nothing = np.zeros(1)
    return TokenSequence(
        np.array([token, token], np.int32), 1, nothing.astype(np.bool_), nothing.astype(np.float32),
        np.full(1, -1, np.int32), (), True,
    )  # fmt: skip


def joined(chain: Sequence[Call]) -> TokenSequence:
    """Join answers of one conversation into one sequence; the prompt of each begins with the tokens of the one before.

    An answer whose every token a grammar chose is context; before the first other answer it belongs to the prompt.
    """
    counted = [call for call in chain if call.counts]
    tokens, start = chain[-1].tokens, len((counted or chain)[0].prompt)
    length = len(tokens) - start
    mask = np.zeros(length, dtype=np.bool_)
    logprobs = np.zeros(length, dtype=np.float32)
    versions = np.full(length, -1, dtype=np.int32)
    for call in counted:
        answer = slice(len(call.prompt) - start, len(call.prompt) - start + len(call.sample.tokens))
        logprobs[answer], versions[answer] = call.sample.logprobs, call.sample.versions
        mask[answer] = True if call.free is None else call.free
    places = tuple((len(call.prompt), len(call.prompt) + len(call.sample.tokens)) for call in counted)
    truncated = chain[-1].sample.reason != "stop"
    temperature = _temperature(counted or chain, start, length)
    return TokenSequence(tokens, start, mask, logprobs, versions, places, truncated, temperature)


def _temperature(calls: Sequence[Call], start: int, length: int) -> float | np.ndarray | None:
    first = calls[0].temperature
    if all(call.temperature == first for call in calls):
        return first
    temperatures = np.ones(length, dtype=np.float32)
    for call in calls:
        begin = len(call.prompt) - start
        temperatures[begin : begin + len(call.sample.tokens)] = np.nan if call.temperature is None else call.temperature
    return temperatures
