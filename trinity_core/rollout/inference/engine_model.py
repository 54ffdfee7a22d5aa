"""The policy as workflows see it (`trinity_core.workflows.rollout_model.RolloutModel`), on a pool of engines."""

from __future__ import annotations

import asyncio
import itertools
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from trinity_core.base.errors import DataError, InputError
from trinity_core.base.threads import RunsElsewhere, in_this_loop
from trinity_core.config import AuxiliaryModelConfig, Config
from trinity_core.data.chat import ChatEncoder
from trinity_core.data.formats import Message, Tool
from trinity_core.rollout.inference.guided import free_tokens
from trinity_core.rollout.inference.pool import EnginePool
from trinity_core.rollout.inference.requests import Request, Sample, Sampling
from trinity_core.rollout.inference.settings import EngineSettings
from trinity_core.rollout.inference.tool_parsing import ToolCallReader
from trinity_core.workflows.base import all_of
from trinity_core.workflows.rollout_model import Completion, FinishReason, RolloutModel, opened_thought, plain_message


@dataclass(frozen=True, slots=True)
class Limits:
    max_model_len: int
    max_prompt_tokens: int | None
    max_response_tokens: int
    sampling: Sampling
    truncate_prompts: bool = True
    """True: a prompt that is too long is truncated and its response carries no loss; False: it raises `DataError`."""
    engine: EngineSettings | None = None
    """The engines' settings if their reported log-probs may differ from the trainer's distribution; None otherwise."""


@dataclass
class EngineModel(RolloutModel):
    """A `RolloutModel` on engines. Its coroutines run in one event loop; the `…_sync` methods are for other threads."""

    pool: EnginePool
    encoder: ChatEncoder
    limits: Limits
    name: str = "policy"
    loop: asyncio.AbstractEventLoop = field(default_factory=asyncio.get_running_loop)
    reader: ToolCallReader | None = None
    """None: tool calls are ordinary text."""
    version: int = 0
    """Version of the weights in the engines; recorded for responses to prompts that are too long."""
    outside: RunsElsewhere = in_this_loop
    """Runs the pool's calls in the pool's loop if the workflow has another one."""
    _numbers: itertools.count[int] = field(default_factory=itertools.count)
    _encoders: dict[str, ChatEncoder] = field(default_factory=dict)

    @property
    def turn_ends(self) -> tuple[int, ...]:
        return self.encoder.turn_ends

    @property
    def tokenizer(self) -> Any:
        return self.encoder.tokenizer

    @property
    def max_model_len(self) -> int:
        return self.limits.max_model_len

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
        return await self.generate(prompt.tokens, n, seeds=seeds, chat_template=chat_template, **sampling)

    async def generate(
        self,
        prompt_tokens: Sequence[int],
        n: int = 1,
        *,
        seeds: Sequence[int] | None = None,
        chat_template: str | None = None,
        **sampling: Any,
    ) -> list[Completion]:
        """See `RolloutModel.generate`. `n` requests share their prompt, each with its own seed."""
        prompt = np.asarray(prompt_tokens, dtype=np.int32)
        room = self.limits.max_model_len - len(prompt)
        if room < 1:
            return self._too_long(prompt_tokens[: self.limits.max_model_len - 1], n)
        if seeds is not None and len(seeds) != n:
            raise ValueError(f"{len(seeds)} seeds were given for {n} answers")
        encoder = self._encoder(chat_template)
        settings = self._sampling(room, encoder, sampling)
        requests = [
            Request(f"{self.name}/{next(self._numbers)}", prompt, settings, None if seeds is None else seeds[i])
            for i in range(n)
        ]
        samples = await self.outside(self.pool.generate(requests))
        answers = [_without_end(sample, encoder.turn_ends) for sample in samples]
        texts = self.tokenizer.batch_decode(answers, skip_special_tokens=True)
        temperature = self._logprob_temperature(settings)
        opened = opened_thought(self.tokenizer.decode(prompt[-16:]))
        completions = [
            self._completion(prompt, sample, text, temperature, opened)
            for sample, text in zip(samples, texts, strict=True)
        ]
        if settings.structured_output is not None:
            longest, pairs = self.limits.max_model_len, zip(requests, samples, strict=True)
            free = await all_of([self.outside(free_tokens(self.pool, *pair, longest)) for pair in pairs])
            for completion, mask in zip(completions, free, strict=True):
                completion.free = mask
        return completions

    def prompt_tokens(
        self, messages: Sequence[Message], tools: Sequence[Tool] | None = None, *, chat_template: str | None = None
    ) -> Sequence[int]:
        return self._encoder(chat_template).prompt(messages, tools, None).tokens

    def render(
        self,
        messages: Sequence[Message],
        tools: Sequence[Tool] | None = None,
        *,
        chat_template: str | None = None,
        prompt: bool = True,
    ) -> str:
        return self._encoder(chat_template).render(messages, tools, prompt)

    def message(self, answer: Completion, tools: Sequence[Tool] | None = None) -> Message:
        return self.reader.message(answer, tools) if self.reader and tools else plain_message(answer)

    async def logprobs(self, tokens: Sequence[int]) -> np.ndarray:
        scores = await self.outside(self.pool.score([int(token) for token in tokens]))
        return np.asarray(scores, dtype=np.float32)

    def _encoder(self, template: str | None) -> ChatEncoder:
        if template is None or template == self.encoder.template:
            return self.encoder
        if template not in self._encoders:
            self._encoders[template] = ChatEncoder(self.tokenizer, template, self.encoder.template_args)
        return self._encoders[template]

    def _sampling(self, room: int, encoder: ChatEncoder, arguments: dict[str, Any]) -> Sampling:
        """Return the sampling of one call, with the stop tokens of the template of `encoder`.

        Raises `InputError` for an unknown argument or an invalid value.
        """
        usual = self.limits.sampling
        values: dict[str, Any] = {
            "temperature": usual.temperature,
            "top_p": usual.top_p,
            "top_k": usual.top_k,
            "repetition_penalty": usual.repetition_penalty,
            "max_tokens": self.limits.max_response_tokens,
            "min_tokens": usual.min_tokens,
            "stop_token_ids": dict.fromkeys([*usual.stop_token_ids, *encoder.turn_ends]),
            "structured_output": None,
        }
        if unknown := arguments.keys() - values.keys():
            raise InputError(
                f"the policy cannot be sampled with {', '.join(sorted(unknown))}: log-probs of that distribution would "
                f"be missing; it takes {', '.join(values)}",
                key=min(unknown),
            )
        values |= {name: value for name, value in arguments.items() if value is not None}
        values["max_tokens"] = min(values["max_tokens"], room)
        values["min_tokens"] = min(values["min_tokens"], values["max_tokens"])
        values["stop_token_ids"] = tuple(values["stop_token_ids"])
        sampling = Sampling(**values)
        sampling.check()
        return sampling

    def _logprob_temperature(self, sampling: Sampling) -> float:
        engine = self.limits.engine
        return sampling.logprob_temperature if engine is None or engine.reports_logprobs_of(sampling) else np.nan

    def _completion(self, prompt: np.ndarray, sample: Sample, text: str, temperature: float, opened: str) -> Completion:
        reason: FinishReason = "stop" if sample.reason == "stop" else "length"
        return Completion(prompt, sample.tokens, sample.logprobs, sample.versions, text, reason, temperature, opened)

    def _too_long(self, prompt: Sequence[int], n: int) -> list[Completion]:
        if not self.limits.truncate_prompts:
            allowed = self.limits.max_prompt_tokens or self.limits.max_model_len
            raise DataError(
                f"a prompt has more than the {allowed} tokens allowed "
                "(model.max_prompt_tokens); raise that, or set model.enable_prompt_truncation",
                key="model.max_prompt_tokens",
            )
        prompt_tokens = np.asarray(prompt, dtype=np.int32)
        token = np.array([self.tokenizer.eos_token_id or 0], dtype=np.int32)
        nothing = np.zeros(1, dtype=np.float32)
        temperature = self.limits.sampling.logprob_temperature
        return [Completion(prompt_tokens, token, nothing, -1, "", "prompt_too_long", temperature) for _ in range(n)]


