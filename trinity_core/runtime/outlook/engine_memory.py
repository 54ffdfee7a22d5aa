"""The peak memory of one engine: on a GPU what it is allowed, on the CPU what vLLM allocates there."""

from __future__ import annotations

from trinity_core.inference.kv_cache import DTYPE_BYTES, kv_bytes, kv_bytes_per_token
from trinity_core.inference.settings import CPU_BATCH_TOKENS, CPU_BLOCK_TOKENS, EngineSettings
from trinity_core.runtime.outlook.model_shape import ModelShape
from trinity_core.runtime.outlook.need import Need, known

FLOAT = 4
SAMPLER_COPIES = 6
"""Of the logits of a step, float32: raw, by temperature, log-probs and what these are computed with."""


def gpu_engine_needs(settings: EngineSettings, gpu_memory: int) -> tuple[Need, ...]:
    """vLLM fills its share of the GPU with KV cache."""
    share = settings.gpu_memory_utilization
    return (Need("share of the GPU", int(share * gpu_memory), f"gpu_memory_utilization {share:g}"),)


def cpu_engine_needs(
    base: Need, settings: EngineSettings, shape: ModelShape, groups: int, prompt: int, synced_width: int, free: int
) -> tuple[Need, ...]:
    """`groups` prompts of `prompt` tokens arrive at once. `synced_width` are the bytes of a published weight, 0 without
    any; `free` those of the machine's free memory. Raises TrinityError for a KV cache that does not fit.
    """
    width = DTYPE_BYTES[settings.compute_dtype]
    per_token = kv_bytes_per_token(shape.layers, shape.kv_heads, shape.channels, settings.compute_dtype)
    packed = shape.parameters + (shape.embedding if shape.tied else 0)
    sequences = settings.max_num_seqs
    tokens = prefill_tokens(sequences, groups, prompt)
    channels = 3 * (shape.hidden + shape.intermediate)
    held = width * packed
    version = synced_width * shape.parameters
    loading = f"{shape.parameters:,} × {synced_width} bytes of a version, and its weights beside the ones in use"
    return known(
        [
            base,
            Need("weights", held, f"{packed:,} parameters × {width} bytes; tied embeddings twice"),
            Need("KV cache", kv_bytes(settings, per_token, free), f"{per_token:,} bytes a token; kv_cache_gib"),
            Need("loading weights", version + held if version else 0, loading),
            Need("prefill", width * tokens * channels, f"{tokens:,} tokens at once × {channels:,} channels"),
            Need(
                "sampler", SAMPLER_COPIES * FLOAT * sequences * shape.vocabulary,
                f"{SAMPLER_COPIES} × {sequences:,} sequences × {shape.vocabulary:,} logits",
            ),
        ]
    )  # fmt: skip


def prefill_tokens(sequences: int, groups: int, prompt: int) -> int:
    """Tokens that a step prefills at most: each prompt whole once, and for the other sequences of its group the last
    block, which the prefix cache does not share."""
    firsts = min(groups, sequences)
    return min(firsts * prompt + (sequences - firsts) * min(prompt, CPU_BLOCK_TOKENS), CPU_BATCH_TOKENS)
