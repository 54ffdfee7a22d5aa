"""The policy as workflows see it (`trinity_core.workflows.rollout_model.RolloutModel`), on a pool of engines."""

from __future__ import annotations

import asyncio
import itertools
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

import numpy as np

from trinity_core.config import AuxiliaryModelConfig, Config
from trinity_core.data.chat import ChatEncoder
from trinity_core.data.formats import Message, Tool
from trinity_core.errors import DataError
from trinity_core.inference.requests import Request, Sample, Sampling
from trinity_core.workflows.rollout_model import Completion, plain_message


@dataclass(frozen=True, slots=True)
class Limits:
    """Defaults and limits of a call. Lengths are in tokens."""

    max_model_len: int
    max_prompt_tokens: int | None
    max_response_tokens: int
    sampling: Sampling
    truncate_prompts: bool = True
    """True: a prompt that is too long is cut and its response carries no loss; False: it raises `DataError`."""


class Generates(Protocol):
    """What a model asks of its engines (`EnginePool`)."""

    async def generate(self, requests: Sequence[Request]) -> list[Sample]:
        """The samples, in the order of the requests."""

    async def score(self, tokens: Sequence[int]) -> list[float]:
        """See `EnginePool.score`."""


class ReadsToolCalls(Protocol):
    """Finds the tool calls of an answer (`ToolCallReader`)."""

    def message(self, answer: Completion, tools: Sequence[Tool]) -> Message:
        """The answer as an assistant's message."""


