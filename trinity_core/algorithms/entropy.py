"""Entropy bonuses, written as loss terms."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, TypeAlias

from trinity_core.algorithms.aggregation import AGGREGATIONS
from trinity_core.algorithms.tensors import as_mask, require_finite
from trinity_core.errors import InputError
from trinity_core.registry import Registry

if TYPE_CHECKING:
    from torch import Tensor

Select: TypeAlias = "Callable[[Tensor, Tensor | None], Tensor]"


@dataclass(frozen=True)
class EntropyLoss:
    """A selection of tokens whose entropy counts; calling it returns -entropy_coef * aggregate(entropy) and the
    metric."""

    name: str
    select: Select
    """(mask [B, T], is_expert [B] or None) -> mask [B, T] of the tokens that count."""

    def __call__(
        self,
        entropy: Tensor,
        mask: Tensor,
        is_expert: Tensor | None = None,
        entropy_coef: float = 0.0,
        loss_agg_mode: str = "token-mean",
    ) -> tuple[Tensor, dict[str, float]]:
        """`entropy` [B, T] in nats. The metric `entropy_loss` is the aggregated entropy itself, without coefficient."""
        mask = as_mask(mask)
        require_finite(mask, entropy=entropy)
        value = AGGREGATIONS[loss_agg_mode](entropy, self.select(mask, is_expert))
        return -entropy_coef * value, {} if self.name == "none" else {"entropy_loss": float(value.detach())}


def entropy_bonus(entropy_coef: float = 0.0) -> float:
    """Return the coefficient; the signature defines the arguments of every entropy loss."""
    return float(entropy_coef)


ENTROPY_LOSSES: Registry[EntropyLoss] = Registry("entropy loss", functions=lambda _: (entropy_bonus,))
"""`default` (also `basic`): all action tokens; `mix`: those the policy sampled, not the expert's; `none`."""


def entropy_loss(name: str) -> Callable[[Select], Select]:
    """Decorator: register a selection of tokens as `ENTROPY_LOSSES[name]`."""

    def add(select: Select) -> Select:
        ENTROPY_LOSSES.register(name)(EntropyLoss(name, select))
        return select

    return add


@entropy_loss("none")
def _no_tokens(mask: Tensor, is_expert: Tensor | None) -> Tensor:
    return mask & False


@entropy_loss("basic")
@entropy_loss("default")
def _all_tokens(mask: Tensor, is_expert: Tensor | None) -> Tensor:
    return mask


@entropy_loss("mix")
def _non_expert_tokens(mask: Tensor, is_expert: Tensor | None) -> Tensor:
    if is_expert is None:
        raise InputError("the entropy loss 'mix' needs is_expert [B]", key="is_expert")
    return mask & ~is_expert[:, None].bool()
