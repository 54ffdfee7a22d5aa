"""What weight sync gets from the trainer: the policy's tensors, and the rank that publishes them."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial
from typing import TYPE_CHECKING

from torch import Tensor

from trinity_core.sync.publisher import TrainerRank
from trinity_core.sync.tensorfile import TensorSpec, spec_of
from trinity_core.training.distributed import Ranks, any_rank
from trinity_core.training.state import buffers, shape_of, weights

if TYPE_CHECKING:
    from trinity_core.training.engine import TrainingEngine


class PolicyWeights:
    """The engine's weights as `TrainerWeights`. Buffers are included."""

    def __init__(self, engine: TrainingEngine) -> None:
        self._engine = engine

    @property
    def gathers(self) -> bool:
        """True under ZeRO 3, which partitions the parameters."""
        return self._engine.settings.zero_stage == 3

    def specs(self) -> list[TensorSpec]:
        """Name, dtype and whole shape of each tensor, in order of iteration. Nothing is gathered."""
        dtype = str(self._engine.settings.dtype).removeprefix("torch.")
        trained: list[TensorSpec] = []
        first: dict[int, str] = {}
        for full_name, p in self._engine.module.named_parameters(remove_duplicate=False):
            name = full_name.removeprefix("lm.")
            tied_to = first.setdefault(id(p), name)
            trained.append(TensorSpec(name, dtype, shape_of(p, self._engine), tied_to if tied_to != name else ""))
        return trained + [spec_of(name, buffer) for name, buffer in buffers(self._engine).items()]

    def __iter__(self) -> Iterator[tuple[str, Tensor]]:
        """Name and whole tensor of each weight, also by tied names (`lm_head.weight`)."""
        return weights(self._engine, tied=True)


def trainer_rank(
    engine: TrainingEngine, ranks: Ranks, explorers_wait: Callable[[int], bool], stopping: Callable[[], bool]
) -> TrainerRank:
    """This rank as a publisher sees it. `explorers_wait` is asked on rank 0 only."""
    return TrainerRank(ranks.rank, PolicyWeights(engine), partial(any_rank, ranks=ranks), explorers_wait, stopping)
