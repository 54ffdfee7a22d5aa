"""The shape of a Hugging Face model: what memory and arithmetic depend on."""

from __future__ import annotations

import json
import math
from dataclasses import dataclass
from pathlib import Path
from typing import Any

MAX_HEADER = 100 << 20
"""Bytes of a safetensors header; the format's own limit."""


@dataclass(frozen=True, slots=True)
class ModelShape:
    """The sizes of a decoder-only transformer. Parameters are numbers, not bytes."""

    parameters: int
    """All that are stored; tied embeddings once."""
    layers: int
    hidden: int
    intermediate: int
    """Channels of the MLP that a token passes through: of all its experts together."""
    heads: int
    kv_heads: int
    channels: int
    """Of one head."""
    vocabulary: int
    tied: bool
    """The output embeddings are the input embeddings."""

    @property
    def queries(self) -> int:
        """Channels of all heads of queries."""
        return self.heads * self.channels

    @property
    def keys(self) -> int:
        """Channels of all heads of keys; there are as many of values."""
        return self.kv_heads * self.channels

    @property
    def embedding(self) -> int:
        """Parameters of the output embedding."""
        return self.vocabulary * self.hidden


def shape_from(config: dict[str, Any], parameters: int) -> ModelShape | None:
    """The shape that a config.json gives; of a model with images, that of its language model. None if it gives none."""
    text = {**config, **(config.get("text_config") or {})}
    try:
        hidden, heads = int(text["hidden_size"]), int(text["num_attention_heads"])
        experts = int(text.get("num_experts_per_tok") or 0)
        expert = text.get("moe_intermediate_size") if experts else None
        return ModelShape(
            parameters=parameters,
            layers=int(text["num_hidden_layers"]),
            hidden=hidden,
            intermediate=experts * int(expert) if expert else int(text["intermediate_size"]) * max(experts, 1),
            heads=heads,
            kv_heads=int(text.get("num_key_value_heads") or heads),
            channels=int(text.get("head_dim") or hidden // heads),
            vocabulary=int(text["vocab_size"]),
            tied=bool(text.get("tie_word_embeddings", False)),
        )
    except (KeyError, TypeError, ValueError, ZeroDivisionError):
        return None


def parameters_of(folder: Path) -> int | None:
    """Parameters in a folder's safetensors, from their headers alone; None if it has none, or one is damaged."""
    files = sorted(folder.glob("*.safetensors"))
    try:
        return sum(map(_parameters, files)) if files else None
    except (OSError, ValueError, KeyError, TypeError, AttributeError):
        return None


def _parameters(file: Path) -> int:
    """Parameters in one file: its first 8 bytes are the header's length, and the header names each tensor's shape."""
    with file.open("rb") as opened:
        length = int.from_bytes(opened.read(8), "little")
        if length > MAX_HEADER:  # a pointer of Git LFS, say
            raise ValueError(f"{file} is no safetensors file")
        header = json.loads(opened.read(length))
    return sum(math.prod(each["shape"]) for name, each in header.items() if name != "__metadata__")
