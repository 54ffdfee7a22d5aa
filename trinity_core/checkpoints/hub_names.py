"""Tensors by the names that a model has on the hub, which are those that vLLM loads.

In memory transformers names some otherwise, and holds all experts of a layer as one tensor: `mlp.experts.gate_up_proj`
of Mixtral is `block_sparse_moe.experts.0.w1.weight`, `….w3.weight`, … on the hub.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import torch


class HubNames:
    """The names of one model, by how transformers converts what it loads."""

    def __init__(self, config: Any) -> None:
        """`config`: transformers' configuration of the language model."""
        from transformers.conversion_mapping import get_checkpoint_conversion_mapping
        from transformers.core_model_loading import PrefixChange

        conversions = get_checkpoint_conversion_mapping(config.model_type) or []
        # Whether a prefix was there is known to the model that was read alone; vLLM takes either.
        self._conversions = [one for one in conversions if not isinstance(one, PrefixChange)]
        self._reverse = [conversion.reverse_transform() for conversion in reversed(self._conversions)]
        self._model: Any = SimpleNamespace(config=config, _weight_conversions=self._conversions)

    def tensors(self, tensors: Iterable[tuple[str, torch.Tensor]]) -> Iterator[tuple[str, torch.Tensor]]:
        """The tensors by their names on the hub. Those that have such a name are passed on; one at a time is converted,
        of which some models have many on the hub."""
        from transformers.core_model_loading import revert_weight_conversion

        for name, tensor in tensors:
            if self.name(name) == name:
                yield name, tensor
            else:
                yield from revert_weight_conversion(self._model, {name: tensor}).items()

    def name(self, name: str) -> str:
        """The name on the hub of a tensor; of experts a pattern of the first of their names."""
        loaded = _renamed(name, self._conversions)
        is_on_hub = loaded != name and _renamed(loaded, self._reverse, reverse=True) == name
        return name if is_on_hub else _renamed(name, self._reverse, reverse=True)


def _renamed(name: str, conversions: list[Any], reverse: bool = False) -> str:
    from transformers.core_model_loading import WeightConverter, WeightRenaming, rename_source_key

    renamings = [one for one in conversions if isinstance(one, WeightRenaming)]
    converters = [one for one in conversions if isinstance(one, WeightConverter)]
    return rename_source_key(name, renamings, converters, reverse=reverse)[0]
