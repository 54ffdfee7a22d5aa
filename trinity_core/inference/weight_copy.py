"""New weights for a running model, at the cost of copying them.

vLLM's own reload sends every tensor through its loaders and builds every module anew: for a small model three times the
work of copying the tensors and preparing them for the kernels. On the CPU each parameter of an unquantised model is the
tensors of some names end to end. `Reloader` watches vLLM reload once, and compares what it made of every tensor with
what this rule makes of it. Where all are equal it copies by itself from then on; otherwise vLLM goes on doing it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

Tensors = Mapping[str, Tensor]


@dataclass(frozen=True, slots=True)
class Filled:
    """A module, and what fills each of its parameters."""

    module: Any
    sources: dict[str, tuple[str, ...]]
    """For each parameter the names of the tensors that it is made of."""
    loaded: dict[str, Tensor]
    """What each parameter is like (on the device `meta`) before vLLM prepares it for its kernels."""
    prepared: bool
    """Whether vLLM prepares this module's weight; it may keep nothing but the result."""

    def fill(self, tensors: Tensors) -> None:
        """Give the module the weights in `tensors`."""
        kept = dict(self.module._parameters)
        for name, sources in self.sources.items():
            if kept[name].shape != self.loaded[name].shape:  # given up for what was prepared of it
                fresh = torch.zeros_like(self.loaded[name], device="cpu")
                self.module.register_parameter(name, nn.Parameter(fresh, requires_grad=False))
            whole, start = self.module._parameters[name].data, 0
            for part in (tensors[source] for source in sources):
                whole[start : start + len(part)].copy_(part)
                start += len(part)
        if self.prepared:
            self.module.quant_method.process_weights_after_loading(self.module)
        for name, parameter in kept.items():
            self.module.register_parameter(name, parameter)


class Reloader:
    """Gives a model on the CPU the weights of one version after another."""

    def __init__(self, model: nn.Module, vllm_reload: Callable[[Iterable[tuple[str, Tensor]]], None]) -> None:
        self._model = model
        self._vllm_reload = vllm_reload
        self._plan: list[Filled] | None = None
        self._planned_for: dict[str, torch.Size] | None = None

    def load(self, named_tensors: Iterable[tuple[str, Tensor]]) -> None:
        """Load a whole checkpoint; its tensors stay as they are meanwhile."""
        tensors = dict(named_tensors)
        shapes = {name: tensor.shape for name, tensor in tensors.items()}
        if shapes != self._planned_for:
            self._plan, self._planned_for = self._watch(tensors), shapes
        elif self._plan is None:
            self._vllm_reload(tensors.items())
        else:
            with torch.no_grad():
                for filled in self._plan:
                    filled.fill(tensors)

    def _watch(self, tensors: Tensors) -> list[Filled] | None:
        """Let vLLM reload; return how to do the same, if the rule holds for all of it."""
        names = {module: name for name, module in self._model.named_modules()}
        packed: dict[str, list[str]] = getattr(self._model, "packed_modules_mapping", {})
        plan: dict[nn.Module, Filled | None] = {}

        def prepared(module: nn.Module) -> None:
            plan[module] = _filled(names[module], module, tensors, packed, prepared=True)

        with _told_before_preparing(self._model, prepared):
            self._vllm_reload(tensors.items())
        for module, name in names.items():
            if module in plan:
                continue
            if _derives(module):
                plan[module] = None
            elif any(parameter is not None for parameter in module._parameters.values()):
                plan[module] = _filled(name, module, tensors, packed, prepared=False)
        found = [filled for filled in plan.values() if filled is not None]
        used = {source for filled in found for sources in filled.sources.values() for source in sources}
        return found if len(found) == len(plan) and used == tensors.keys() else None


def _filled(
    module_name: str, module: nn.Module, tensors: Tensors, packed: Mapping[str, list[str]], prepared: bool
) -> Filled | None:
    """How the module is filled, if its parameters hold now what the rule makes of `tensors`."""
    stem, _, leaf = module_name.rpartition(".")
    parameters = {name: p for name, p in module._parameters.items() if p is not None}
    sources = {
        name: tuple(".".join(filter(None, (stem, part, name))) for part in packed.get(leaf, [leaf]))
        for name in parameters
    }
    for name, parameter in parameters.items():
        parts = [tensors[source] for source in sources[name] if source in tensors]
        if len(parts) < len(sources[name]) or not _made_of(parameter, parts):
            return None
    loaded = {name: torch.empty_like(p, device="meta") for name, p in parameters.items()}
    return Filled(module, sources, loaded, prepared)


def _made_of(parameter: Tensor, parts: list[Tensor]) -> bool:
    """Whether `parameter` is `parts` end to end; rows beyond them (vLLM pads vocabularies) are nobody's."""
    if any(part.dim() != parameter.dim() or not part.dim() for part in parts):
        return False
    if any(part.shape[1:] != parameter.shape[1:] for part in parts) or sum(map(len, parts)) > len(parameter):
        return False
    whole = torch.cat(parts).to(parameter.dtype)
    return torch.equal(parameter[: len(whole)], whole)


@contextmanager
def _told_before_preparing(model: nn.Module, tell: Callable[[nn.Module], None]) -> Iterator[None]:
    """Meanwhile `tell` is called with every unquantised module whose weight vLLM is about to prepare."""
    from vllm.model_executor.layers.linear import UnquantizedLinearMethod
    from vllm.model_executor.layers.vocab_parallel_embedding import UnquantizedEmbeddingMethod

    known = (UnquantizedLinearMethod, UnquantizedEmbeddingMethod)
    methods: set[Any] = {getattr(module, "quant_method", None) for module in model.modules()}
    methods = {method for method in methods if type(method) in known}

    def told(method: Any) -> Callable[[nn.Module], None]:
        prepare = method.process_weights_after_loading

        def tell_and_prepare(module: nn.Module) -> None:
            tell(module)
            prepare(module)

        return tell_and_prepare

    for method in methods:
        method.process_weights_after_loading = told(method)
    try:
        yield
    finally:
        for method in methods:
            del method.process_weights_after_loading


def prepare_experts_anew(model: nn.Module) -> None:
    """Have vLLM lay out new experts for the CPU's kernels, as it did those of the start.

    Where a mixture of experts has a kernel already, vLLM's reload copies new weights as they come to where the kernel
    expects its own layout: right on GPUs, whose layout is that of the weights. Without a kernel it makes both anew.
    """
    for module in model.modules():
        method = getattr(module, "quant_method", None)
        if getattr(method, "moe_kernel", None) is not None:
            method.moe_kernel = None  # type: ignore[union-attr]


def _derives(module: nn.Module) -> bool:
    """Whether vLLM derives something from this module's weights, or from others', when they are loaded."""
    from vllm.model_executor.layers.attention import Attention

    if isinstance(module, Attention):  # scales of a quantised cache, which are not loaded here
        return getattr(module, "quant_method", None) is not None
    return getattr(module, "quant_method", None) is not None or hasattr(module, "process_weights_after_loading")
