"""Why a Hugging Face model folder cannot be loaded, found without loading its weights."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from trinity_core.base.errors import DataError
from trinity_core.data.files import remedy_of_missing
from trinity_core.exchange.weights_digest import check_length, safetensors_header, weight_files

TOKENIZERS = ("tokenizer.json", "tokenizer.model", "vocab.json", "vocab.txt", "spiece.model", "tokenizer_config.json")


def model_fault(folder: Path, speaks: bool = True) -> str:
    """Return why the Hugging Face model in a folder cannot be loaded, with a tokenizer if it `speaks`; "" if it can."""
    try:
        return _fault(folder, speaks)
    except PermissionError as error:
        return f"{error.filename} cannot be read: permission denied."


def _fault(folder: Path, speaks: bool) -> str:
    if not folder.exists():
        if str(folder).startswith("~") and folder.expanduser().exists():
            return f"write {folder.expanduser()}: `~` is not expanded in a model's path."
        return f"there is no folder {folder}; {remedy_of_missing(folder)}."
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
    tokenizers = [folder / name for name in TOKENIZERS if (folder / name).is_file()]
    for file in tokenizers if speaks else ():
        file.open().close()
    if speaks and not tokenizers:
        return f"{folder} has no tokenizer (tokenizer.json); copy it from the model that these weights come from."
    return _weights_fault(folder)


def quantization_fault(config: Mapping[str, Any], four_bits: bool = False) -> str:
    """Return why a model with this config.json cannot be trained, if its weights are quantized; "" otherwise.

    `four_bits`: it is the base of an adapter with `load_in_4bit`, which bitsandbytes may also have stored in 4 bits.
    """
    settings = config.get("quantization_config")
    if not settings:
        return ""
    method = str(settings.get("quant_method") if isinstance(settings, dict) else settings)
    if four_bits and method == "bitsandbytes":
        return ""
    return (
        f"has quantized weights (quantization_config in its config.json: {method}), which cannot be trained: give the "
        "model in bfloat16. For rollouts in 8 bits set explorer.rollout_model.extra_engine_args.quantization to fp8."
    )


def _checkpoint_hint(folder: Path) -> str:
    """Return where the model is, if the folder is that of a run."""
    converted = sorted(folder.glob("**/huggingface/config.json")) if (folder / "trainer_meta.json").is_file() else []
    return f" This is a run's folder; its latest model: {converted[-1].parent}." if converted else ""


def _weights_fault(folder: Path) -> str:
    try:
        files = weight_files(folder)
    except (OSError, ValueError, AttributeError, TypeError) as error:
        return f"{folder}: the index of its weights cannot be read: {error}."
    if not files:
        return f"{folder} has no weights (model.safetensors, or pytorch_model.bin)."
    lost = [file.name for file in files if not file.is_file()]
    if lost:
        more = f" and {len(lost) - 1} more" if len(lost) > 1 else ""
        return f"{folder} lacks {lost[0]}{more}, which its index lists; download the model again."
    return next(filter(None, map(_file_fault, files)), "")


def _file_fault(file: Path) -> str:
    """Return why a weight file is incomplete; "" if its length matches its header."""
    if file.suffix != ".safetensors":
        return "" if file.stat().st_size else f"{file} is empty; download the model again."
    try:
        check_length(file, safetensors_header(file))
    except DataError as error:
        return f"{error}."
    return ""
