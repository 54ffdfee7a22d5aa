"""Translation between vLLM's types and ours: engine arguments, sampling parameters, outputs.

Imports vllm inside functions only, so that processes without an engine can import the module.
"""

from __future__ import annotations

import logging
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from trinity_core.compiler import require_compiler
from trinity_core.errors import TrinityError
from trinity_core.inference.requests import STOP_REASONS, Request, Sample
from trinity_core.inference.settings import CPU_BATCH_TOKENS, CPU_BLOCK_TOKENS, EngineSettings

if TYPE_CHECKING:
    from vllm import SamplingParams
    from vllm.outputs import CompletionOutput
    from vllm.v1.engine.async_llm import AsyncLLM
    from vllm.v1.engine.llm_engine import LLMEngine

log = logging.getLogger(__name__)

GIB = 1 << 30
DTYPE_BYTES = {"float32": 4, "float16": 2, "bfloat16": 2}


def engine_arguments(settings: EngineSettings) -> dict[str, Any]:
    """Keyword arguments of vLLM's `EngineArgs` and `AsyncEngineArgs`."""
    arguments: dict[str, Any] = {
        "model": settings.model_path,
        "skip_tokenizer_init": True,
        "dtype": settings.compute_dtype,
        "max_model_len": settings.max_model_len,
        "max_num_seqs": settings.max_num_seqs,
        "enable_prefix_caching": settings.enable_prefix_caching,
        "trust_remote_code": settings.trust_remote_code,
        "seed": settings.seed,
        # The trainer's log-probs are log_softmax(logits / temperature). On the CPU `SeededSampler` reports the same.
        "logprobs_mode": "raw_logprobs" if settings.raw_logprobs else "processed_logprobs",
        "disable_log_stats": True,
        "worker_extension_cls": "trinity_core.inference.vllm_worker.WorkerExtension",
    }
    if settings.block_size is not None:
        arguments["block_size"] = settings.block_size
    return arguments | (_gpu_arguments(settings) if settings.on_gpu else _cpu_arguments(settings))


def _gpu_arguments(settings: EngineSettings) -> dict[str, Any]:
    arguments: dict[str, Any] = {
        "tensor_parallel_size": settings.tensor_parallel_size,
        "gpu_memory_utilization": settings.gpu_memory_utilization,
        "enforce_eager": settings.eager,
    }
    if settings.tensor_parallel_size > 1:
        arguments["distributed_executor_backend"] = "mp"
    if settings.weight_transfer:
        from vllm.config import WeightTransferConfig

        arguments["weight_transfer_config"] = WeightTransferConfig(backend=settings.weight_transfer)
    return arguments


def _cpu_arguments(settings: EngineSettings) -> dict[str, Any]:
    return {
        "enforce_eager": settings.eager,
        "enable_chunked_prefill": False,
        "max_num_batched_tokens": max(settings.max_model_len, CPU_BATCH_TOKENS),
        "block_size": settings.block_size or CPU_BLOCK_TOKENS,
        "kv_cache_memory_bytes": _kv_bytes(settings),
    }


