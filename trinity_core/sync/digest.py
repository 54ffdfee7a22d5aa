"""Digests of tensors: which bytes were published, and which values make up an engine's parameters.

`byte_digest` depends on every byte in order and shows that the data arrived intact. `value_digest` is a sum over the
elements, independent of their order: an engine fuses tensors, shards them, pads them with zeros and packs them for its
kernels, and the digests of the pieces still add up to those of the original tensors. It is computed on the tensor's
device, with the same result everywhere. It misses a swap of two elements within a parameter; the log-probs of the
weight check do not.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

if TYPE_CHECKING:
    import torch

CHUNK = {"cpu": 1 << 15, "cuda": 1 << 24}
"""Elements per chunk: on a CPU what fits in one core's cache, because for more, torch uses threads whose
synchronisation costs more than the work; on a GPU enough to keep it busy."""
SPREAD, MIX = -1640531535, -2048144777
"""Odd multipliers (2654435761 and 2246822519 as int32), which map distinct bit patterns to distinct values."""


class TensorDigest(NamedTuple):
    dtype: str
    """torch's name of the dtype that `values` was computed in."""
    values: int
    bytes: str = ""
    """`byte_digest`; empty for a tensor that was never on a CPU."""


def byte_digest(tensor: torch.Tensor) -> str:
    """XXH3 (64 bits) of the bytes of a contiguous tensor on the CPU, in hexadecimal."""
    import torch
    import xxhash

    return xxhash.xxh3_64_hexdigest(tensor.detach().reshape(-1).view(torch.uint8).numpy().data)


def value_digest(tensor: torch.Tensor, dtype: str = "") -> int:
    """Return the sum of a 32-bit mix of each element's bits, zero for zero. `dtype` converts float tensors first."""
    import torch

    flat = tensor.detach().reshape(-1)
    if dtype and flat.is_floating_point():
        flat = flat.to(vars(torch)[dtype])
    words = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int32}[flat.element_size()]
    total = torch.zeros((), dtype=torch.int64, device=flat.device)
    for chunk in flat.view(words).split(CHUNK[flat.device.type]):
        mixed = chunk.to(torch.int32) * SPREAD
        mixed ^= mixed >> 15
        mixed *= MIX
        total += mixed.sum(dtype=torch.int64)
    return int(total)


def digest(tensor: torch.Tensor, written: torch.Tensor | None = None, dtype: str = "") -> TensorDigest:
    """Return the digests of `tensor`. `written` is its copy on the CPU, if it was written."""
    name = dtype if dtype and tensor.is_floating_point() else str(tensor.dtype).removeprefix("torch.")
    return TensorDigest(name, value_digest(tensor, dtype), "" if written is None else byte_digest(written))
