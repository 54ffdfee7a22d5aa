"""The shape of a Hugging Face model, read from its files, on which memory and compute depend; and what a part needs."""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from trinity_core.base.errors import DataError
from trinity_core.config import LoraConfig
from trinity_core.data.files import looks_local
from trinity_core.exchange.weights_digest import model_folder, safetensors_header
from trinity_core.rollout.inference.settings import head_channels, latent_numbers

UNITS = ("B", "KiB", "MiB", "GiB", "TiB")


@dataclass(frozen=True, slots=True)
class Need:
    """One item of memory or disk."""

    what: str
    bytes: int
    why: str
    """How the number is computed, such as `33,571,328 parameters × 4 bytes`."""
    spared: bool = False
    """True for memory that is used only if it is free."""
    held: bool = False
    """True for what a run holds throughout and whose size is known: weights and optimizer, an engine's share of a GPU.
    Other needs are estimated peaks."""


def total(needs: Iterable[Need]) -> int:
    return sum(need.bytes for need in needs)


def least(needs: Iterable[Need]) -> int:
    """Return the bytes of the needs that cannot be spared."""
    return sum(need.bytes for need in needs if not need.spared)


def nonzero(needs: Iterable[Need]) -> tuple[Need, ...]:
    return tuple(need for need in needs if need.bytes)


def size(count: float) -> str:
    unit = 0
    while count >= 1000 and unit < len(UNITS) - 1:
        count, unit = count / 1024, unit + 1
    return f"{count:.0f} {UNITS[unit]}" if unit < 2 else f"{count:.3g} {UNITS[unit]}"


@dataclass(frozen=True, slots=True)
class Latent:
    """Latent attention: keys and values of all heads are computed from one vector (arXiv 2405.04434, section 2.1)."""

    rank: int
    """Dimension of that vector."""
    rotary: int
    """Dimensions of a head's key that encode its position; all heads share them."""
    values: int
    """Dimension of one head's values."""
    queries: int
    """Dimension of the vector from which queries are computed; 0: queries are computed directly."""
    cached: int
    """Numbers that vLLM caches per token and layer; 0: keys and values, both with the keys' dimension."""

    @classmethod
    def of(cls, text: dict[str, Any]) -> Latent | None:
        """Read it from the language model's part of a config.json; None for other kinds of attention."""
        if not text.get("kv_lora_rank") or not text.get("qk_nope_head_dim"):
            return None
        values = text.get("v_head_dim") or int(text["hidden_size"]) // int(text["num_attention_heads"])
        rotary, queries = int(text["qk_rope_head_dim"]), int(text.get("q_lora_rank") or 0)
        return cls(int(text["kv_lora_rank"]), rotary, int(values), queries, latent_numbers(text))


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
    latent: Latent | None = None
    """None: each key head has its own values of the same dimension."""
    linear_mlps: tuple[int, int] | None = None
    """Number of layers whose MLP consists of linear layers (not so for routed experts in transformers), and the total
    dimension of these MLPs. None: all layers have one."""

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
    """Return a LoRA adapter's number of parameters; matrix names unlike those of Llama and Qwen are left out."""
    if lora is None:
        return 0
    layers, channels = shape.linear_mlps or (shape.layers, shape.layers * shape.intermediate)
    sizes = {name: shape.layers * size for name, size in attention_sizes(shape).items()}
    sizes |= dict.fromkeys(("gate_proj", "up_proj", "down_proj"), layers * shape.hidden + channels)
    return lora.lora_rank * sum(size for name, size in sizes.items() if lora.adapts(name))


def attention_sizes(shape: ModelShape) -> dict[str, int]:
    """Return inputs plus outputs of each matrix of a layer's attention."""
    hidden, latent = shape.hidden, shape.latent
    if latent is None:
        queries, keys = hidden + shape.queries, hidden + shape.keys
        return {"q_proj": queries, "k_proj": keys, "v_proj": keys, "o_proj": queries}
    values = shape.heads * latent.values
    sizes = {"q_proj": hidden + shape.queries}
    if latent.queries:
        sizes = {"q_a_proj": hidden + latent.queries, "q_b_proj": latent.queries + shape.queries}
    return sizes | {
        "kv_a_proj_with_mqa": hidden + latent.rank + latent.rotary,
        "kv_b_proj": latent.rank + shape.queries - shape.heads * latent.rotary + values,
        "o_proj": values + hidden,
    }


