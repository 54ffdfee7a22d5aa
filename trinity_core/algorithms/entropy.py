"""Entropy bonuses, written as loss terms."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Annotated, TypeAlias

from trinity_core.algorithms.aggregation import AGGREGATIONS
from trinity_core.algorithms.tensors import as_mask, require_finite
from trinity_core.base.errors import InputError
from trinity_core.base.registry import Registry
from trinity_core.base.signatures import ActsWith
from trinity_core.config.types import NonNegative

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


@dataclass
class EntropyCoefficient:
    """The coefficient of the bonus: fixed, or with `target_entropy` adapted (Skywork-OR1, arXiv 2505.22312, section
    4.3): after each batch it grows by `entropy_coef_step` if the entropy is below the target, and shrinks by it, at
    most to 0, if above. The bonus acts only after a batch at or below the target.

    Its only state are the two numbers that checkpoints store.
    """

    entropy_coef: float = 0.0
    target_entropy: float | None = None
    """Nats per token."""
    entropy_coef_step: Annotated[NonNegative, ActsWith("target_entropy")] = 0.005

    def __post_init__(self) -> None:
        self.entropy_coef = float(self.entropy_coef)
        self.acts = self.target_entropy is None
        """True if the next batch has the bonus."""

    @property
    def used(self) -> float:
        """The coefficient of the next batch."""
        return self.entropy_coef if self.acts else 0.0

    def update(self, entropy: float) -> None:
        """Adapt to the mean entropy per token of a batch."""
        if self.target_entropy is not None:
            change = self.entropy_coef_step * ((entropy < self.target_entropy) - (entropy > self.target_entropy))
            self.entropy_coef = max(self.entropy_coef + change, 0.0)
            self.acts = entropy <= self.target_entropy


ENTROPY_LOSSES: Registry[EntropyLoss] = Registry("entropy loss", functions=lambda _: (EntropyCoefficient,))
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
