"""Compiling a model's layers: one piece of code for all of them and for every length, so that starting stays short.

Between their matrix products, layers go over the same activations many times (norms, rotations, gates, and the way
back of each); compiled, these passes become few. The model keeps its structure and the names of its weights.
"""

from __future__ import annotations

from contextlib import AbstractContextManager
from typing import Any

import torch
from torch import nn

from trinity_core.compiler import require_compiler


def compile_layers(lm: nn.Module, device: torch.device) -> None:
    """Compile each decoder layer of `lm` at its first use. Raises `TrinityError` where there is no compiler."""
    if device.type == "cpu":
        require_compiler("trainer.torch_compile is true", "leave torch_compile out")
    for layer in decoder_layers(lm):
        layer.compile(dynamic=True)


def decoder_layers(lm: nn.Module) -> list[nn.Module]:
    """The repeated layers of a transformers model, which it names itself so that they are never split over devices."""
    names = set(getattr(lm, "_no_split_modules", None) or ())
    return [module for module in lm.modules() if type(module).__name__ in names]


def uncompiled() -> AbstractContextManager[Any]:
    """For a pass over a row or two, which would be compiled apart from others (sizes of 1, no gradient)."""
    return torch.compiler.set_stance("force_eager")
