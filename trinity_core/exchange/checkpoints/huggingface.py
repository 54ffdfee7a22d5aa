"""The Hugging Face folder of a checkpoint, its tensors, and a digest of them."""

from __future__ import annotations

import hashlib
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import TYPE_CHECKING

from trinity_core.base.errors import DataError, TrinityError
from trinity_core.config import Config
from trinity_core.exchange.checkpoints.beginning import other_beginning

if TYPE_CHECKING:
    import torch


def huggingface_folder(config: Config, step: int, merge: bool = True) -> Path:
    """Return a checkpoint's Hugging Face folder, converting it if needed. Without `merge`, an adapter's own folder."""
    from trinity_core.exchange.checkpoints.convert import convert

    if not merge and (began := other_beginning(config.job_dir, step, config.model.model_path)) is not None:
        raise TrinityError(
            f"the checkpoint of step {step} in {config.job_dir} belongs to {began.model} as it was when the run began; "
            f"model.model_path is {config.model.model_path}: give the model that it began with",
            key="model.model_path",
        )
    return convert(config.job_dir / f"global_step_{step}", Path(config.model.model_path), merge)


def tensors_sha256(folder: Path) -> str:
    """Return the SHA-256 over all tensors of a Hugging Face folder, however they are split into files.

    Tensors are sorted by name; each contributes one line of text, `name dtype shape` as in safetensors
    (`model.norm.weight F32 [128]`), then its bytes as stored (little-endian, row-major). Raises TrinityError if the
    folder holds no tensor.
    """
    import torch
    from safetensors import safe_open

    with ExitStack() as opened:
        files = [opened.enter_context(safe_open(file, framework="pt")) for file in folder.glob("*.safetensors")]
        homes = {name: file for file in files for name in file.keys()}  # noqa: SIM118 - safe_open is no mapping
        if not homes:
            raise TrinityError(f"{folder} holds no weights: there is no tensor in a .safetensors file", key=str(folder))
        digest = hashlib.sha256()
        for name, file in sorted(homes.items(), key=lambda item: item[0]):
            stored = file.get_slice(name)
            digest.update(f"{name} {stored.get_dtype()} {stored.get_shape()}\n".encode())
            digest.update(file.get_tensor(name).reshape(-1).view(torch.uint8).numpy())
    return digest.hexdigest()


def folder_tensors(folder: Path) -> Iterator[tuple[str, torch.Tensor]]:
    """Return an iterator over the tensors of a Hugging Face folder. Raises DataError at once if it has none."""
    from trinity_core.exchange.checkpoints.convert import stored_tensors

    return stored_tensors(safetensors_files(folder))


def safetensors_files(folder: Path) -> list[Path]:
    files = sorted(folder.glob("*.safetensors"))
    if not files:
        raise DataError(f"{folder} holds no safetensors file; convert the checkpoint first", key=str(folder))
    return files