def _kv_bytes(settings: EngineSettings) -> int:
    """Bytes of KV cache on the CPU: `max_num_seqs` sequences of full length, at most a quarter of the free memory, at
    least one sequence. The cache is allocated at once, so it should not be larger than needed."""
    import psutil

    if settings.kv_cache_gib is not None:
        return int(settings.kv_cache_gib * GIB)
    block = settings.block_size or CPU_BLOCK_TOKENS
    tokens = -(-settings.max_model_len // block) * block
    longest = tokens * _kv_bytes_per_token(settings)
    free = psutil.virtual_memory().available
    if longest > free // 2:
        raise TrinityError(
            f"one sequence of {settings.max_model_len} tokens needs {longest / GIB:.1f} GiB of KV cache, and "
            f"{free / GIB:.1f} GiB of memory are free; lower model.max_model_len"
        )
    # vLLM keeps one block for itself.
    return max(longest, min(settings.max_num_seqs * longest, free // 4)) + block * _kv_bytes_per_token(settings)


def _kv_bytes_per_token(settings: EngineSettings) -> int:
    """Bytes of the keys and values of one token in all layers."""
    from transformers import AutoConfig

    config = AutoConfig.from_pretrained(settings.model_path, trust_remote_code=settings.trust_remote_code)
    text = config.get_text_config().to_dict()
    heads = text.get("num_key_value_heads") or text["num_attention_heads"]
    channels = text.get("head_dim") or text["hidden_size"] // text["num_attention_heads"]
    return 2 * text["num_hidden_layers"] * heads * channels * DTYPE_BYTES[settings.compute_dtype]


def check_model(model_path: str) -> None:
    """Raise `TrinityError` if a local model folder is missing or holds no model; vLLM's own message is a page long."""
    path = Path(model_path).expanduser()
    looks_local = path.is_absolute() or model_path.startswith((".", "~"))
    if not (looks_local or path.exists()):
        return
    if not (path / "config.json").is_file():
        what = "has no config.json" if path.is_dir() else "does not exist"
        raise TrinityError(
            f"model.model_path: the folder {path} {what}; give a Hugging Face model folder or a hub name"
        )


def check_compiler(settings: EngineSettings) -> None:
    """Raise `TrinityError` if the model is to be compiled on the CPU and there is no compiler."""
    if not settings.eager and not settings.on_gpu:
        require_compiler("explorer.rollout_model.enforce_eager is false", "leave enforce_eager out")


def sampling_params(request: Request) -> SamplingParams:
    """vLLM's parameters of a request. The engine does not decode text: token by token that costs two thirds of a small
    model's speed, and the explorer decodes whole responses at once."""
    from vllm import SamplingParams
    from vllm.sampling_params import RequestOutputKind

    wanted = request.sampling
    return SamplingParams(
        max_tokens=wanted.max_tokens,
        min_tokens=max(wanted.min_tokens - 1, 0),  # vLLM counts the tokens before the end token
        temperature=wanted.temperature,
        top_p=wanted.top_p,
        top_k=max(wanted.top_k, 0),
        seed=request.seed if wanted.temperature > 0 else None,
        stop_token_ids=list(wanted.stop_token_ids),
        logprobs=0,
        flat_logprobs=True,
        detokenize=False,
        output_kind=RequestOutputKind.FINAL_ONLY,
        skip_clone=True,
    )


def score_params() -> SamplingParams:
    """Parameters of a request that scores its prompt."""
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
    """Log-probs of prompt tokens 1 … P-1 from vLLM's flat prompt log-probs, whose first position is empty."""
    return [scores.logprobs[start] for start in scores.start_indices[1:]]


def tokens_in_flight(engine: LLMEngine | AsyncLLM) -> int:
    """Tokens sampled so far for the requests in flight."""
    states = list(engine.output_processor.request_states.values())
    return sum(state.detokenizer.num_output_tokens() for state in states if state.detokenizer is not None)


def sample(output: CompletionOutput, version: int) -> Sample:
    """Convert a finished output; `version` applies to tokens for which vLLM reports none (no weights loaded yet)."""
    count = len(output.token_ids)
    flat: Any = output.logprobs
    versions = np.full(count, version, dtype=np.int32)
    for span in output.weight_versions or ():
        if span.version.lstrip("-").isdigit():
            versions[span.start : span.end] = int(span.version)
    reason = output.finish_reason if output.finish_reason in STOP_REASONS else "abort"
    return Sample(
        np.fromiter(output.token_ids, dtype=np.int32, count=count),
        np.fromiter((flat.logprobs[start] for start in flat.start_indices), dtype=np.float32, count=count),
        versions,
        reason,  # type: ignore[arg-type]
    )


ABORTED = Sample(np.empty(0, np.int32), np.empty(0, np.float32), np.empty(0, np.int32), "abort")
"""The sample of an aborted request."""
