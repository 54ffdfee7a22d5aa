"""The policy's interface for workflows: chat and generate, token ids in and token ids out."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Literal, Protocol

import numpy as np

from trinity_core.data.experience import Experience
from trinity_core.data.formats import Message, Tool
from trinity_core.workflows.rewards.base import Reward

FinishReason = Literal["stop", "length", "prompt_too_long"]


@dataclass(slots=True, eq=False)
class Completion:
    """One answer of the policy to a prompt of P tokens: T tokens, as sampled."""

    prompt_tokens: np.ndarray
    """int32 [P]."""
    tokens: np.ndarray
    """int32 [T], the end-of-turn token included where the policy chose it."""
    logprobs: np.ndarray
    """float32 [T]: log-probs of the chosen tokens at sampling temperature."""
    version: int | np.ndarray
    """The policy version that chose the tokens: one for all, or int32 [T]."""
    text: str
    """The decoded answer without special tokens."""
    finish_reason: FinishReason = "stop"
    """`prompt_too_long`: the prompt was cut to the limit, nothing was sampled, and the one token given has no loss."""

    @property
    def versions(self) -> np.ndarray:
        """int32 [T]: the policy version of each token."""
        return np.broadcast_to(np.asarray(self.version, dtype=np.int32), (len(self.tokens),))

    @property
    def reason(self) -> str:
        """See `Sampled`."""
        return self.finish_reason

    def experience(self, reward: Reward | float | None = None, **fields: Any) -> Experience:
        """The experience of this answer, with `fields` (group, run, turn, metrics, info …) set on it.

        Give the `Reward` as it came from `rewards.score`: its parts become metrics, and if the verifier failed the
        experience has no reward, no loss, and the error in `info`.
        """
        length = len(self.tokens)
        sampled = self.finish_reason != "prompt_too_long"
        given: dict[str, Any] = {
            "tokens": np.concatenate([self.prompt_tokens, self.tokens]),
            "prompt_length": len(self.prompt_tokens),
            "action_mask": np.full(length, sampled),
            "logprobs": self.logprobs,
            "versions": self.versions,
            "truncated": self.finish_reason != "stop",
            **judged(reward, fields),
        }
        if isinstance(reward, Reward) and reward.error is not None:
            given["action_mask"] = np.zeros(length, dtype=np.bool_)
        return Experience(**given)


def judged(reward: Reward | float | None, fields: dict[str, Any]) -> dict[str, Any]:
    """`fields` of an experience with its reward. The parts of a `Reward` become metrics; the error of a verifier is
    counted in the metrics too, by which `exclude_unscored` knows it, and stands in `info`."""
    if not isinstance(reward, Reward):
        return {"reward": reward, **fields}
    given = {**fields, "reward": reward.value, "metrics": reward.metrics | fields.get("metrics", {})}
    if reward.error is not None:
        given["info"] = fields.get("info", {}) | {"verifier_error": reward.error}
    return given


def plain_message(answer: Completion) -> Message:
    """An answer as an assistant's message that calls no tool."""
    return {"role": "assistant", "content": answer.text}


class RolloutModel(Protocol):
    """A policy that answers. Implementations are safe to call from many workflows at once."""

    @property
    def tokenizer(self) -> Any:
        """The model's `transformers` tokenizer."""

    async def chat(
        self,
        messages: Sequence[Message],
        n: int = 1,
        tools: Sequence[Tool] | None = None,
        *,
        seeds: Sequence[int] | None = None,
        chat_template: str | None = None,
        **sampling: Any,
    ) -> list[Completion]:
        """`n` answers to a conversation, rendered by the chat template (by default the model's own).

        `seeds` gives each answer its own random stream, so that a run can be repeated. `sampling` holds
        `temperature`, `top_p`, `top_k` and `max_tokens`, if they differ from the model's settings.
        """

    async def generate(
        self, prompt_tokens: Sequence[int], n: int = 1, *, seeds: Sequence[int] | None = None, **sampling: Any
    ) -> list[Completion]:
        """`n` continuations of given token ids: turns after the first append to the sampled ids, unchanged."""

    async def logprobs(self, tokens: Sequence[int]) -> np.ndarray:
        """float32 [T - 1]: log-probs, at temperature 1, of the tokens after the first of a sequence of T.

        Raises `InputError` for a sequence that is too long.
        """

    def render(
        self,
        messages: Sequence[Message],
        tools: Sequence[Tool] | None = None,
        *,
        chat_template: str | None = None,
        prompt: bool = True,
    ) -> str:
        """The text of a conversation as `chat` would tokenise it; with `prompt`, up to the start of the next answer.

        Raises `DataError` if the template refuses the conversation.
        """

    def message(self, answer: Completion, tools: Sequence[Tool] | None = None) -> Message:
        """An answer as an assistant's message. With `tools`, its calls of tools are read by the model's parser
        (`explorer.rollout_model.tool_call_parser`) and stand in `tool_calls`."""

    def chat_sync(
        self,
        messages: Sequence[Message],
        n: int = 1,
        tools: Sequence[Tool] | None = None,
        *,
        seeds: Sequence[int] | None = None,
        chat_template: str | None = None,
        **sampling: Any,
    ) -> list[Completion]:
        """`chat` for workflows with a plain `run`; call it from their thread, never from the event loop."""

    def generate_sync(
        self, prompt_tokens: Sequence[int], n: int = 1, *, seeds: Sequence[int] | None = None, **sampling: Any
    ) -> list[Completion]:
        """`generate` for workflows with a plain `run`."""
