"""Tensors by their names on the hub, which `save_pretrained` writes and vLLM loads.

In memory, transformers renames some tensors and holds all experts of a layer as one: Mixtral's
`mlp.experts.gate_up_proj` is `block_sparse_moe.experts.0.w1.weight`, `….w3.weight`, … on the hub.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any, TypeAlias

from trinity_core.base.errors import DataError

if TYPE_CHECKING:
    import torch

Tensors: TypeAlias = "dict[str, torch.Tensor]"


class HubNames:
    """The hub names of one model, derived from transformers' conversions on loading."""

    def __init__(self, config: Any = None, conversions: Iterable[Any] = ()) -> None:
        """Without conversions, names in memory and on the hub are the same."""
        from transformers.core_model_loading import PrefixChange

        # Only the loaded model knows whether it had a prefix; vLLM accepts both.
        renames = [conversion for conversion in conversions if not isinstance(conversion, PrefixChange)]
        reverse = [conversion.reverse_transform() for conversion in reversed(renames)]
        self._loading, self._saving = _by_kind(renames), _by_kind(reverse)
        self._model: Any = SimpleNamespace(config=config, _weight_conversions=renames)
        self._places: dict[str, tuple[str, int]] = {}

    @classmethod
    def of_config(cls, config: Any) -> HubNames:
        from transformers.conversion_mapping import get_checkpoint_conversion_mapping

        kinds = (*(config.architectures or ()), config.model_type)
        mappings = (get_checkpoint_conversion_mapping(kind) for kind in kinds)
        return cls(config, next((mapping for mapping in mappings if mapping is not None), ()))

    @classmethod
    def of_model(cls, model: Any) -> HubNames:
        from transformers.conversion_mapping import get_model_conversion_mapping

        return cls(model.config, get_model_conversion_mapping(model, add_legacy=False))

    def tensors(self, tensors: Iterable[tuple[str, torch.Tensor]]) -> Iterator[tuple[str, torch.Tensor]]:
        """Yield the tensors under their hub names. Tensors that are only renamed are passed on; those that form one hub
        tensor are converted together once all are present."""
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
        """Return the hub tensors that `tensors` form, without data, and a function that returns the data of one.

        Data that forms several hub tensors is read once if these are requested in turn, and kept meanwhile.
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
        """Return a tensor's name on the hub; for experts, a pattern of the first of their names."""
        return self._place(name)[0]

    def _place(self, name: str) -> tuple[str, int]:
        """Return the hub name, and the number of in-memory tensors converted together to it; 0 if it is only
        renamed."""
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
    from transformers.core_model_loading import WeightConverter, WeightRenaming

    kinds = (WeightRenaming, WeightConverter)
    renamings, converters = (
        [conversion for conversion in conversions if isinstance(conversion, kind)] for kind in kinds
    )
    return renamings, converters


def _renamed(name: str, conversions: tuple[list[Any], list[Any]], reverse: bool = False) -> tuple[str, str | None]:
    from transformers.core_model_loading import rename_source_key

    return rename_source_key(name, *conversions, reverse=reverse)
