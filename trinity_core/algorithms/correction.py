"""Metrics of the rollout gap, and rollout corrections: token weights that compensate for it.

The engine and the trainer compute slightly different log-probs (kernels, precision, weights that are some steps old).
With x sampled from the engine's policy mu and the trainer's policy pi before the update, the importance ratio is r =
pi(x) / mu(x). A correction turns it into a weight per token, without gradient.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal

from trinity_core.algorithms.metric_accumulator import MetricAccumulator
from trinity_core.algorithms.tensors import as_mask, clean, require_finite, row_mean, row_sum
from trinity_core.base.lazy import torch
from trinity_core.base.registry import Registry

if TYPE_CHECKING:
    from torch import Tensor

LOG_RATIO_CAP = 20.0
"""Log-ratios are clamped to +-20 before exp; the square of a larger float32 weight would overflow."""


@dataclass(frozen=True)
class Correction:
    """A named rule that computes token weights from log-ratios."""

    name: str
    function: Callable[..., Tensor]
    """(log_ratio [B, T], mask [B, T], **args) -> weights [B, T]."""
    ratio_to_rollout: bool = False
    """True if the loss uses the ratio to the sampling policy instead of weights."""

    def weights(self, old_logprobs: Tensor, rollout_logprobs: Tensor, mask: Tensor, **args: Any) -> Tensor:
        """[B, T] weights without gradient, 1 at masked tokens. Rows must be whole: some rules use sequence ratios."""
        weights = self.function(log_ratio(old_logprobs, rollout_logprobs, mask), mask, **args)
        return torch.where(mask, weights, torch.ones_like(weights))

    def __call__(
        self, old_logprobs: Tensor, rollout_logprobs: Tensor, mask: Tensor, **args: Any
    ) -> tuple[Tensor, dict[str, float]]:
        """Return weights and the metrics of the gap. Raises InputError for a NaN or infinity at an action token."""
        mask = as_mask(mask)
        require_finite(mask, old_logprobs=old_logprobs, rollout_logprobs=rollout_logprobs)
        accumulator, weights = MetricAccumulator(), self.weights(old_logprobs, rollout_logprobs, mask, **args)
        measure_gap(accumulator, old_logprobs, rollout_logprobs, mask, weights)
        return weights, accumulator.metrics()


CORRECTIONS: Registry[Correction] = Registry("rollout correction", leading=2, functions=lambda rule: (rule.function,))


def correction(name: str, ratio_to_rollout: bool = False) -> Callable[[Callable[..., Tensor]], Correction]:
    """Decorator: register a function (log_ratio, mask, **args) -> weights as `CORRECTIONS[name]`."""

    def add(function: Callable[..., Tensor]) -> Correction:
        return CORRECTIONS.register(name)(Correction(name, function, ratio_to_rollout))

    return add


def log_ratio(old_logprobs: Tensor, rollout_logprobs: Tensor, mask: Tensor) -> Tensor:
    """[B, T] log pi - log mu without gradient, 0 at masked tokens."""
    return clean(old_logprobs.detach() - rollout_logprobs.detach(), mask)


def _exp(log_weights: Tensor) -> Tensor:
    return log_weights.clamp(-LOG_RATIO_CAP, LOG_RATIO_CAP).exp()


@correction("none")
def none(log_ratio: Tensor, mask: Tensor) -> Tensor:
    """1."""
    return torch.ones_like(log_ratio)


@correction("bypass", ratio_to_rollout=True)
def bypass(log_ratio: Tensor, mask: Tensor) -> Tensor:
    """1; the loss uses the rollouts' log-probs as old ones, so that its own clip bounds pi / mu (veRL's bypass
    mode)."""
    return torch.ones_like(log_ratio)


@correction("tis_token")
def tis_token(log_ratio: Tensor, mask: Tensor, cap: float = 2.0) -> Tensor:
    """Truncated importance sampling per token: min(r_t, cap) (Yao et al. 2025, fengyao.notion.site/off-policy-rl)."""
    return _exp(log_ratio).clamp(max=cap)


@correction("tis_sequence")
def tis_sequence(log_ratio: Tensor, mask: Tensor, cap: float = 2.0) -> Tensor:
    """Truncated importance sampling per sequence: min(prod_t r_t, cap)."""
    return _exp(row_sum(log_ratio, mask)).clamp(max=cap).expand(mask.shape)


@correction("mis")
def mis(log_ratio: Tensor, mask: Tensor, cap: float = 2.0, level: Literal["sequence", "token"] = "sequence") -> Tensor:
    """Masked importance sampling: r where r <= cap, else 0 (Liu et al. 2025, "When speed kills stability").

    `level` is `sequence` (r = prod_t r_t) or `token` (r = r_t).
    """
    ratio = _exp(row_sum(log_ratio, mask) if level == "sequence" else log_ratio).expand(mask.shape)
    return torch.where(ratio <= cap, ratio, torch.zeros_like(ratio))


@correction("icepop")
def icepop(log_ratio: Tensor, mask: Tensor, low: float = 0.5, high: float = 5.0) -> Tensor:
    """r_t where low <= r_t <= high, else 0: no gradient where the two policies disagree (IcePop, arXiv 2510.18855)."""
    ratio = _exp(log_ratio)
    return torch.where((ratio >= low) & (ratio <= high), ratio, torch.zeros_like(ratio))


@correction("geometric")
def geometric(log_ratio: Tensor, mask: Tensor, low: float = 0.99, high: float = 1.01) -> Tensor:
    """1 for sequences whose geometric mean of r_t lies within [low, high], else 0: a mask that ignores length."""
    ratio = _exp(row_mean(log_ratio, mask))
    return ((ratio >= low) & (ratio <= high)).to(log_ratio.dtype).expand(mask.shape)


def measure_gap(
    accumulator: MetricAccumulator,
    old_logprobs: Tensor,
    rollout_logprobs: Tensor,
    mask: Tensor,
    weights: Tensor | None = None,
) -> None:
    """Add the gap's metrics, measured before any correction.

    `rollout_gap/mean` and `/max`: |log pi - log mu| in nats; `/k3`: r - 1 - log r, an estimate of KL(mu || pi); `/ess`:
    effective sample size of the ratios as a fraction of the tokens; with `weights` also their mean `/weight` and the
    fraction that was masked out, `/masked`.
    """
    gap = log_ratio(old_logprobs, rollout_logprobs, mask)
    held = gap.clamp(-LOG_RATIO_CAP, LOG_RATIO_CAP)
    accumulator.mean("rollout_gap/mean", gap.abs(), mask)
    accumulator.maximum("rollout_gap/max", gap.abs(), mask)
    accumulator.mean("rollout_gap/k3", torch.expm1(held) - held, mask)
    accumulator.effective_sample_size("rollout_gap/ess", held.double().exp(), mask)
    if weights is not None:
        accumulator.mean("rollout_gap/weight", weights, mask)
        accumulator.mean("rollout_gap/masked", (weights == 0).to(gap.dtype), mask)
