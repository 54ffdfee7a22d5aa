"""The models that a plan is about: where their files are, and what those say of their sizes."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

from trinity_core.data.files import looks_local
from trinity_core.runtime.outlook.model_shape import ModelShape, parameters_of, shape_from
from trinity_core.runtime.outlook.parameter_count import counted


def shape_of(model: str) -> ModelShape | None:
    """The shape of a model by its folder or its name on the hub, whose cache is read; None: see `why_unknown`."""
    folder = folder_of(model)
    config = _configuration(folder)
    if folder is None or config is None:
        return None
    stored = parameters_of(folder)
    shape = shape_from(config, stored or 0)
    if shape is None or stored is not None:
        return shape
    parameters = counted(config, shape)
    return None if parameters is None else replace(shape, parameters=parameters)


def why_unknown(model: str) -> str:
    """Why `shape_of` knows nothing of a model."""
    folder = folder_of(model)
    if folder is None:
        return f"{model} is not in the cache of the hub; its sizes are known once its config.json is"
    if not folder.exists():
        return f"there is no folder {model} yet"
    config = _configuration(folder)
    if config is None:
        return f"{model} has no config.json that can be read"
    if shape_from(config, 0) is None:
        return f"{folder / 'config.json'} does not give sizes in the words of Llama, Qwen and most others"
    return f"{model} has no safetensors, and how many parameters a {config.get('model_type')} has is not known here"


def folder_of(model: str) -> Path | None:
    """A model's folder, which need not exist; of one on the hub that in the cache, None if it is not there."""
    if looks_local(model) or Path(model).exists():
        return Path(model)
    from huggingface_hub import constants, try_to_load_from_cache
    from huggingface_hub.errors import HFValidationError

    try:
        found = try_to_load_from_cache(model, "config.json", cache_dir=constants.HF_HUB_CACHE)
    except HFValidationError:
        return None
    return Path(found).parent if isinstance(found, str) else None


def _configuration(folder: Path | None) -> dict[str, Any] | None:
    if folder is None:
        return None
    try:
        config = json.loads((folder / "config.json").read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return None
    return config if isinstance(config, dict) else None
