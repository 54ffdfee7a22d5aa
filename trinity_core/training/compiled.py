"""Compiles a model's decoder layers: one compilation for all layers and lengths, to keep the start short.

Between matrix products a layer makes many passes over its activations (norms, rotary embeddings, gates, and their
backward passes); compilation fuses them. The model keeps its structure and the names of its weights.
"""

from __future__ import annotations

from contextlib import AbstractContextManager
from typing import Any

import torch
from torch import nn

from trinity_core.compiler import prepare_to_compile


def compile_layers(lm: nn.Module, device: torch.device) -> None:
    """Compile each decoder layer of `lm` at its first use. Raises `TrinityError` without a C++ compiler."""
    if device.type == "cpu":
        prepare_to_compile("trainer.torch_compile is true", "leave torch_compile out")
    for layer in decoder_layers(lm):
        layer.compile(dynamic=True)


def decoder_layers(lm: nn.Module) -> list[nn.Module]:
    """The repeated layers of a transformers model, as named by its `_no_split_modules`."""
    names = set(getattr(lm, "_no_split_modules", None) or ())
    return [module for module in lm.modules() if type(module).__name__ in names]


def uncompiled() -> AbstractContextManager[Any]:
    """A context for passes over a row or two, which would otherwise cause a compilation of their own."""
    return torch.compiler.set_stance("force_eager")
