"""A file of tensors in safetensors format, written to and read from mapped memory without extra copies; digests.

The format (github.com/huggingface/safetensors): 8 bytes little-endian header length, a JSON header `{name: {"dtype",
"shape", "data_offsets": [begin, end]}}` padded with spaces, then the data.

The `safetensors` library cannot replace this file: `serialize` and `serialize_file` need all tensors at once and
allocate new memory, `deserialize` copies, and the mapping of `safe_open` does not keep the slot's lock (see `memory`).

`value_digest` is a sum over the elements, independent of their order: an engine fuses tensors, shards them, pads them
with zeros and packs them for its kernels, and the digests of the pieces still add up to those of the original tensors.
It is computed on the tensor's device, with the same result everywhere. It misses a swap of two elements within a
parameter; the log-probs of the weight check do not.
"""

from __future__ import annotations

import json
import mmap
import os
import warnings
from collections.abc import Collection, Iterable, Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING, NamedTuple

from trinity_core.base.errors import DataError

if TYPE_CHECKING:
    import torch


CHUNK = {"cpu": 1 << 15, "cuda": 1 << 24}
"""Elements per chunk: on a CPU what fits in one core's cache, because for more, torch uses threads whose
synchronisation costs more than the work; on a GPU enough to keep it busy."""
SPREAD, MIX = -1640531535, -2048144777
"""Odd multipliers (2654435761 and 2246822519 as int32). Each maps distinct int32 to distinct ones. The shift between
them keeps the sign, so two patterns of 32 bits may have the same mix; each of 16 bits has its own."""


class TensorDigest(NamedTuple):
    dtype: str
    """torch's name of the dtype that `values` was computed in."""
    values: int
    written: bool = False
    """True if the version has the tensor; False if it only reached the engines, or they had it."""


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


def digest(tensor: torch.Tensor, dtype: str = "", written: bool = False) -> TensorDigest:
    """Return the digest of `tensor`; `dtype` converts a float tensor first."""
    name = dtype if dtype and tensor.is_floating_point() else str(tensor.dtype).removeprefix("torch.")
    return TensorDigest(name, value_digest(tensor, dtype), written)


ALIGNMENT = 64
"""Alignment of the data in bytes (a cache line). Wide dtypes come first, which aligns all tensors."""


class TensorSpec(NamedTuple):
    """What the layout needs to know about a tensor; `dtype` is its name in torch ("bfloat16")."""

    name: str
    dtype: str
    shape: tuple[int, ...]
    same_as: str = ""
    """Name of the earlier tensor that this one is tied to."""


@dataclass(frozen=True)
class Layout:
    """Header and offsets of a file; equal layouts have equal headers."""

    header: bytes
    offsets: dict[str, tuple[int, int]]
    """Absolute begin and end offset of each tensor."""
    specs: dict[str, TensorSpec]
    size: int


_CODES = {
    "float64": "F64", "float32": "F32", "float16": "F16", "bfloat16": "BF16", "float8_e4m3fn": "F8_E4M3",
    "float8_e5m2": "F8_E5M2", "int64": "I64", "int32": "I32", "int16": "I16", "int8": "I8", "uint8": "U8",
    "bool": "BOOL",
}  # fmt: skip
_WIDTHS = {"F64": 8, "F32": 4, "F16": 2, "BF16": 2, "F8_E4M3": 1, "F8_E5M2": 1, "I64": 8, "I32": 4, "I16": 2, "I8": 1,
           "U8": 1, "BOOL": 1}  # fmt: skip
_NAMES = {code: name for name, code in _CODES.items()}


def spec_of(name: str, tensor: torch.Tensor) -> TensorSpec:
    return TensorSpec(name, str(tensor.dtype).removeprefix("torch."), tuple(tensor.shape))


def plan(specs: Iterable[TensorSpec]) -> Layout:
    """Lay out `specs` with wide dtypes first, which aligns every tensor without the gaps that the format forbids.

    Raises DataError for a dtype that the format does not have, or a repeated name.
    """
    by_name: dict[str, TensorSpec] = {}
    for spec in specs:
        if spec.name in by_name:
            raise DataError(f"the tensor {spec.name} was given twice")
        if spec.dtype not in _CODES:
            raise DataError(f"the tensor {spec.name} has dtype {spec.dtype}, which safetensors cannot hold")
        by_name[spec.name] = TensorSpec(spec.name, spec.dtype, tuple(spec.shape))
    entries: dict[str, object] = {"__metadata__": {"format": "pt"}}
    relative: dict[str, tuple[int, int]] = {}
    end = 0
    for spec in sorted(by_name.values(), key=lambda s: -_WIDTHS[_CODES[s.dtype]]):
        begin, width = end, _WIDTHS[_CODES[spec.dtype]]
        for extent in spec.shape:
            width *= extent
        end = begin + width
        relative[spec.name] = (begin, end)
        entries[spec.name] = {"dtype": _CODES[spec.dtype], "shape": list(spec.shape), "data_offsets": [begin, end]}
    text = json.dumps(entries, separators=(",", ":")).encode()
    text += b" " * (-(8 + len(text)) % ALIGNMENT)
    header = len(text).to_bytes(8, "little") + text
    base = len(header)
    offsets = {name: (base + a, base + b) for name, (a, b) in relative.items()}
    return Layout(header, offsets, by_name, base + end)


