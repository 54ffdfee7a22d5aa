"""The trainer's side of weight sync: what a publisher does, and what it is given by each rank of the trainer."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol

if TYPE_CHECKING:
    import torch

    from trinity_core.sync.digest import TensorDigest
    from trinity_core.sync.tensorfile import TensorSpec
    from trinity_core.sync.weight_check import WeightCheck


class TrainerWeights(Protocol):
    """The present weights of the policy, whole, tied names included; of a policy with an adapter, that alone."""

    @property
    def gathers(self) -> bool:
        """True if every rank must iterate in step, since each tensor is gathered from all and valid until the next."""

    def specs(self) -> list[TensorSpec]:
        """Name, dtype and whole shape of each tensor, in order of iteration. Nothing is gathered."""

    def __iter__(self) -> Iterator[tuple[str, torch.Tensor]]:
        """A fresh pass over names and tensors."""


@dataclass(frozen=True)
class TrainerRank:
    """What a publisher needs of the trainer rank that it belongs to."""

    rank: int
    weights: TrainerWeights
    any_rank: Callable[[bool], bool]
    """True on every rank if the argument is True on one. Collective."""
    explorers_wait: Callable[[int], bool]
    """True if every explorer waits for this version or a newer one, or has finished. Asked on rank 0 only."""
    stopping: Callable[[], bool]
    """True once the run has been asked to stop."""
    held: Callable[[], Mapping[str, TensorDigest]] = dict
    """The digests of tensors that engines hold already: an adapter's base. Collective at first if `weights` gathers."""


class WeightPublisher(Protocol):
    """Publishes versions of the trainer's weights by one sync method."""

    def publish(self, version: int, check: WeightCheck) -> None:
        """Publish the present weights as `version`. Collective; rank 0 writes or sends."""

    def publish_kept(self, version: int, check: WeightCheck | None, tensors: dict[str, torch.Tensor]) -> None:
        """Publish an older `version`, whose tensors rank 0 has (the others: none). Collective."""
