"""The policy's interface for workflows: chat and generate, token ids in and token ids out."""

from __future__ import annotations

import asyncio
import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Literal, Protocol

import numpy as np

from trinity_core.base.threads import call_in
from trinity_core.data.experience import Experience
from trinity_core.data.formats import Message, Tool
from trinity_core.workflows.rewards.base import Reward

FinishReason = Literal["stop", "length", "prompt_too_long"]


def opened_thought(prompt: str) -> str:
    """Return the `<think>` that ends a prompt, with its whitespace: the templates of reasoning models write it there.
    Empty if the prompt ends otherwise."""
    match = re.search(r"<think>\s{0,9}$", prompt[-32:])
    return match[0] if match else ""


@dataclass(slots=True, eq=False)
class Completion:
    """One sampled answer of T tokens to a prompt of P tokens."""

    prompt_tokens: np.ndarray
    """int32 [P]."""
    tokens: np.ndarray
    """int32 [T], including the end-of-turn token if the policy sampled it."""
    logprobs: np.ndarray
    """float32 [T]: log-probs of the sampled tokens over the whole vocabulary, at `temperature`."""
    version: int | np.ndarray
    """The policy version that sampled the tokens: one for all, or int32 [T]; -1 if nothing was sampled."""
    text: str
    """The decoded answer without special tokens."""
    finish_reason: FinishReason = "stop"
    """`prompt_too_long`: the prompt was truncated, nothing was sampled, and the single placeholder token has no
    loss."""
    temperature: float | None = None
    """Temperature of the distribution of the log-probs: that of the call, 1 for a greedy one. NaN if the trainer cannot
    compute that distribution (vLLM on a GPU, with a `top_p` of the call's own); None if unknown."""
    opened: str = ""
    """The `<think>` with which the prompt ends; reward functions get it before `text`."""
    free: np.ndarray | None = None
    """bool [T]: tokens of a guided answer that the policy chose freely; None: all. The others carry no loss."""

    @property
    def versions(self) -> np.ndarray:
        """int32 [T]: the policy version of each token."""
        return np.broadcast_to(np.asarray(self.version, dtype=np.int32), (len(self.tokens),))

    @property
    def reason(self) -> str:
        return self.finish_reason

    @property
    def loss_mask(self) -> np.ndarray:
        """bool [T]: the tokens that the policy chose."""
        return np.ones(len(self.tokens), dtype=np.bool_) if self.free is None else self.free

    def experience(self, reward: Reward | float | None = None, **fields: Any) -> Experience:
        """Return the experience of this answer, with `fields` (group, run, turn, metrics, info …) set on it.

        Pass the `Reward` unchanged from `rewards.score`: its parts become metrics, and if the verifier failed the
        experience has no reward, no loss, and the error in `info`.
        """
        length = len(self.tokens)
        sampled = self.finish_reason != "prompt_too_long"
        values: dict[str, Any] = {
            "tokens": np.concatenate([self.prompt_tokens, self.tokens]),
            "prompt_length": len(self.prompt_tokens),
            "action_mask": self.loss_mask & sampled,
            "logprobs": self.logprobs,
            "versions": self.versions,
            "temperature": self.temperature,
            "truncated": self.finish_reason != "stop",
            **with_reward(reward, fields),
        }
        if self.free is not None:
            values["metrics"] = {**values.get("metrics", {}), "guided_tokens": float((~self.free).sum())}
        if isinstance(reward, Reward) and reward.error is not None:
            values["action_mask"] = np.zeros(length, dtype=np.bool_)
        return Experience(**values)


def with_reward(reward: Reward | float | None, fields: dict[str, Any]) -> dict[str, Any]:
    """Return `fields` of an experience with its reward. The parts of a `Reward` become metrics.

    A verifier's error is counted in the metrics, where `exclude_unscored` finds it, and recorded in `info`.
    """
    if not isinstance(reward, Reward):
        return {"reward": reward, **fields}
    fields = {**fields, "reward": reward.value, "metrics": reward.metrics | fields.get("metrics", {})}
    if reward.error is not None:
        fields["info"] = fields.get("info", {}) | {"verifier_error": reward.error}
    return fields


def plain_message(answer: Completion) -> Message:
    return {"role": "assistant", "content": answer.text}


