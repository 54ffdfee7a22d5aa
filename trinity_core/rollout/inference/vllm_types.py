"""Translation between vLLM's types and ours: engine arguments, sampling parameters, outputs.

Imports vllm inside functions only, so that processes without an engine can import the module.
"""

from __future__ import annotations

import logging
from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import numpy as np

from trinity_core.base.compiler import require_compiler
from trinity_core.base.errors import TrinityError
from trinity_core.base.files import expanded
from trinity_core.base.lazy import OWN_ATTENTION
from trinity_core.base.processes import free_memory
from trinity_core.data.files import looks_local
from trinity_core.exchange.checkpoints.adapters import linear_names
from trinity_core.exchange.weights_digest import model_folder
from trinity_core.rollout.inference.requests import STOP_REASONS, Request, Sample, TopLogprobs
from trinity_core.rollout.inference.settings import (
    CPU_BATCH_TOKENS,
    CPU_BLOCK_TOKENS,
    GIB,
    EngineSettings,
    gpu_sequences,
    head_channels,
    kv_bytes,
    kv_bytes_per_token,
    latent_numbers,
)

if TYPE_CHECKING:
    from vllm import SamplingParams
    from vllm.lora.request import LoRARequest
    from vllm.outputs import CompletionOutput
    from vllm.v1.engine.async_llm import AsyncLLM
    from vllm.v1.engine.llm_engine import LLMEngine

log = logging.getLogger(__name__)


def engine_arguments(settings: EngineSettings) -> dict[str, Any]:
    """Keyword arguments of vLLM's `EngineArgs` and `AsyncEngineArgs`."""
    arguments: dict[str, Any] = {
        "model": settings.model_path,
        "skip_tokenizer_init": not settings.grammars,
        "language_model_only": True,  # processors of images would need the tokenizer
        "dtype": settings.compute_dtype,
        "max_model_len": settings.max_model_len,
        "max_num_seqs": settings.max_num_seqs or gpu_sequences(_gpu_memory()),
        "enable_prefix_caching": settings.enable_prefix_caching,
        "trust_remote_code": settings.trust_remote_code,
        "hf_overrides": {**settings.model_overrides, **_window(settings)},
        "seed": settings.seed,
        # The trainer's log-probs are log_softmax(logits / temperature). On the CPU `SeededSampler` reports the same.
        "logprobs_mode": "raw_logprobs" if settings.raw_logprobs else "processed_logprobs",
        "disable_log_stats": True,
        "worker_extension_cls": "trinity_core.rollout.inference.weight_receiver.WorkerExtension",
    }
    if settings.reasoning_parser:
        arguments["reasoning_parser"] = settings.reasoning_parser
    if settings.block_size is not None:
        arguments["block_size"] = settings.block_size
    if settings.quantization:
        arguments["quantization"] = settings.quantization
    if settings.lora_rank:
        arguments |= _lora_arguments(settings)
    arguments |= _gpu_arguments(settings) if settings.on_gpu else _cpu_arguments(settings)
    return arguments | dict(settings.extra_engine_args)


LONGER_WINDOWS = ("cohere2", "cohere2_moe")
"""Families whose sliding windows are one token longer in vLLM than in transformers, and so in the trainer."""


def _window(settings: EngineSettings) -> dict[str, int]:
    """Make an engine attend to the same tokens as the trainer."""
    if model_folder(settings.model_path) is None:
        return {}
    text = text_config(settings)
    window = getattr(text, "sliding_window", None) if text.model_type in LONGER_WINDOWS else None
    return {"sliding_window": window - 1} if window else {}


LORA_RANKS = (1, 8, 16, 32, 64, 128, 256, 320, 512)
"""Ranks for which vLLM allocates adapters; others are padded with zeros."""
ADAPTER = 1
"""vLLM's id of the single adapter."""


def _lora_arguments(settings: EngineSettings) -> dict[str, Any]:
    """Return arguments for one adapter on the trainer's matrices; on others, such as the output embedding, it would
    only cost time.

    Names that the model lacks are left out, as peft does, unless it lacks all: then the engine refuses them.
    """
    import torch
    from transformers import AutoModelForCausalLM

    config, trusted = _model_config(settings), settings.trust_remote_code
    with torch.device("meta"):
        lm = AutoModelForCausalLM.from_config(config, trust_remote_code=trusted, **OWN_ATTENTION)
    modules = linear_names(lm, settings.lora_modules) or settings.lora_modules
    modules = [name for name in modules if name not in settings.lora_excluded]
    rank = min(rank for rank in LORA_RANKS if rank >= settings.lora_rank)
    return {"enable_lora": True, "max_loras": 1, "max_lora_rank": rank, "lora_target_modules": modules}


def lora_request(settings: EngineSettings, loads: int) -> LoRARequest | None:
    """Return each request's reference to the adapter, which is already in place; None in an engine without one.

    `loads` counts the loads: vLLM's prefix cache is keyed by the name, which must not stand for two adapters.
    """
    if not settings.lora_rank:
        return None
    from vllm.lora.request import LoRARequest

    return LoRARequest(f"adapter-{loads}", ADAPTER, "loaded by trinity_core.rollout.inference.weight_receiver")


