"""The number formats of weights (`dtype`), and settings derived from them."""

from __future__ import annotations

DTYPE_BYTES = {"float32": 4, "float16": 2, "bfloat16": 2}


def dtype_of(asked: str | None, on_gpu: bool) -> str:
    """Return the requested dtype; by default (None, `auto`) bfloat16 on a GPU, float32 on the CPU."""
    if asked and asked != "auto":
        return asked
    return "bfloat16" if on_gpu else "float32"


def zero_stage_of(asked: int | None, workers: int, dtype: str, offloads: bool = False) -> int:
    """Return the effective ZeRO stage for a requested one (None: 0 for one worker, 2 for several).

    A single worker has nothing to partition, so 1 and 2 mean 0, unless it `offloads` the optimizer's state or uses
    float16, because offloading and loss scaling are DeepSpeed's. Otherwise the stage is at least 2 in half precision:
    DeepSpeed's stage 1 sums the gradients of micro-batches in half precision.
    """
    stage = (0 if workers == 1 else 2) if asked is None else asked
    if workers == 1 and stage < 3 and dtype != "float16" and not offloads:
        return 0
    return stage if dtype == "float32" else max(stage, 2)