class RolloutModel(Protocol):
    """A policy that answers. Implementations are safe to call from many workflows concurrently."""

    loop: asyncio.AbstractEventLoop
    """The event loop in which its coroutines run."""

    @property
    def name(self) -> str:
        """`policy`, or the name of an auxiliary model or endpoint."""

    @property
    def turn_ends(self) -> tuple[int, ...]:
        """The tokens with which the chat template ends an answer."""

    @property
    def tokenizer(self) -> Any:
        """The model's `transformers` tokenizer."""

    @property
    def max_model_len(self) -> int:
        """The longest sequence, in tokens."""

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
        """Return `n` answers to a conversation, rendered by the chat template (by default the model's own).

        `seeds` gives each answer its own random stream, so that a run can be repeated. `sampling` holds `temperature`,
        `top_p`, `top_k`, `repetition_penalty`, `structured_output`, `max_tokens` and `min_tokens`, if they differ from
        the model's settings; the answers carry the temperature of their log-probs. Raises `InputError` for any other
        argument.
        """

    async def generate(
        self,
        prompt_tokens: Sequence[int],
        n: int = 1,
        *,
        seeds: Sequence[int] | None = None,
        chat_template: str | None = None,
        **sampling: Any,
    ) -> list[Completion]:
        """Return `n` continuations of token ids: turns after the first append to the sampled ids, unchanged.

        `chat_template`: the template that wrote the ids, if it is not the model's own; it determines the end of
        answers.
        """

    async def logprobs(self, tokens: Sequence[int]) -> np.ndarray:
        """float32 [T - 1]: log-probs, at temperature 1, of the tokens after the first of a sequence of T.

        Raises `InputError` for a sequence that is too long.
        """

    def prompt_tokens(
        self, messages: Sequence[Message], tools: Sequence[Tool] | None = None, *, chat_template: str | None = None
    ) -> Sequence[int]:
        """Return the tokens after which `chat` would sample its answer; too many are not truncated."""

    def render(
        self,
        messages: Sequence[Message],
        tools: Sequence[Tool] | None = None,
        *,
        chat_template: str | None = None,
        prompt: bool = True,
    ) -> str:
        """Return the text of a conversation as `chat` would tokenise it; with `prompt`, up to the start of the next
        answer.

        Raises `DataError` if the template refuses the conversation.
        """

    def message(self, answer: Completion, tools: Sequence[Tool] | None = None) -> Message:
        """Return an answer as an assistant's message. With `tools`, tool calls parsed by the model's parser
        (`explorer.rollout_model.tool_call_parser`) are in `tool_calls`."""

    def chat_sync(
        self, messages: Sequence[Message], n: int = 1, tools: Sequence[Tool] | None = None, **options: Any
    ) -> list[Completion]:
        """`chat` for workflows with a plain `run`; call it from their thread, never from the event loop."""
        return call_in(self.loop, self.chat(messages, n, tools, **options))

    def generate_sync(self, prompt_tokens: Sequence[int], n: int = 1, **options: Any) -> list[Completion]:
        """`generate` for workflows with a plain `run`."""
        return call_in(self.loop, self.generate(prompt_tokens, n, **options))


class RecordingModel:
    """A RolloutModel that also keeps an Experience of every answer, in order.

    The record grows until it is cleared: call `extract_experience_from_history` once per rollout.
    """

    def __init__(self, model: RolloutModel) -> None:
        self.model = model
        self._history: list[Experience] = []

    def __getattr__(self, name: str) -> Any:
        """Return what the model has besides its answers."""
        if name == "model" or name.startswith("_"):  # a copy asks before it has a model
            raise AttributeError(name)
        return getattr(self.model, name)

    async def chat(
        self, messages: Sequence[dict[str, Any]], n: int = 1, tools: Any = None, **args: Any
    ) -> list[Completion]:
        return self._kept(await self.model.chat(messages, n, tools, **args))

    async def generate(self, prompt_tokens: Sequence[int], n: int = 1, **args: Any) -> list[Completion]:
        return self._kept(await self.model.generate(prompt_tokens, n, **args))

    def chat_sync(
        self, messages: Sequence[dict[str, Any]], n: int = 1, tools: Any = None, **args: Any
    ) -> list[Completion]:
        return self._kept(self.model.chat_sync(messages, n, tools, **args))

    def generate_sync(self, prompt_tokens: Sequence[int], n: int = 1, **args: Any) -> list[Completion]:
        return self._kept(self.model.generate_sync(prompt_tokens, n, **args))

    def extract_experience_from_history(self, clear_history: bool = True) -> list[Experience]:
        """Return the experiences of all answers since the record was last cleared. The caller sets their rewards."""
        experiences = list(self._history)
        if clear_history:
            self._history.clear()
        return experiences

    def _kept(self, completions: list[Completion]) -> list[Completion]:
        self._history += [completion.experience() for completion in completions]
        return completions
