"""The shape of a Hugging Face model, read from its files, on which memory depends."""

from __future__ import annotations

import json
import math
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from trinity_core.base.errors import DataError
from trinity_core.config import LoraConfig
from trinity_core.data.files import looks_local
from trinity_core.exchange.weights_digest import model_folder, safetensors_header, weight_files
from trinity_core.rollout.inference.settings import head_channels, latent_numbers


@dataclass(frozen=True, slots=True)
class ModelShape:
    """Sizes of a decoder-only transformer. Parameters are counts, not bytes."""

    parameters: int
    """Number of stored parameters; tied embeddings count once."""
    layers: int
    hidden: int
    intermediate: int
    """MLP dimension that a token passes through: of all its experts together."""
    heads: int
    kv_heads: int
    channels: int
    vocabulary: int
    tied: bool
    latent: int = 0
    """Numbers that vLLM caches per token and layer for latent attention; 0: keys and values."""

    @property
    def queries(self) -> int:
        return self.heads * self.channels

    @property
    def keys(self) -> int:
        return self.kv_heads * self.channels

    @property
    def embedding(self) -> int:
        return self.vocabulary * self.hidden


NF4_BYTES = 0.52
"""Bytes per 4-bit weight, including its share of block scales (arXiv 2305.14314, section 3)."""


def adapter_parameters(shape: ModelShape, lora: LoraConfig | None) -> int:
    """Return about how many parameters a LoRA adapter has: those of matrices named as Llama's and Qwen's."""
    if lora is None:
        return 0
    queries, keys, mlp = (shape.hidden + other for other in (shape.queries, shape.keys, shape.intermediate))
    sizes = {"q_proj": queries, "k_proj": keys, "v_proj": keys, "o_proj": queries}
    sizes |= dict.fromkeys(("gate_proj", "up_proj", "down_proj"), mlp)
    return lora.lora_rank * shape.layers * sum(size for name, size in sizes.items() if lora.adapts(name))


def base_bytes(shape: ModelShape, width: int, lora: LoraConfig | None) -> int:
    """Return the bytes of a model's own weights at `width` bytes each; with 4-bit `lora`, its layers take 4 bits."""
    if lora is None or not lora.load_in_4bit:
        return width * shape.parameters
    embeddings = shape.embedding * (1 if shape.tied else 2)
    return width * embeddings + int(NF4_BYTES * (shape.parameters - embeddings))


def shape_from(config: dict[str, Any], parameters: int | None) -> ModelShape | None:
    """Return the shape by a config.json, for a multimodal model that of its language model; None if incomplete.

    Without a number of parameters, count those of the matrices and norms, which a mixture of experts does not tell.
    """
    text = {**config, **(config.get("text_config") or {})}
    try:
        hidden, heads = int(text["hidden_size"]), int(text["num_attention_heads"])
        experts = int(text.get("num_experts_per_tok") or 0)
        expert = text.get("moe_intermediate_size") if experts else None
        shape = ModelShape(
            parameters=parameters or 0,
            layers=int(text["num_hidden_layers"]),
            hidden=hidden,
            intermediate=experts * int(expert) if expert else int(text["intermediate_size"]) * max(experts, 1),
            heads=heads,
            kv_heads=heads if text.get("kv_lora_rank") else int(text.get("num_key_value_heads") or heads),
            channels=head_channels(text),
            vocabulary=int(text["vocab_size"]),
            tied=bool(text.get("tie_word_embeddings", False)),
            latent=latent_numbers(text),
        )
    except (KeyError, TypeError, ValueError, ZeroDivisionError):
        return None
    if parameters is not None:
        return shape
    attention = 2 * shape.hidden * (shape.queries + shape.keys)
    layer = attention + 3 * shape.hidden * shape.intermediate + 2 * shape.hidden
    counted = shape.embedding * (1 if shape.tied else 2) + shape.layers * layer + shape.hidden
    return None if experts or shape.latent else replace(shape, parameters=counted)


def parameters_of(folder: Path) -> int | None:
    """Count the parameters in a folder's safetensors by their headers; None if there are none, or one is damaged."""
    files = [file for file in weight_files(folder) if file.suffix == ".safetensors"]
    files = [file for file in files if not file.name.startswith("consolidated")] or files  # Mistral's other form
    try:
        shapes = [tensor["shape"] for file in files for tensor in safetensors_header(file).tensors.values()]
        return sum(map(math.prod, shapes)) if files else None
    except (OSError, DataError, TypeError):
        return None


def shape_of(model: str) -> ModelShape | None:
    """Return the shape of a model, given its folder or its name in the hub's cache; None: see `why_unknown`."""
    folder = folder_of(model)
    return None if folder is None else shape_from(configuration_of(model), parameters_of(folder))


def why_unknown(model: str) -> str:
    """Return why `shape_of` returns None for a model."""
    folder = folder_of(model)
    if folder is None or not folder.exists():
        return f"{model} is not here, nor in the cache of the hub"
    return f"{folder} has no config.json that tells its sizes in the words of Llama, Qwen and most others"


def folder_of(model: str) -> Path | None:
    """Return a model's folder, which need not exist; for a hub name its folder in the cache, or None."""
    return Path(model) if looks_local(model) or Path(model).exists() else model_folder(model)


def configuration_of(model: str) -> dict[str, Any]:
    """Return the config.json of a model, given as in `shape_of`; empty if it cannot be read."""
    folder = folder_of(model)
    try:
        config = json.loads((folder / "config.json").read_text(encoding="utf-8")) if folder else {}
    except (OSError, ValueError):
        return {}
    return config if isinstance(config, dict) else {}