@dataclass
class EngineModel:
    """A `RolloutModel`. Its coroutines run in one event loop; the `…_sync` methods are for other threads."""

    pool: Generates
    encoder: ChatEncoder
    limits: Limits
    name: str = "policy"
    loop: asyncio.AbstractEventLoop = field(default_factory=asyncio.get_running_loop)
    reader: ReadsToolCalls | None = None
    """None: tool calls are text like any other."""
    version: int = 0
    """Version of the weights in the engines; recorded for responses of prompts that are too long."""
    _numbers: itertools.count[int] = field(default_factory=itertools.count)
    _encoders: dict[str, ChatEncoder] = field(default_factory=dict)

    @property
    def tokenizer(self) -> Any:
        """The model's `transformers` tokenizer."""
        return self.encoder.tokenizer

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
        """See `RolloutModel.chat`. Raises `DataError` for a prompt that is too long, unless prompts are truncated."""
        prompt = self._encoder(chat_template).prompt(messages, tools, self.limits.max_prompt_tokens)
        if prompt.too_long:
            return self._too_long(prompt.tokens, n)
        return await self.generate(prompt.tokens, n, seeds=seeds, **sampling)

    async def generate(
        self, prompt_tokens: Sequence[int], n: int = 1, *, seeds: Sequence[int] | None = None, **sampling: Any
    ) -> list[Completion]:
        """See `RolloutModel.generate`. `n` requests share their prompt, each with its own seed."""
        prompt = np.asarray(prompt_tokens, dtype=np.int32)
        room = self.limits.max_model_len - len(prompt)
        if room < 1:
            return self._too_long(prompt_tokens[: self.limits.max_model_len - 1], n)
        if seeds is not None and len(seeds) != n:
            raise ValueError(f"{len(seeds)} seeds were given for {n} answers")
        wanted = self._sampling(room, sampling)
        requests = [
            Request(f"{self.name}/{next(self._numbers)}", prompt, wanted, None if seeds is None else seeds[i])
            for i in range(n)
        ]
        samples = await self.pool.generate(requests)
        texts = self.tokenizer.batch_decode([sample.tokens for sample in samples], skip_special_tokens=True)
        return [self._completion(prompt, sample, text) for sample, text in zip(samples, texts, strict=True)]

    def render(
        self,
        messages: Sequence[Message],
        tools: Sequence[Tool] | None = None,
        *,
        chat_template: str | None = None,
        prompt: bool = True,
    ) -> str:
        """See `RolloutModel.render`."""
        return self._encoder(chat_template).render(messages, tools, prompt)

    def message(self, answer: Completion, tools: Sequence[Tool] | None = None) -> Message:
        """See `RolloutModel.message`."""
        return self.reader.message(answer, tools) if self.reader and tools else plain_message(answer)

    async def logprobs(self, tokens: Sequence[int]) -> np.ndarray:
        """See `RolloutModel.logprobs`."""
        return np.asarray(await self.pool.score([int(token) for token in tokens]), dtype=np.float32)

    def chat_sync(self, messages: Sequence[Message], n: int = 1, *arguments: Any, **named: Any) -> list[Completion]:
        """`chat` from another thread."""
        return self._wait(self.chat(messages, n, *arguments, **named))

    def generate_sync(self, prompt_tokens: Sequence[int], n: int = 1, **named: Any) -> list[Completion]:
        """`generate` from another thread."""
        return self._wait(self.generate(prompt_tokens, n, **named))

    def _wait(self, answer: Any) -> list[Completion]:
        return asyncio.run_coroutine_threadsafe(answer, self.loop).result()

    def _encoder(self, template: str | None) -> ChatEncoder:
        if template is None or template == self.encoder.template:
            return self.encoder
        if template not in self._encoders:
            self._encoders[template] = ChatEncoder(self.tokenizer, template, self.encoder.template_args)
        return self._encoders[template]

    def _sampling(self, room: int, given: dict[str, Any]) -> Sampling:
        """The sampling of one call. Raises `TypeError` for an unknown argument."""
        usual = self.limits.sampling
        chosen: dict[str, Any] = {
            "temperature": usual.temperature,
            "top_p": usual.top_p,
            "top_k": usual.top_k,
            "max_tokens": self.limits.max_response_tokens,
            "min_tokens": usual.min_tokens,
            "stop_token_ids": usual.stop_token_ids,
        } | {name: value for name, value in given.items() if value is not None}
        chosen["max_tokens"] = min(chosen["max_tokens"], room)
        chosen["min_tokens"] = min(chosen["min_tokens"], chosen["max_tokens"])
        chosen["stop_token_ids"] = tuple(chosen["stop_token_ids"])
        return Sampling(**chosen)

    def _completion(self, prompt: np.ndarray, sample: Sample, text: str) -> Completion:
        reason = "stop" if sample.reason == "stop" else "length"
        return Completion(prompt, sample.tokens, sample.logprobs, sample.versions, text, reason)  # type: ignore[arg-type]

    def _too_long(self, prompt: Sequence[int], n: int) -> list[Completion]:
        if not self.limits.truncate_prompts:
            allowed = self.limits.max_prompt_tokens or self.limits.max_model_len
            raise DataError(
                f"a prompt has more than the {allowed} tokens allowed "
                "(model.max_prompt_tokens); raise that, or set model.enable_prompt_truncation"
            )
        kept = np.asarray(prompt, dtype=np.int32)
        token = np.array([self.tokenizer.eos_token_id or 0], dtype=np.int32)
        nothing = np.zeros(1, dtype=np.float32)
        return [Completion(kept, token, nothing, self.version, "", "prompt_too_long") for _ in range(n)]


def policy_limits(config: Config, stop_token_ids: tuple[int, ...]) -> Limits:
    """Limits of the policy, from the `model` section."""
    model = config.model
    sampling = Sampling(
        max_tokens=model.max_response_tokens or 1,
        temperature=model.temperature,
        top_p=model.top_p,
        top_k=model.top_k,
        min_tokens=model.min_response_tokens,
        stop_token_ids=stop_token_ids,
    )
    assert model.max_model_len is not None
    return Limits(
        model.max_model_len, model.max_prompt_tokens, sampling.max_tokens, sampling, model.enable_prompt_truncation
    )


def auxiliary_limits(config: Config, model: AuxiliaryModelConfig, stop_token_ids: tuple[int, ...]) -> Limits:
    """Limits of an auxiliary model; lengths that it does not set are the policy's."""
    longest = model.max_model_len or config.model.max_model_len
    assert longest is not None
    answer = model.max_response_tokens or config.model.max_response_tokens or longest
    sampling = Sampling(max_tokens=answer, stop_token_ids=stop_token_ids)
    return Limits(longest, model.max_prompt_tokens, answer, sampling, truncate_prompts=False)