def _gpu_memory() -> int:
    from vllm.platforms import current_platform

    return int(current_platform.get_device_total_memory())


def _gpu_arguments(settings: EngineSettings) -> dict[str, Any]:
    arguments: dict[str, Any] = {
        "tensor_parallel_size": settings.tensor_parallel_size,
        "gpu_memory_utilization": settings.gpu_memory_utilization,
        "enforce_eager": settings.eager,
    }
    if settings.kv_cache_gib is not None:
        cache = int(settings.kv_cache_gib * GIB)
        # vLLM refuses to start unless the share is free, though a cache of this size does not depend on it.
        arguments |= {"kv_cache_memory_bytes": cache, "gpu_memory_utilization": min(1.0, cache / _gpu_memory())}
    if settings.sleeps:
        arguments |= {"enable_sleep_mode": True, "sleep_mode_offload_cudagraph": True}
    if settings.tensor_parallel_size > 1:
        arguments["distributed_executor_backend"] = "mp"
    if settings.weight_transfer:
        from vllm.config import WeightTransferConfig

        arguments["weight_transfer_config"] = WeightTransferConfig(backend=settings.weight_transfer)
    return arguments


CPU_LATENT = {"attention_backend": "CPU_MLA", "compilation_config": {"custom_ops": ["-rotary_embedding"]}}
"""Arguments for latent attention on a CPU. vLLM's reference kernels, because those of AMX drop `kv_b_proj` once it is
packed, and cannot load further weights. Torch's rotary embedding, because vLLM's kernel takes heads [T, heads,
channels] for tokens, and rotates each by the angle of another position."""


def _cpu_arguments(settings: EngineSettings) -> dict[str, Any]:
    return {
        "enforce_eager": settings.eager,
        "enable_chunked_prefill": False,
        "max_num_batched_tokens": max(settings.max_model_len, CPU_BATCH_TOKENS),
        "block_size": settings.block_size or CPU_BLOCK_TOKENS,
        "kv_cache_memory_bytes": kv_bytes(settings, kv_bytes_of_a_token(settings), free_memory()),
        **(CPU_LATENT if latent_numbers(_sizes(settings)) else {}),
    }


def kv_bytes_of_a_token(settings: EngineSettings) -> int:
    """Bytes that an engine on one device caches of a token in all layers."""
    text = _sizes(settings)
    heads = text.get("num_key_value_heads") or text["num_attention_heads"]
    layers, channels, latent = text["num_hidden_layers"], head_channels(text), latent_numbers(text)
    return kv_bytes_per_token(layers, heads, channels, settings.compute_dtype, latent)


def text_config(settings: EngineSettings) -> Any:
    return _model_config(settings).get_text_config()


def _model_config(settings: EngineSettings) -> Any:
    from transformers import AutoConfig

    trusted = settings.trust_remote_code
    return AutoConfig.from_pretrained(settings.model_path, trust_remote_code=trusted, **settings.model_overrides)


def _sizes(settings: EngineSettings) -> dict[str, Any]:
    """Return config.json's entries for the language model, under the common names."""
    text = text_config(settings)
    return text.to_dict() | {name: getattr(text, name) for name in text.attribute_map}  # GPT-2's n_head and the like


@contextmanager
def refusals() -> Iterator[None]:
    """Within this context, what vLLM refuses raises TrinityError, which concerns the request and not the engine."""
    from vllm.exceptions import VLLMValidationError

    try:
        yield
    except (ValueError, VLLMValidationError) as error:
        raise TrinityError(f"the engine refuses a request: {error}") from error


def check_model(model_path: str) -> None:
    """Raise `TrinityError` if a local model folder is missing or holds no model; vLLM's own message is a page long."""
    path = expanded(model_path)
    if not (looks_local(model_path) or path.exists()):
        return
    if not (path / "config.json").is_file():
        fault = "has no config.json" if path.is_dir() else "does not exist"
        raise TrinityError(
            f"model.model_path: the folder {path} {fault}; give a Hugging Face model folder or a hub name",
            key="model.model_path",
        )


def check_compiler(settings: EngineSettings) -> None:
    """Raise `TrinityError` if the model is to be compiled on the CPU and there is no compiler."""
    if not settings.eager and not settings.on_gpu:
        require_compiler("explorer.rollout_model.enforce_eager is false", "leave enforce_eager out")


def tokens_prompt(tokens: list[int]) -> Any:
    """Return vLLM's prompt of token ids, in the form that needs no renderer and its thread."""
    return {"type": "token", "prompt_token_ids": tokens}


