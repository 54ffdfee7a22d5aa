"""Tensors by the names that a model has on the hub, which are those that `save_pretrained` writes and vLLM loads.

In memory transformers names some otherwise, and holds all experts of a layer as one tensor: `mlp.experts.gate_up_proj`
of Mixtral is `block_sparse_moe.experts.0.w1.weight`, `….w3.weight`, … on the hub.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any, TypeAlias

from trinity_core.errors import DataError

if TYPE_CHECKING:
    import torch

Tensors: TypeAlias = "dict[str, torch.Tensor]"


class HubNames:
    """The names of one model, by how transformers converts what it loads."""

    def __init__(self, config: Any = None, conversions: Iterable[Any] = ()) -> None:
        """Without conversions, the names in memory are those on the hub."""
        from transformers.core_model_loading import PrefixChange

        # Whether a prefix was there is known to the model that was read alone; vLLM takes either.
        kept = [conversion for conversion in conversions if not isinstance(conversion, PrefixChange)]
        reverse = [conversion.reverse_transform() for conversion in reversed(kept)]
        self._loading, self._saving = _by_kind(kept), _by_kind(reverse)
        self._model: Any = SimpleNamespace(config=config, _weight_conversions=kept)
        self._places: dict[str, tuple[str, int]] = {}

    @classmethod
    def of_config(cls, config: Any) -> HubNames:
        """`config`: transformers' configuration of the language model."""
        from transformers.conversion_mapping import get_checkpoint_conversion_mapping

        kinds = (*(config.architectures or ()), config.model_type)
        mappings = (get_checkpoint_conversion_mapping(kind) for kind in kinds)
        return cls(config, next((mapping for mapping in mappings if mapping is not None), ()))

    @classmethod
    def of_model(cls, model: Any) -> HubNames:
        """`model`: transformers', maybe without data."""
        from transformers.conversion_mapping import get_model_conversion_mapping

        return cls(model.config, get_model_conversion_mapping(model, add_legacy=False))

    def tensors(self, tensors: Iterable[tuple[str, torch.Tensor]]) -> Iterator[tuple[str, torch.Tensor]]:
        """The tensors by their names on the hub. Those that have such a name are passed on; those that are one on the
        hub are converted together, once all are there."""
        from transformers.core_model_loading import revert_weight_conversion

        waiting: dict[str, Tensors] = {}
        for name, tensor in tensors:
            on_hub, count = self._place(name)
            if not count:
                yield on_hub, tensor
                continue
            members = waiting.setdefault(on_hub, {})
            members[name] = tensor
            if len(members) == count:
                yield from revert_weight_conversion(self._model, waiting.pop(on_hub)).items()
        for on_hub, members in waiting.items():
            raise DataError(f"{on_hub} is made of several tensors, and only {', '.join(members)} is there", key=on_hub)

    def converted(
        self, tensors: Mapping[str, torch.Tensor], value_of: Callable[[str], torch.Tensor]
    ) -> tuple[Tensors, Callable[[str], torch.Tensor]]:
        """The tensors on the hub that `tensors` make, without data, and what gives the data of one.

        What makes several tensors on the hub is read once if these are asked for in turn, and held meanwhile.
        """
        groups: dict[str, list[str]] = {}
        for name in tensors:
            groups.setdefault(self.name(name), []).append(name)
        like: Tensors = {}
        sources: dict[str, list[str]] = {}
        for members in groups.values():
            for name, tensor in self.tensors((name, tensors[name].to("meta")) for name in members):
                like[name], sources[name] = tensor, members
        held: Tensors = {}

        def value(name: str) -> torch.Tensor:
            if name not in held:
                held.clear()
                held.update(self.tensors((member, value_of(member)) for member in sources[name]))
            return held.pop(name)

        return like, value

    def name(self, name: str) -> str:
        """The name on the hub of a tensor; of experts a pattern of the first of their names."""
        return self._place(name)[0]

    def _place(self, name: str) -> tuple[str, int]:
        """The name on the hub, and how many tensors in memory are converted together to it; 0 if it is only renamed."""
        if name not in self._places:
            loaded, _ = _renamed(name, self._loading)
            saved, pattern = _renamed(name, self._saving, reverse=True)
            is_on_hub = loaded != name == _renamed(loaded, self._saving, reverse=True)[0]
            if is_on_hub and _renamed(saved, self._loading)[0] != name:
                saved, pattern = name, None
            makers = (converter for converter in self._saving[1] if pattern in converter.source_patterns)
            self._places[name] = saved, next((len(maker.source_patterns) for maker in makers), 0)
        return self._places[name]


def _by_kind(conversions: list[Any]) -> tuple[list[Any], list[Any]]:
    """Those that only rename, and those that change tensors."""
    from transformers.core_model_loading import WeightConverter, WeightRenaming

    kinds = (WeightRenaming, WeightConverter)
    renamings, converters = ([one for one in conversions if isinstance(one, kind)] for kind in kinds)
    return renamings, converters


def _renamed(name: str, conversions: tuple[list[Any], list[Any]], reverse: bool = False) -> tuple[str, str | None]:
    from transformers.core_model_loading import rename_source_key

    return rename_source_key(name, *conversions, reverse=reverse)
