"""The number formats of weights (`dtype`), and what follows from them."""

from __future__ import annotations

DTYPE_BYTES = {"float32": 4, "float16": 2, "bfloat16": 2}


def dtype_of(asked: str | None, on_gpu: bool) -> str:
    """The dtype that was asked for; by default (None, `auto`) bfloat16 on a GPU, float32 on the CPU."""
    if asked and asked != "auto":
        return asked
    return "bfloat16" if on_gpu else "float32"


def zero_stage_of(asked: int | None, workers: int, dtype: str, offloads: bool = False) -> int:
    """The ZeRO stage in force, by the one that was asked for: by default 0 for one worker and 2 for several.

    One worker has nothing to partition: 1 and 2 are 0 for it, unless it `offloads` the optimiser's state, which is
    DeepSpeed's, or has float16, whose loss scale is. Otherwise it is at least 2 in half precision: DeepSpeed's stage 1
    sums the gradients of micro-batches in half precision.
    """
    stage = (0 if workers == 1 else 2) if asked is None else asked
    if workers == 1 and stage < 3 and dtype != "float16" and not offloads:
        return 0
    return stage if dtype == "float32" else max(stage, 2)