def sampling_params(request: Request) -> SamplingParams:
    """Return vLLM's parameters of a request, without text decoding and hence without stop strings.

    Decoding token by token costs two thirds of a small model's speed; the explorer decodes whole responses at once.
    """
    from vllm import SamplingParams
    from vllm.sampling_params import RequestOutputKind, StructuredOutputsParams

    wanted = request.sampling
    if request.params is not None:
        params: SamplingParams = request.params.clone()
        params.max_tokens, params.min_tokens = wanted.max_tokens, wanted.min_tokens
        params.logprobs = params.logprobs or 0
        params.stop, params.detokenize, params.flat_logprobs = [], False, True
        params.output_kind, params.n, params.seed = RequestOutputKind.FINAL_ONLY, 1, request.seed
        params.extra_args = None
        return params
    return SamplingParams(
        max_tokens=wanted.max_tokens,
        min_tokens=max(wanted.min_tokens - 1, 0),  # vLLM counts the tokens before the end token
        temperature=wanted.temperature,
        top_p=wanted.top_p,
        top_k=max(wanted.top_k, 0),
        repetition_penalty=wanted.repetition_penalty,
        seed=request.seed if wanted.temperature > 0 else None,
        stop_token_ids=list(wanted.stop_token_ids),
        logprobs=0,
        flat_logprobs=True,
        detokenize=False,
        output_kind=RequestOutputKind.FINAL_ONLY,
        structured_outputs=StructuredOutputsParams(**wanted.structured_output) if wanted.structured_output else None,
        skip_clone=True,
    )


def score_params() -> SamplingParams:
    from vllm import SamplingParams
    from vllm.sampling_params import RequestOutputKind

    return SamplingParams(
        max_tokens=1,
        temperature=0.0,
        prompt_logprobs=0,
        flat_logprobs=True,
        detokenize=False,
        output_kind=RequestOutputKind.FINAL_ONLY,
    )


def prompt_logprobs(scores: Any) -> list[float]:
    """Return the log-probs of prompt tokens 1 … P-1 from vLLM's flat prompt log-probs, whose first position is
    empty."""
    return [scores.logprobs[start] for start in scores.start_indices[1:]]


def tokens_in_flight(engine: LLMEngine | AsyncLLM) -> int:
    states = list(engine.output_processor.request_states.values())
    return sum(state.detokenizer.num_output_tokens() for state in states if state.detokenizer is not None)


def sample(output: CompletionOutput, version: int) -> Sample:
    """Convert a finished output; `version` applies to tokens for which vLLM reports none (no weights loaded yet)."""
    starts = [(span.version, span.start) for span in output.weight_versions or ()]
    reason = output.finish_reason if output.finish_reason in STOP_REASONS else "abort"
    return _sample(list(output.token_ids), output.logprobs, starts, version, reason)


def sample_so_far(engine: LLMEngine | AsyncLLM, key: str, known: int, version: int) -> Sample | None:
    """Return the sample of a request in flight from token `known` on, without the newest token; None if not in flight.

    The newest token is left out because it may be the end token, which shows only once the request has ended. May be
    called while another thread steps the engine.
    """
    processor = engine.output_processor
    for number in list(processor.external_req_ids.get(key, ())):
        state = processor.request_states.get(number)
        if state is not None and state.detokenizer is not None and state.logprobs_processor is not None:
            flat: Any = state.logprobs_processor.logprobs
            tokens = list(state.detokenizer.output_token_ids)
            count = max(known, min(len(tokens), len(flat.end_indices)) - 1)
            return _sample(tokens[known:count], flat, list(state.weight_version_starts), version, "abort", known)
    return None


def _sample(
    tokens: list[int], flat: Any, starts: list[tuple[str, int]], version: int, reason: Any, first: int = 0
) -> Sample:
    """Make a sample of `tokens`, which start at token number `first`.

    `flat`: vLLM's log-probs of at least all tokens up to them; `starts`: pairs of a version and its first token.
    """
    count = len(tokens)
    versions = np.full(count, version, dtype=np.int32)
    for name, start in starts:
        if name.lstrip("-").isdigit():
            versions[max(start - first, 0) :] = int(name)
    places = flat.start_indices[first : first + count]
    width = flat.end_indices[first] - places[0] if count else 1
    return Sample(
        np.array(tokens, dtype=np.int32),
        np.fromiter((flat.logprobs[start] for start in places), dtype=np.float32, count=count),
        versions,
        reason,
        _top(flat, first, count, width) if width > 1 else None,
    )


def _top(flat: Any, first: int, count: int, width: int) -> TopLogprobs:
    """vLLM lists the sampled token of each position first, then the most likely ones, `width` in all."""
    start, end = first * width, (first + count) * width
    return TopLogprobs(
        np.array(flat.token_ids[start:end], dtype=np.int32).reshape(count, width),
        np.array(flat.logprobs[start:end], dtype=np.float32).reshape(count, width),
        np.array(flat.ranks[start:end:width], dtype=np.int32),
    )


ABORTED = Sample(np.empty(0, np.int32), np.empty(0, np.float32), np.empty(0, np.int32), "abort")
