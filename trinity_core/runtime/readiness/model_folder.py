"""Whether a model is there and whole, read from its files alone: no weights are loaded."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from trinity_core.config import Config
from trinity_core.data.files import looks_local
from trinity_core.local_paths import expanded
from trinity_core.runtime.readiness.hub_names import hub_obstacle
from trinity_core.runtime.readiness.obstacle import Obstacle

TOKENIZERS = ("tokenizer.json", "tokenizer.model", "vocab.json", "vocab.txt", "spiece.model", "tokenizer_config.json")
LFS = b"version https://git-lfs"
"""How the file begins that stands for one of Git LFS."""
MAX_HEADER = 100 * 2**20
"""Bytes of a safetensors header; the format's own limit."""


def missing_models(config: Config, is_first: bool) -> Iterator[Obstacle]:
    """The models that a run loads and that are not there or not whole.

    The policy's is left out unless the stage `is_first`: a later one begins with the weights of the one before. Where
    an endpoint is scored, none is loaded.
    """
    model = config.model
    if config.external_model:
        return
    named = [("model.model_path", model.model_path, True)] if is_first else []
    if named and model.critic_model_path != model.model_path and config.needs_critic:
        named.append(("model.critic_model_path", model.critic_model_path, False))
    if config.mode != "train":
        listed = enumerate(config.explorer.auxiliary_models)
        named += [(f"explorer.auxiliary_models[{i}].model_path", each.model_path, True) for i, each in listed]
    for key, path, speaks in named:
        if looks_local(path) or Path(path).exists():
            if fault := model_fault(Path(path), speaks):
                yield Obstacle(key, path, fault)
        elif obstacle := hub_obstacle(key, path, "model"):
            yield obstacle
    template = model.chat_template_path
    if template and model.custom_chat_template is None and not expanded(template).is_file():
        yield Obstacle("model.chat_template_path", template, f"there is no file {template}.")


def model_fault(folder: Path, speaks: bool = True) -> str:
    """Why the Hugging Face model in a folder cannot be loaded, with a tokenizer if it `speaks`; empty if it can."""
    if not folder.exists():
        if str(folder).startswith("~") and folder.expanduser().exists():
            return f"write {folder.expanduser()}: `~` is not expanded in a model's path."
        return f"there is no folder {folder}; check the path, and the folder that the run is started in."
    if not folder.is_dir():
        return f"{folder} is a file; give the folder that holds config.json and the weights."
    try:
        config = json.loads((folder / "config.json").read_text(encoding="utf-8"))
    except FileNotFoundError:
        return f"{folder} has no config.json; give a Hugging Face model folder.{_checkpoint_hint(folder)}"
    except (OSError, ValueError) as error:
        return f"{folder / 'config.json'} cannot be read: {error}."
    if not isinstance(config, dict) or not (config.get("model_type") or config.get("architectures")):
        return f"{folder / 'config.json'} names no model_type; it is no model's configuration."
    if speaks and not any((folder / name).is_file() for name in TOKENIZERS):
        return f"{folder} has no tokenizer (tokenizer.json); copy it from the model that these weights come from."
    return _weights_fault(folder)


def _checkpoint_hint(folder: Path) -> str:
    """Where the model is, if the folder is one of a run here."""
    found = sorted(folder.glob("**/huggingface/config.json")) if (folder / "trainer_meta.json").is_file() else []
    return f" This is a run's folder; its latest model: {found[-1].parent}." if found else ""


def _weights_fault(folder: Path) -> str:
    try:
        files = _weight_files(folder)
    except (OSError, ValueError, AttributeError, TypeError) as error:
        return f"{folder}: the index of its weights cannot be read: {error}."
    if not files:
        return f"{folder} has no weights (model.safetensors, or pytorch_model.bin)."
    lost = [file.name for file in files if not file.is_file()]
    if lost:
        more = f" and {len(lost) - 1} more" if len(lost) > 1 else ""
        return f"{folder} lacks {lost[0]}{more}, which its index lists; download the model again."
    return next(filter(None, map(_file_fault, files)), "")


def _weight_files(folder: Path) -> list[Path]:
    """The files that are loaded: those of the index, else those that are there; safetensors before others."""
    for pattern, index in (
        ("*.safetensors", "model.safetensors.index.json"),
        ("pytorch_model*.bin", "pytorch_model.bin.index.json"),
    ):
        if (folder / index).is_file():
            named: dict[str, Any] = json.loads((folder / index).read_text(encoding="utf-8"))["weight_map"]
            return sorted({folder / str(name) for name in named.values()})
        if found := sorted(folder.glob(pattern)):
            return found
    return []


def _file_fault(file: Path) -> str:
    """Why a file of weights is not whole; empty if its length is what its header says."""
    size = file.stat().st_size
    with file.open("rb") as opened:
        begins = opened.read(len(LFS))
        if begins == LFS:
            return f"{file} is a pointer of Git LFS, not the weights; run `git lfs pull` in {file.parent}."
        if file.suffix != ".safetensors":
            return "" if size else f"{file} is empty; download the model again."
        opened.seek(0)
        length = int.from_bytes(opened.read(8), "little")
        header = opened.read(length) if 0 < length <= min(MAX_HEADER, size) else b""
    try:
        ends = [each["data_offsets"][1] for name, each in json.loads(header).items() if name != "__metadata__"]
    except (ValueError, KeyError, TypeError, AttributeError, IndexError):
        return f"{file} is no safetensors file, or only the beginning of one; download the model again."
    wanted = 8 + length + max(ends, default=0)
    if size != wanted:
        return f"{file} has {size} bytes, but its header says {wanted}; download the model again."
    return ""
