"""`extra_engine_args`: the further arguments of vLLM 0.32 that keep a rollout's tokens, log-probs and weights correct.

Only arguments in `SAFE` are allowed: vLLM has 250, and many change the meaning of a log-prob (`logprobs_mode`), the
source of weights (`load_format`), or the results of a restarted engine. Their types are vLLM's own to check.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from trinity_core.base.errors import closest
from trinity_core.config.findings import Code

LOSSY: Mapping[str, tuple[str, ...]] = {
    "quantization": ("fp8",),
    "kv_cache_dtype": ("auto", "fp8", "fp8_e4m3", "fp8_e5m2"),
}
"""Arguments, with their allowed values, by which an engine samples from another distribution than the trainer's, so
that rollouts need a correction."""
ON_CPU = ("disable_log_stats",)
SAFE = (
    *LOSSY,
    *ON_CPU,
    "speculative_config",
    "enable_expert_parallel",
    "max_num_batched_tokens",
    "enable_chunked_prefill",
    "long_prefill_token_threshold",
    "block_size",
    "async_scheduling",
    "disable_cascade_attn",
    "disable_custom_all_reduce",
    "max_cudagraph_capture_size",
)
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


def gpu_alone(args: Mapping[str, Any]) -> list[str]:
    """Return the arguments that engines on the CPU do not take. They never split prompts, so may be told not to."""
    return [name for name in args if name not in ON_CPU and (name, args[name]) != ("enable_chunked_prefill", False)]


def faults(args: Mapping[str, Any], own: Mapping[str, Any], on_cpu: bool) -> Iterator[tuple[str, Code, str, str]]:
    """Yield (argument, code, reason, suggestion) for each argument that is not allowed.

    `own` holds the names that the section itself has; `on_cpu`: the engine is known to run on the CPU.
    """
    for name, value in args.items():
        if name in own or name in OWN:
            yield name, "conflict", f"has its own key: {OWN.get(name, f'explorer.rollout_model.{name}')}.", ""
        elif name not in SAFE:
            message = f"is not among the arguments that leave rollouts right: {', '.join(SAFE)}."
            yield name, "unknown-key", message, closest(name, SAFE)
        elif on_cpu and gpu_alone({name: value}):
            yield name, "conflict", "is for engines on a GPU (cluster.gpu_per_node is 0).", ""
        elif name in LOSSY and value not in LOSSY[name]:
            yield name, "invalid", f"must be {' or '.join(LOSSY[name])}.", ""
        elif name == "speculative_config" and not (isinstance(value, Mapping) and value.get("method") == "ngram"):
            message = "must have `method: ngram`: a draft model would keep the weights it began with."
            yield name, "invalid", message, ""
        elif name == "speculative_config" and value.get("rejection_sample_method", "standard") != "standard":
            yield name, "invalid", "must have no other `rejection_sample_method` than standard.", ""


def is_lossy(args: Mapping[str, Any]) -> bool:
    """True if the engine samples from another distribution than the trainer's."""
    return any(name in LOSSY and value != "auto" for name, value in args.items())
