"""Parameters of a model whose config.json alone is there, such as one on the hub that has not been downloaded."""

from __future__ import annotations

from typing import Any

from trinity_core.runtime.outlook.model_shape import ModelShape


def _no_more(shape: ModelShape) -> int:
    return 0


def _query_key_value_biases(shape: ModelShape) -> int:
    return shape.queries + 2 * shape.keys


def _query_key_norms(shape: ModelShape) -> int:
    return 2 * shape.channels


BESIDE = {
    "llama": _no_more,
    "mistral": _no_more,
    "phi3": _no_more,
    "qwen2": _query_key_value_biases,
    "qwen3": _query_key_norms,
}
"""By `model_type`: parameters of a layer beside its matrices and two norms. Tests compare them with transformers."""


def counted(config: dict[str, Any], shape: ModelShape) -> int | None:
    """The parameters of a model with this config.json and these sizes; None for an architecture that is not in
    `BESIDE`, or with biases that it does not have by default."""
    beside = BESIDE.get(str(config.get("model_type")))
    if beside is None or config.get("attention_bias") or config.get("mlp_bias"):
        return None
    attention = 2 * shape.hidden * (shape.queries + shape.keys)
    layer = attention + 3 * shape.hidden * shape.intermediate + 2 * shape.hidden + beside(shape)
    return shape.embedding * (1 if shape.tied else 2) + shape.layers * layer + shape.hidden
