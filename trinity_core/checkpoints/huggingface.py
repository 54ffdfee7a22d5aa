"""Models in Hugging Face format: where a checkpoint's is, and what identifies its weights."""

from __future__ import annotations

import hashlib
import json
from pathlib import Path
from typing import Any

from trinity_core.config import Config
from trinity_core.errors import TrinityError


def huggingface_folder(config: Config, step: int) -> Path:
    """A checkpoint's model in Hugging Face format, converted where it is not yet."""
    from trinity_core.checkpoints.convert import convert

    return convert(config.job_dir / f"global_step_{step}", Path(config.model.model_path))


def weights_digest(folder: Path) -> str:
    """SHA-256 over all tensors of a Hugging Face folder, whatever files they are in.

    Tensors are taken in the order of their names; each adds one line of text, `name dtype shape` as safetensors writes
    them (`model.norm.weight F32 [128]`), then its bytes as stored (little-endian, row-major). Raises TrinityError where
    the folder holds no tensor.
    """
    tensors: dict[str, tuple[Path, dict[str, Any], int]] = {}
    for file in folder.glob("*.safetensors"):
        with file.open("rb") as opened:
            size = int.from_bytes(opened.read(8), "little")
            header = json.loads(opened.read(size))
        header.pop("__metadata__", None)
        tensors |= {name: (file, entry, 8 + size) for name, entry in header.items()}
    if not tensors:
        raise TrinityError(f"{folder} holds no weights: there is no tensor in a .safetensors file")
    digest = hashlib.sha256()
    for name, (file, entry, start) in sorted(tensors.items()):
        begin, end = entry["data_offsets"]
        digest.update(f"{name} {entry['dtype']} {entry['shape']}\n".encode())
        with file.open("rb") as opened:
            opened.seek(start + begin)
            digest.update(opened.read(end - begin))
    return digest.hexdigest()