def read_layout(buffer: mmap.mmap) -> Layout:
    """Return the layout of a mapped file. Raises DataError if it is truncated or not a safetensors file."""
    length = int.from_bytes(buffer[:8], "little")
    try:
        entries = json.loads(buffer[8 : 8 + length])
        entries.pop("__metadata__", None)
        specs = {n: TensorSpec(n, _NAMES[e["dtype"]], tuple(e["shape"])) for n, e in entries.items()}
        offsets = {
            n: (8 + length + e["data_offsets"][0], 8 + length + e["data_offsets"][1]) for n, e in entries.items()
        }
    except (ValueError, KeyError, TypeError, AttributeError, IndexError) as error:
        raise DataError(f"not a safetensors file, or one cut short: {error!r}") from error
    size = max((end for _, end in offsets.values()), default=8 + length)
    if size > len(buffer):
        raise DataError(f"a safetensors file of {size} bytes is cut short at {len(buffer)}")
    return Layout(bytes(buffer[: 8 + length]), offsets, specs, size)


def views(buffer: mmap.mmap, layout: Layout) -> Iterator[tuple[str, torch.Tensor]]:
    """Yield each tensor as a view of `buffer`, in layout order. A view keeps the buffer and its file lock alive."""
    import torch

    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="The given buffer is not writable")
        whole = torch.frombuffer(buffer, dtype=torch.uint8)
    for name, (begin, end) in layout.offsets.items():
        spec = layout.specs[name]
        dtype: torch.dtype = vars(torch)[spec.dtype]
        flat = whole[begin:end].view(dtype) if end > begin else torch.empty(0, dtype=dtype)
        yield name, flat.view(spec.shape)


def fill(
    buffer: mmap.mmap, layout: Layout, tensors: Iterable[tuple[str, torch.Tensor]], dtype: str = ""
) -> dict[str, TensorDigest]:
    """Write the header and all `tensors` (any order, any device) to their places, and return their digests, of float
    tensors as converted to `dtype`.

    Raises DataError if a tensor is missing, unknown, or has another shape or dtype than the layout.
    """
    places = dict(views(buffer, layout))
    digests = {}
    buffer[: len(layout.header)] = layout.header
    for name, tensor in tensors:
        _check(layout, name, tensor, name in places)
        places.pop(name).copy_(tensor.detach())
        digests[name] = digest(tensor, dtype, written=True)
    _check_all_came(places)
    return digests


def write(
    handle: int, layout: Layout, tensors: Iterable[tuple[str, torch.Tensor]], dtype: str = ""
) -> dict[str, TensorDigest]:
    """Like `fill` for a file on disk (descriptor `handle`), by plain writes, so that a full disk raises OSError."""
    import torch

    missing, digests = set(layout.specs), {}
    _write_all(handle, memoryview(layout.header), 0)
    for name, tensor in tensors:
        _check(layout, name, tensor, name in missing)
        missing.remove(name)
        flat = tensor.detach().cpu().contiguous().reshape(-1).view(torch.uint8)
        if flat.numel():
            _write_all(handle, flat.numpy().data, layout.offsets[name][0])
        digests[name] = digest(tensor, dtype, written=True)
    _check_all_came(missing)
    return digests


def _write_all(handle: int, data: memoryview, offset: int) -> None:
    while data:
        written = os.pwrite(handle, data[: 1 << 30], offset)
        data, offset = data[written:], offset + written


def _check(layout: Layout, name: str, tensor: torch.Tensor, expected: bool) -> None:
    if not expected:
        raise DataError(f"the tensor {name} is not in the layout, or came twice")
    if spec_of(name, tensor) != layout.specs[name]:
        raise DataError(f"the tensor {name} is {spec_of(name, tensor)[1:]}, the layout says {layout.specs[name][1:]}")


def _check_all_came(missing: Collection[str]) -> None:
    if missing:
        raise DataError(f"{len(missing)} tensors of the layout are missing, {next(iter(missing))} among them")
