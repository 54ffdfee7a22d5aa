"""vLLM's `EngineClient` on a pool of engines, as vLLM's own server code expects it.

vLLM's input and output processors run here: engines exchange token ids, and text is decoded in the server.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, AsyncIterator, Iterable, Sequence
from copy import copy
from dataclasses import dataclass, field
from typing import Any, NoReturn

import numpy as np
from vllm import RequestOutput, SamplingParams
from vllm.config import VllmConfig
from vllm.engine.protocol import EngineClient
from vllm.exceptions import VLLMServerError, VLLMValidationError
from vllm.renderers import BaseRenderer
from vllm.renderers.registry import RENDERER_REGISTRY, renderer_from_config
from vllm.sampling_params import RequestOutputKind
from vllm.tokenizers.hf import get_cached_tokenizer
from vllm.tokenizers.registry import tokenizer_args_from_config
from vllm.v1.engine import EngineCoreOutput, EngineCoreRequest, FinishReason
from vllm.v1.engine.input_processor import InputProcessor
from vllm.v1.engine.output_processor import OutputProcessor
from vllm.v1.engine.parallel_sampling import ParentRequest
from vllm.v1.outputs import LogprobsLists

from trinity_core.base.errors import TransientFault, TrinityError
from trinity_core.base.threads import Bridge
from trinity_core.data.tokenizer import load_tokenizer
from trinity_core.data.turns import Call
from trinity_core.rollout.inference.guided import free_tokens
from trinity_core.rollout.inference.pool import EnginePool
from trinity_core.rollout.inference.requests import Request, Sample, Sampling
from trinity_core.rollout.openai_api.recorded_session import EXCHANGE, Exchange

REASONS = {"stop": FinishReason.STOP, "length": FinishReason.LENGTH, "abort": FinishReason.ABORT}


class EnginesLost(VLLMServerError):
    """No engine answers any more; the run is ending or has ended."""


@dataclass(eq=False)
class _Choice:
    """One answer in progress."""

    index: int
    core: EngineCoreRequest
    request: Request
    ends: Sequence[int]
    """Tokens that end an answer without being named in the request."""
    parts: list[Sample] = field(default_factory=list)
    free: np.ndarray | None = None
    """bool [T]: see `Call.free`; known once a guided answer is complete."""

    @property
    def params(self) -> SamplingParams:
        return _params(self.core)

    def output(self, part: Sample, finished: bool) -> EngineCoreOutput:
        return EngineCoreOutput(
            self.core.request_id,
            part.tokens.tolist(),
            new_logprobs=self._logprobs(part),
            finish_reason=REASONS[part.reason] if finished else None,
            stop_reason=self._stop_reason(part) if finished else None,
        )

    def _logprobs(self, part: Sample) -> LogprobsLists | None:
        if self.params.logprobs is None or not len(part.tokens):
            return None
        if part.top is not None:
            return LogprobsLists(part.top.tokens, part.top.logprobs, part.top.ranks)
        return LogprobsLists(part.tokens[:, None], part.logprobs[:, None], np.zeros(len(part.tokens), np.int32))

    def _stop_reason(self, part: Sample) -> int | None:
        """Return the token that ended the answer, if the request named it."""
        last = int(part.tokens[-1]) if part.reason == "stop" and len(part.tokens) else None
        return last if last in (self.params.stop_token_ids or ()) and last not in self.ends else None


@dataclass(eq=False)
class _Streams:
    """Streamed requests on their way from the pool's loop to the server's."""

    pool: EnginePool
    bridge: Bridge
    requests: dict[str, Request]
    _queue: asyncio.Queue[tuple[str, Sample, bool] | BaseException] = field(default_factory=asyncio.Queue)
    _pumps: dict[str, asyncio.Future[None]] = field(default_factory=dict)

    async def parts(self) -> AsyncIterator[tuple[str, Sample, bool]]:
        """Yield the parts of all answers as they arrive, with their requests' numbers."""
        for number, request in self.requests.items():
            self._pumps[number] = self.bridge.call(self._pump(number, request))
            self._pumps[number].add_done_callback(self._ended)
        while self._pumps:
            item = await self._queue.get()
            if isinstance(item, BaseException):
                raise item
            if item[0] in self._pumps:
                if item[2]:
                    del self._pumps[item[0]]
                yield item

    def stop(self, number: str) -> None:
        if number in self._pumps:
            self._pumps.pop(number).cancel()

    def close(self) -> None:
        for number in list(self._pumps):
            self.stop(number)

    async def _pump(self, number: str, request: Request) -> None:
        async for part, finished in self.pool.stream(request):
            self.bridge.here.call_soon_threadsafe(self._queue.put_nowait, (number, part, finished))

    def _ended(self, pump: asyncio.Future[None]) -> None:
        if not pump.cancelled() and (error := pump.exception()) is not None:
            self._queue.put_nowait(error)


