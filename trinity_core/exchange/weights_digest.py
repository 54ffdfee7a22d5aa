"""A quick digest of a model's weights that identifies the model of a run's reference, a score and a finished stage.

Imports no torch, because flows compute it before anything starts. The SHA-256 over all bytes is in
`exchange/checkpoints/huggingface.py`.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import dataclass
from hashlib import blake2b
from pathlib import Path
from typing import Any

from trinity_core.base.errors import DataError

SAMPLE_BYTES = 4096
"""Bytes sampled from each tensor. Training changes every element that has a gradient, so a sample of each tensor shows
it. A 70B model takes 3 MB of reads; reading all bytes would take minutes at each start."""
MAX_HEADER = 100 * 2**20
"""Maximum size of a safetensors header; the format's own limit."""
GIT_LFS = b"version https://git-lfs"
BLOCKS = 256
"""Number of samples from a weight file that is not safetensors."""


def weights_digest(model_path: str) -> str:
    """Return a digest of the weights of a folder or a cached hub model; "" if they cannot be found.

    It covers each tensor's name, type, shape and a sample of its bytes: copies of a folder, and the same weights split
    into other files, have equal digests. Configuration and tokenizer play no part. Raises DataError for a damaged
    safetensors file.
    """
    folder = model_folder(model_path)
    files = (weight_files(folder) or sorted([*folder.glob("*.pt"), *folder.glob("*.pth")])) if folder else []
    whole = [file for file in files if file.suffix == ".safetensors"]
    parts = sorted(part for file in whole for part in _tensors(file)) or [_blocks(file) for file in files]
    return blake2b(b"".join(parts), digest_size=16).hexdigest() if parts else ""


def weight_files(folder: Path) -> list[Path]:
    """Return the files that would be loaded: those in the index, else all of a format; safetensors before others."""
    for pattern, index in (
        ("*.safetensors", "model.safetensors.index.json"),
        ("pytorch_model*.bin", "pytorch_model.bin.index.json"),
    ):
        if (folder / index).is_file():
            weight_map: dict[str, Any] = json.loads((folder / index).read_text(encoding="utf-8"))["weight_map"]
            return sorted({folder / str(name) for name in weight_map.values()})
        if files := sorted(folder.glob(pattern)):
            return files
    return []


def model_folder(model_path: str) -> Path | None:
    """Return a model's folder, or the local cache's folder for a hub model; None if there is none."""
    if Path(model_path).is_dir():
        return Path(model_path)
    from huggingface_hub import constants, try_to_load_from_cache
    from huggingface_hub.errors import HFValidationError

    try:
        cached = try_to_load_from_cache(model_path, "config.json", cache_dir=constants.HF_HUB_CACHE)
    except HFValidationError:  # neither a folder nor a name
        return None
    return Path(cached).parent if isinstance(cached, str) else None


def _tensors(file: Path) -> Iterator[bytes]:
    """Yield each tensor's name, type and shape with the middle of its bytes. Raises DataError if the file is
    incomplete."""
    header = safetensors_header(file)
    check_length(file, header)
    with file.open("rb") as opened:
        for name, tensor in header.tensors.items():
            start, end = tensor["data_offsets"]
            opened.seek(header.data_start + start + max(0, (end - start - SAMPLE_BYTES) // 2))
            sample = opened.read(min(SAMPLE_BYTES, end - start))
            yield json.dumps([name, tensor["dtype"], tensor["shape"]]).encode() + sample


@dataclass(frozen=True, slots=True)
class SafetensorsHeader:
    tensors: dict[str, Any]
    """Name → `dtype`, `shape` and `data_offsets`, which count from `data_start`."""
    data_start: int


def safetensors_header(file: Path) -> SafetensorsHeader:
    """Read a safetensors file's header without checking that the tensors are present. Raises DataError."""
    size = file.stat().st_size
    with file.open("rb") as opened:
        if opened.read(len(GIT_LFS)) == GIT_LFS:
            raise DataError(f"{file} is a pointer of Git LFS, not the weights; run `git lfs pull` in {file.parent}")
        opened.seek(0)
        length = int.from_bytes(opened.read(8), "little")
        text = opened.read(length) if 0 < length <= min(MAX_HEADER, size) else b""
    try:
        tensors = {name: tensor for name, tensor in json.loads(text).items() if name != "__metadata__"}
        if all({"dtype", "shape", "data_offsets"} <= {*tensor} for tensor in tensors.values()):
            return SafetensorsHeader(tensors, 8 + length)
    except (ValueError, TypeError, AttributeError):
        pass  # as below
    raise DataError(f"{file} is no safetensors file, or only the beginning of one; download the model again")


def check_length(file: Path, header: SafetensorsHeader) -> None:
    """Raise DataError unless the file is as long as its header says: a download may have been interrupted."""
    expected = header.data_start + max((tensor["data_offsets"][1] for tensor in header.tensors.values()), default=0)
    if (size := file.stat().st_size) != expected:
        raise DataError(f"{file} has {size} bytes, but its header says {expected}; download the model again")


def _blocks(file: Path) -> bytes:
    """Return the size of a file with sampled blocks. The last block holds the checksums of torch's zip archive."""
    size = file.stat().st_size
    with file.open("rb") as opened:
        places = sorted({i * max(0, size - SAMPLE_BYTES) // BLOCKS for i in range(BLOCKS + 1)})
        blocks = [opened.read(SAMPLE_BYTES) for offset in places if opened.seek(offset) >= 0]
    return f"{file.name} {size}".encode() + b"".join(blocks)