def _without_end(sample: Sample, ends: Sequence[int]) -> np.ndarray:
    """int32: the tokens without the end-of-turn token, which some tokenizers do not list as special."""
    ended = sample.reason == "stop" and len(sample.tokens) > 0 and sample.tokens[-1] in ends
    return sample.tokens[:-1] if ended else sample.tokens


def policy_limits(config: Config, stop_token_ids: tuple[int, ...]) -> Limits:
    model = config.model
    sampling = Sampling(
        max_tokens=model.max_response_tokens or 1,
        temperature=model.temperature,
        top_p=model.top_p,
        top_k=model.top_k,
        repetition_penalty=model.repetition_penalty,
        min_tokens=model.min_response_tokens,
        stop_token_ids=stop_token_ids,
    )
    return Limits(
        model.max_model_len, model.max_prompt_tokens, sampling.max_tokens, sampling, model.enable_prompt_truncation
    )


def auxiliary_model(
    config: Config,
    model: AuxiliaryModelConfig,
    pool: EnginePool,
    encoder: ChatEncoder,
    stop_token_ids: tuple[int, ...],
    outside: RunsElsewhere = in_this_loop,
) -> EngineModel:
    """Return an auxiliary model on its engines. Its answers default to the policy's length limit."""
    answer = model.max_response_tokens or config.model.max_response_tokens or model.max_model_len
    sampling = Sampling(max_tokens=answer, stop_token_ids=stop_token_ids)
    limits = Limits(model.max_model_len, model.max_prompt_tokens, answer, sampling, truncate_prompts=False)
    return EngineModel(pool, encoder, limits, model.called, outside=outside)
