"""Triton kernels of `logprobs.py` for CUDA: each reads a slice of logits once. Matrix products are left to cuBLAS.

A slice is [K, C] logits in the model's dtype, contiguous; K rows, C vocabulary entries from `start`. `inverse` [K] are
1 / temperature. With `TRITON_INTERPRET=1`, set before the import, they run on CPU tensors.
"""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

BLOCK = 4096
"""Logits that a program handles at once: 16 in each thread of 8 warps."""


@triton.jit
def _reduce(
    logits: tl.tensor, inverse: tl.tensor, targets: tl.tensor, peaks: tl.tensor, totals: tl.tensor,
    weighed: tl.tensor, chosen: tl.tensor, start: tl.tensor, size: tl.tensor,
    with_entropy: tl.constexpr, block: tl.constexpr,
) -> None:  # fmt: skip
    row = tl.program_id(0).to(tl.int64)
    scale = tl.load(inverse + row)
    peak, total, products = tl.load(peaks + row), tl.load(totals + row), tl.load(weighed + row)
    for first in range(0, size, block):
        column = first + tl.arange(0, block)
        inside = column < size
        z = tl.load(logits + row * size + column, mask=inside, other=-float("inf")).to(tl.float32) * scale
        higher = tl.maximum(peak, tl.max(z, 0))
        power = tl.exp(z - higher)
        shift = tl.where(total > 0, peak - higher, 0.0)
        if with_entropy:
            products = (products + shift * total) * tl.exp(shift) + tl.sum(tl.where(inside, power * (z - higher), 0), 0)
        total = total * tl.exp(shift) + tl.sum(power, 0)
        peak = higher
    tl.store(peaks + row, peak)
    tl.store(totals + row, total)
    tl.store(weighed + row, products)
    target = tl.load(targets + row) - start
    here = (target >= 0) & (target < size)
    z = tl.load(logits + row * size + target, mask=here, other=0.0).to(tl.float32) * scale
    tl.store(chosen + row, z, mask=here)


@triton.jit
def _differentiate(
    logits: tl.tensor, inverse: tl.tensor, targets: tl.tensor, log_totals: tl.tensor, constants: tl.tensor,
    g: tl.tensor, h: tl.tensor, start: tl.tensor, size: tl.tensor,
    with_entropy: tl.constexpr, block: tl.constexpr,
) -> None:  # fmt: skip
    row = tl.program_id(0).to(tl.int64)
    column = tl.program_id(1) * block + tl.arange(0, block)
    inside = column < size
    scale, upstream = tl.load(inverse + row), tl.load(g + row)
    entries = logits + row * size + column
    logprob = tl.load(entries, mask=inside, other=0.0).to(tl.float32) * scale - tl.load(log_totals + row)
    factor = tl.load(constants + row)
    if with_entropy:
        factor = factor - tl.load(h + row) * logprob
    d = tl.exp(logprob) * factor + tl.where(column == tl.load(targets + row) - start, upstream, 0.0)
    tl.store(entries, (d * scale).to(logits.dtype.element_ty), mask=inside)


def reduce_slice(
    logits: Tensor, inverse: Tensor, targets: Tensor, state: tuple[Tensor, Tensor, Tensor, Tensor], start: int,
    with_entropy: bool,
) -> None:  # fmt: skip
    """Add a slice to `state`: float32 [K] each, the maximum m, sum e^(z - m), sum e^(z - m) (z - m), and the target's
    z, where z are the logits over the temperature."""
    rows, size = logits.shape
    _reduce[(rows,)](
        logits, inverse, targets, *state, start, size, with_entropy, min(BLOCK, triton.next_power_of_2(size)),
        num_warps=8,
    )  # fmt: skip


def differentiate_slice(
    logits: Tensor, inverse: Tensor, targets: Tensor, log_total: Tensor, constant: Tensor, g: Tensor, h: Tensor | None,
    start: int,
) -> None:  # fmt: skip
    """Replace a slice by the loss's gradient of the logits: e^p (constant - h p) + g at the target, over the
    temperature, where p are log-probs; the other arguments are float32 [K]."""
    rows, size = logits.shape
    block = min(BLOCK, triton.next_power_of_2(size))
    _differentiate[(rows, triton.cdiv(size, block))](
        logits, inverse, targets, log_total, constant, g, g if h is None else h, start, size, h is not None, block,
        num_warps=8,
    )  # fmt: skip