def base_bytes(shape: ModelShape, width: int, lora: LoraConfig | None) -> int:
    """Return the bytes of a model's own weights at `width` bytes each; with 4-bit `lora`, its layers take 4 bits."""
    if lora is None or not lora.load_in_4bit:
        return width * shape.parameters
    embeddings = shape.embedding * (1 if shape.tied else 2)
    return width * embeddings + int(NF4_BYTES * (shape.parameters - embeddings))


def shape_from(config: dict[str, Any], parameters: int) -> ModelShape | None:
    """Return the shape from a config.json, for a multimodal model that of its language model; None if incomplete."""
    text = {**config, **(config.get("text_config") or {})}
    try:
        hidden, heads = int(text["hidden_size"]), int(text["num_attention_heads"])
        experts = int(text.get("num_experts_per_tok") or 0)
        expert = text.get("moe_intermediate_size") if experts else None
        latent = Latent.of(text)
        return ModelShape(
            parameters=parameters,
            layers=int(text["num_hidden_layers"]),
            hidden=hidden,
            intermediate=experts * int(expert) if expert else int(text["intermediate_size"]) * max(experts, 1),
            heads=heads,
            kv_heads=heads if latent else int(text.get("num_key_value_heads") or heads),
            channels=head_channels(text),
            vocabulary=int(text["vocab_size"]),
            tied=bool(text.get("tie_word_embeddings", False)),
            latent=latent,
            linear_mlps=_linear_mlps(text) if experts else None,
        )
    except (KeyError, TypeError, ValueError, ZeroDivisionError):
        return None


def _linear_mlps(text: dict[str, Any]) -> tuple[int, int]:
    """Return `ModelShape.linear_mlps` of a mixture of experts: its dense first layers, and shared experts."""
    layers, expert = int(text["num_hidden_layers"]), int(text.get("moe_intermediate_size") or 0)
    dense = min(int(text.get("first_k_dense_replace") or 0), layers)
    shared = int(text.get("n_shared_experts") or 0) * expert or int(text.get("shared_expert_intermediate_size") or 0)
    return layers if shared else dense, dense * int(text.get("intermediate_size") or 0) + (layers - dense) * shared


def parameters_of(folder: Path) -> int | None:
    """Count the parameters in a folder's safetensors by their headers; None if there are none, or one is damaged."""
    files = sorted(folder.glob("*.safetensors"))
    try:
        shapes = [tensor["shape"] for file in files for tensor in safetensors_header(file).tensors.values()]
        return sum(map(math.prod, shapes)) if files else None
    except (OSError, DataError, TypeError):
        return None


BIASES_AND_NORMS: dict[str, Callable[[ModelShape], int]] = {
    "llama": lambda _: 0,
    "mistral": lambda _: 0,
    "phi3": lambda _: 0,
    "qwen2": lambda shape: shape.queries + 2 * shape.keys,  # biases of q, k and v
    "qwen3": lambda shape: 2 * shape.channels,  # norms of q and k
}
"""Parameters per layer besides matrices and two norms, by `model_type`. Tests compare them with transformers."""


def counted(config: dict[str, Any], shape: ModelShape) -> int | None:
    """Count parameters from config.json alone, for example of a hub model that is not downloaded.

    None for an architecture that is not in `BIASES_AND_NORMS`, or with biases that it does not have by default.
    """
    more = BIASES_AND_NORMS.get(str(config.get("model_type")))
    if more is None or config.get("attention_bias") or config.get("mlp_bias"):
        return None
    attention = 2 * shape.hidden * (shape.queries + shape.keys)
    layer = attention + 3 * shape.hidden * shape.intermediate + 2 * shape.hidden + more(shape)
    return shape.embedding * (1 if shape.tied else 2) + shape.layers * layer + shape.hidden


def shape_of(model: str) -> ModelShape | None:
    """Return the shape of a model, given its folder or its name in the hub's cache; None: see `why_unknown`."""
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
    """Return why `shape_of` returns None for a model."""
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
    """Return a model's folder, which need not exist; for a hub name its folder in the cache, or None."""
    return Path(model) if looks_local(model) or Path(model).exists() else model_folder(model)


def _configuration(folder: Path | None) -> dict[str, Any] | None:
    if folder is None:
        return None
    try:
        config = json.loads((folder / "config.json").read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return None
    return config if isinstance(config, dict) else None
