"""`extra_engine_args`: the further arguments of vLLM 0.32 that keep a rollout's tokens, log-probs and weights correct.

Only arguments in `SAFE` are allowed: vLLM has 250, and many change the meaning of a log-prob (`logprobs_mode`), the
source of weights (`load_format`), or the results of a restarted engine.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from trinity_core.base.errors import closest
from trinity_core.config.findings import Code


@dataclass(frozen=True, slots=True)
class EngineArg:
    """An allowed argument."""

    values: type | tuple[str, ...]
    """bool, int (at least 1), dict, or the choices."""
    on_cpu: bool = False
    """True if it is also allowed for an engine on the CPU."""
    lossy: bool = False
    """True if the engine then samples from another distribution than the trainer's, so that rollouts need a
    correction."""


FP8 = ("fp8",)
SAFE: Mapping[str, EngineArg] = {
    "quantization": EngineArg(FP8, lossy=True),
    "kv_cache_dtype": EngineArg(("auto", "fp8", "fp8_e4m3", "fp8_e5m2"), lossy=True),
    "speculative_config": EngineArg(dict),
    "enable_expert_parallel": EngineArg(bool),
    "max_num_batched_tokens": EngineArg(int),
    "enable_chunked_prefill": EngineArg(bool),
    "long_prefill_token_threshold": EngineArg(int),
    "block_size": EngineArg(int),
    "async_scheduling": EngineArg(bool),
    "disable_cascade_attn": EngineArg(bool),
    "disable_custom_all_reduce": EngineArg(bool),
    "max_cudagraph_capture_size": EngineArg(int),
    "disable_log_stats": EngineArg(bool, on_cpu=True),
}
NGRAM = ("num_speculative_tokens", "prompt_lookup_min", "prompt_lookup_max")
"""Keys of `speculative_config` besides `method`, all int."""
OWN = {
    "model": "model.model_path",
    "max_model_len": "model.max_model_len",
    "trust_remote_code": "model.trust_remote_code",
    "kv_cache_memory_bytes": "explorer.rollout_model.kv_cache_gib",
    "enable_sleep_mode": "cluster.colocate",
    "weight_transfer_config": "synchronizer.sync_method",
    "enable_lora": "model.lora_configs",
    "pipeline_parallel_size": "explorer.rollout_model.tensor_parallel_size",
    "data_parallel_size": "explorer.rollout_model.engine_num",
}
"""Arguments that are set through settings of other names."""


def faults(args: Mapping[str, Any], own: Mapping[str, Any], on_cpu: bool) -> Iterator[tuple[str, Code, str, str]]:
    """Yield (argument, code, reason, suggestion) for each argument that is not allowed.

    `own` holds the names that the section itself has; `on_cpu`: the engine is known to run on the CPU.
    """
    for name, value in args.items():
        argument = SAFE.get(name)
        if name in own or name in OWN:
            yield name, "conflict", f"has its own key: {OWN.get(name, f'explorer.rollout_model.{name}')}.", ""
        elif argument is None:
            message = f"is not among the arguments that leave rollouts right: {', '.join(SAFE)}."
            yield name, "unknown-key", message, closest(name, SAFE)
        elif on_cpu and not argument.on_cpu:
            yield name, "conflict", "is for engines on a GPU (cluster.gpu_per_node is 0).", ""
        elif why := _misfit(argument.values, value) or (name == "speculative_config" and _no_ngram(value)):
            yield name, "invalid", why, ""


def is_lossy(args: Mapping[str, Any]) -> bool:
    """True if the engine samples from another distribution than the trainer's."""
    return any(name in SAFE and SAFE[name].lossy and value != "auto" for name, value in args.items())


def _misfit(values: type | tuple[str, ...], value: Any) -> str:
    if isinstance(values, tuple):
        return "" if value in values else f"must be {' or '.join(values)}."
    if values is int:
        return "" if type(value) is int and value > 0 else "must be a whole number of at least 1."
    return "" if isinstance(value, values) else f"must be {'true or false' if values is bool else 'a mapping'}."


def _no_ngram(value: Mapping[str, Any]) -> str:
    """Return why this is not a valid speculation with n-grams from the prompt."""
    if value.get("method") != "ngram":
        return (
            "must have `method: ngram`: a draft model would keep the weights it began with, and guess worse and worse."
        )
    wrong = [
        name
        for name, argument in value.items()
        if name != "method" and (name not in NGRAM or type(argument) is not int)
    ]
    if wrong or "num_speculative_tokens" not in value:
        return f"needs num_speculative_tokens, and may have {' and '.join(NGRAM[1:])}: whole numbers, and nothing else."
    return ""