def _renderer(config: VllmConfig) -> BaseRenderer:
    """Return vLLM's renderer with the tokenizer of the run: vLLM's own, from `AutoTokenizer`, may have other tokens."""
    model = config.model_config
    mode, *_ = tokenizer_args_from_config(model)
    if mode != "hf":
        return renderer_from_config(config)
    tokenizer = load_tokenizer(model.tokenizer, model.trust_remote_code)
    tokenizer.truncation_side = "left"  # as vLLM's
    cached: Any = get_cached_tokenizer(tokenizer)  # vLLM's types do not count it as a TokenizerLike
    return RENDERER_REGISTRY.load_renderer(mode, config, cached)


class PoolClient(EngineClient):
    """Generates on a pool of engines that runs in another event loop, `explorer_loop`. Used in the server's loop."""

    def __init__(
        self,
        config: VllmConfig,
        pool: EnginePool,
        explorer_loop: asyncio.AbstractEventLoop,
        stop_token_ids: Sequence[int] = (),
        name: str = "api",
        recorded: bool = True,
    ) -> None:
        """`recorded`: True if tokens sampled in a session are recorded in it."""
        self.vllm_config, self.model_config = config, config.model_config
        self.renderer = _renderer(config)
        self.input_processor = InputProcessor(config, self.renderer)
        self._pool, self._name, self._stops = pool, name, list(stop_token_ids)
        self.recorded = recorded
        self._bridge = Bridge(asyncio.get_running_loop(), explorer_loop)

    def generate(  # type: ignore[override]
        self, prompt: Any, sampling_params: SamplingParams, request_id: str, **_: Any
    ) -> AsyncGenerator[RequestOutput, None]:
        """See `EngineClient.generate`. Raises at once for requests that cannot be served: with the first part of the
        answer a stream would already have status 200."""
        _refuse(sampling_params)
        exchange = EXCHANGE.get() if self.recorded else None
        if exchange is not None and not exchange.guided:
            sampling_params.structured_outputs = None  # of strict tools: how the policy calls them is its own choice
        if not sampling_params.ignore_eos:
            sampling_params.stop_token_ids = sorted({*(sampling_params.stop_token_ids or ()), *self._stops})
        core = self.input_processor.process_inputs(request_id, prompt, sampling_params, ("generate",))
        InputProcessor.assign_request_id(core)
        return self._answers(core, request_id)

    async def _answers(self, core: EngineCoreRequest, request_id: str) -> AsyncGenerator[RequestOutput, None]:
        """Yield the parts of all answers. Tokens sampled for a session are recorded with its exchange."""
        processor = OutputProcessor(self.renderer.tokenizer, log_stats=False)
        choices = {pending.core.request_id: pending for pending in self._choices(core, processor)}
        exchange = EXCHANGE.get() if self.recorded else None
        params = _params(core)
        # A guided answer arrives whole: if its engine were lost, another one could not continue within the grammar.
        live = (params.output_kind == RequestOutputKind.DELTA or params.stop) and params.structured_outputs is None
        streams = _Streams(self._pool, self._bridge, {number: pending.request for number, pending in choices.items()})
        parts = streams.parts() if live else self._at_once(choices)
        try:
            async for number, part, finished in parts:
                choice = choices[number]
                core_output = choice.output(part, finished)
                done = processor.process_outputs([core_output])
                choice.parts.append(part.part(slice(len(core_output.new_token_ids))))
                stopped = number in done.reqs_to_abort or len(core_output.new_token_ids) < len(part.tokens)
                if exchange is not None and (finished or stopped):
                    if params.structured_outputs is not None:
                        [sample] = choice.parts  # such an answer arrives whole
                        longest = self.model_config.max_model_len
                        choice.free = await self._bridge.call(free_tokens(self._pool, choice.request, sample, longest))
                    _record(exchange, request_id, choice, "stop" if stopped else part.reason)
                if stopped:
                    streams.stop(number)
                for output in done.request_outputs:
                    if isinstance(output, RequestOutput):
                        yield output
                await asyncio.sleep(0)  # parts may arrive faster than they are sent: let other requests run
        except TrinityError as error:
            raise VLLMValidationError(str(error)) from error
        except TransientFault as error:
            raise EnginesLost(str(error)) from error
        finally:
            streams.close()
            if exchange is not None:
                for choice in choices.values():
                    _record(exchange, request_id, choice, "abort")

    def _choices(self, core: EngineCoreRequest, processor: OutputProcessor) -> list[_Choice]:
        params = _params(core)
        parent = ParentRequest(core) if params.n > 1 else None
        choices = []
        for index in range(params.n):
            child = core if parent is None else copy(core)
            if parent is not None:
                child.request_id, child.sampling_params = parent.get_child_info(index)
            processor.add_request(child, None, parent, index, None)
            choices.append(_Choice(index, child, self._request(child), self._stops))
        return choices

    def _request(self, core: EngineCoreRequest) -> Request:
        params, prompt = _params(core), np.array(core.prompt_token_ids, dtype=np.int32)
        assert params.max_tokens is not None
        exchange = EXCHANGE.get()
        if exchange is not None and exchange.max_tokens is not None:
            # Here, because vLLM refuses a request whose own limit exceeds the rest of the context.
            params.max_tokens = min(self.model_config.max_model_len - len(prompt), exchange.max_tokens)
        sampling = Sampling(params.max_tokens, params.temperature, min_tokens=params.min_tokens)
        return Request(f"{self._name}/{core.request_id}", prompt, sampling, params.seed, params)

    async def _at_once(self, choices: dict[str, _Choice]) -> AsyncIterator[tuple[str, Sample, bool]]:
        samples = await self._bridge.call(self._pool.generate([choice.request for choice in choices.values()]))
        for number, sample in zip(choices, samples, strict=True):
            yield number, sample, True

    # ---- the rest of the protocol ----

    @property
    def is_running(self) -> bool:
        return True

    @property
    def is_stopped(self) -> bool:
        return False

    @property
    def errored(self) -> bool:
        """False: the pool replaces engines, and a request that it cannot serve raises."""
        return False

    @property
    def dead_error(self) -> BaseException:
        return EnginesLost("the engines are lost")

    async def abort(self, request_id: str | Iterable[str]) -> None:
        """Does nothing: closing `generate` cancels its request."""

    async def is_tracing_enabled(self) -> bool:
        return False

    async def do_log_stats(self) -> None:
        """Nothing."""

    async def check_health(self) -> None:
        """Does nothing: the run watches its engines."""

    async def is_sleeping(self) -> bool:
        return False

    async def is_paused(self) -> bool:
        return False

    def shutdown(self, timeout: float | None = None) -> None:
        """End the threads that render prompts."""
        self.renderer.shutdown()

    def _not_here(self, *_: Any, **__: Any) -> NoReturn:
        raise VLLMValidationError("the engines of a run are managed by the run")

    encode = notify_kv_transfer_request_rejected = start_profile = stop_profile = _not_here  # type: ignore[assignment]
    reset_mm_cache = reset_encoder_cache = reset_prefix_cache = sleep = _not_here  # type: ignore[assignment]
    release_kv_cache_memory = wake_up = add_lora = _not_here  # type: ignore[assignment]
    pause_generation = resume_generation = _not_here  # type: ignore[assignment]


def _refuse(params: SamplingParams) -> None:
    """Raise for log-probs that the engines of a run do not return."""
    if params.prompt_logprobs is not None or params.logprob_token_ids is not None:
        refused = "prompt_logprobs" if params.prompt_logprobs is not None else "logprob_token_ids"
        raise VLLMValidationError(f"{refused} is not served here; leave it out, and use logprobs", parameter=refused)


def _params(core: EngineCoreRequest) -> SamplingParams:
    assert core.sampling_params is not None
    return core.sampling_params


def _record(exchange: Exchange, request_id: str, choice: _Choice, reason: Any) -> None:
    """Record the sampled tokens; recording a choice twice changes nothing."""
    key = (request_id, choice.index)
    if key in exchange.calls or not choice.parts:
        return
    sample = choice.parts[0]
    for part in choice.parts[1:]:
        sample = sample.then(part)
    prompt = choice.request.prompt
    recorded = Sample(sample.tokens, sample.logprobs, sample.versions, reason)
    guided = choice.params.structured_outputs is not None
    free = (choice.free if choice.free is not None else np.zeros(len(sample.tokens), np.bool_)) if guided else None
    exchange.calls[key] = Call(prompt, recorded, choice.request.sampling.logprob_temperature, free)
