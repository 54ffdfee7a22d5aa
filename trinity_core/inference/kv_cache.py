"""How large the KV cache of a CPU engine is: pure arithmetic."""

from __future__ import annotations

from trinity_core.errors import TrinityError
from trinity_core.inference.settings import CPU_BLOCK_TOKENS, EngineSettings

GIB = 1 << 30
DTYPE_BYTES = {"float32": 4, "float16": 2, "bfloat16": 2}


def kv_bytes_per_token(layers: int, kv_heads: int, channels: int, dtype: str) -> int:
    """Bytes of the keys and values of one token in all layers; `channels` are those of one head."""
    return 2 * layers * kv_heads * channels * DTYPE_BYTES[dtype]


def kv_bytes(settings: EngineSettings, per_token: int, free: int) -> int:
    """Bytes of KV cache on the CPU: `max_num_seqs` sequences of full length, at most a quarter of the free memory, at
    least one sequence. The cache is allocated at once, so it should not be larger than needed.

    `per_token` are the bytes of one token, `free` those of the machine's free memory. Raises TrinityError if one
    sequence takes more than half of them.
    """
    if settings.kv_cache_gib is not None:
        return int(settings.kv_cache_gib * GIB)
    block = settings.block_size or CPU_BLOCK_TOKENS
    tokens = -(-settings.max_model_len // block) * block
    longest = tokens * per_token
    if longest > free // 2:
        raise TrinityError(
            f"one sequence of {settings.max_model_len} tokens needs {longest / GIB:.1f} GiB of KV cache, and "
            f"{free / GIB:.1f} GiB of memory are free; lower model.max_model_len"
        )
    # vLLM keeps one block for itself.
    return max(longest, min(settings.max_num_seqs * longest, free // 4)) + block * per_token
