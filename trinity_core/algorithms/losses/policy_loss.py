"""The type of a policy loss: per-token values and weights; the loss is the sum of their products.

The trainer sums (weights * values) over micro-batches; `__call__` computes the loss of a whole batch at once.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from trinity_core.algorithms.aggregation import AGGREGATIONS, Aggregation
from trinity_core.algorithms.correction import CORRECTIONS, Correction, measure_gap
from trinity_core.algorithms.metric_accumulator import MetricAccumulator, Stats
from trinity_core.algorithms.tensors import as_mask, clean, require_finite
from trinity_core.base.errors import InputError
from trinity_core.base.lazy import torch
from trinity_core.base.registry import Registry
from trinity_core.base.signatures import call_with, keywords

if TYPE_CHECKING:
    from torch import Tensor

INPUTS = ("old_logprobs", "advantages", "ref_logprobs", "rollout_logprobs", "selected", "divergences")
"""Tensors `[B, T]` that a loss may take besides `logprobs` and `mask`."""
NAMES = (*INPUTS, "is_expert", "step")
"""All inputs of a loss besides `logprobs` and `mask`: also bools `is_expert` [B], and `step`, the number of the train
step."""


@dataclass(frozen=True)
class PolicyLoss:
    name: str
    function: Callable[..., tuple[Tensor, Stats]]
    """(logprobs, mask, the inputs it names, **args) -> (values [B, T], stats). Inputs are 0 at masked tokens."""
    metric: str = "pg_loss"
    """A second metric name of the loss, besides `pg_loss`."""
    loss_agg_mode: str = "token-mean"
    weigh: Callable[..., Tensor] | None = None
    """(mask, aggregate, ...) -> weights, for losses whose weights differ from the aggregation's."""
    corrects_rollouts: bool = True
    """True if the rollout correction applies; the rollout gap is measured in any case."""
    ratio_to_rollout: bool = False
    """True if the ratio is to the sampling policy: rollout log-probs then replace the old ones, and no correction is
    applied, as it would count the gap twice."""
    scales_with_advantages: bool = False
    """True if a row whose advantages are all zero has no gradient, whatever the arguments: it can do without a backward
    pass."""
    rows_per_unit: int = 1
    """Adjacent rows that must be in one micro-batch: 2 for losses on pairs."""

    @property
    def inputs(self) -> set[str]:
        """The names in `NAMES` that the loss takes."""
        return keywords(self.function) & set(NAMES)

    def tokens(
        self, logprobs: Tensor, mask: Tensor, *, args: Mapping[str, Any] | None = None, **inputs: Any
    ) -> tuple[Tensor, Stats]:
        """Return values `[B, T]`, 0 at masked tokens, and stats to be averaged; without a check for NaNs.

        `inputs` that the loss does not take are ignored. Missing `old_logprobs` stand for the stop-gradient of
        `logprobs`. Rows may be a part of the batch (for DPO, whole pairs). Raises InputError for unknown `args`.
        """
        cleaned = {
            name: clean(value, mask) if name in INPUTS and value is not None else value
            for name, value in inputs.items()
        }
        values, stats = call_with(
            self.function, {"logprobs": clean(logprobs, mask), "mask": mask} | cleaned, args or {}
        )
        return clean(values, mask), stats

    def corrected(
        self, accumulator: MetricAccumulator, rule: Correction, rule_args: Mapping[str, Any], logprobs: Tensor,
        mask: Tensor, rollout_logprobs: Tensor | None, args: Mapping[str, Any], inputs: Mapping[str, Any],
        has_rollout: Tensor | None = None,
    ) -> Tensor:  # fmt: skip
        """Return `tokens` times the rollout correction; add stats and the rollout gap to `accumulator`.

        Expert rows (`is_expert`) have no rollout, and rows where `has_rollout` [b] is false have no rollout log-probs:
        they keep weight 1, use the ratio to the old policy, and are not measured. A loss that takes `rollout_logprobs`
        gets the old policy's for them.
        """
        is_expert, old = inputs.get("is_expert"), inputs.get("old_logprobs")
        sampled = mask if is_expert is None else mask & ~is_expert[:, None].bool()
        if has_rollout is not None:
            sampled = sampled & has_rollout[:, None]
        to_rollout = self.ratio_to_rollout or (rule.ratio_to_rollout and self.corrects_rollouts)
        old_or_present = logprobs.detach() if old is None else old
        sampler = old_or_present
        if rollout_logprobs is not None:
            sampler = torch.where(sampled, rollout_logprobs, old_or_present)
            inputs = {**inputs, "old_logprobs": sampler} if to_rollout else inputs
        values, stats = self.tokens(logprobs, mask, args=args, **{**inputs, "rollout_logprobs": sampler})
        accumulator.means(stats)
        if rollout_logprobs is None:
            return values
        old = old_or_present
        if to_rollout or not self.corrects_rollouts:
            measure_gap(accumulator, old, rollout_logprobs, sampled)
            return values
        weights = rule.weights(old, rollout_logprobs, sampled, **rule_args)
        measure_gap(accumulator, old, rollout_logprobs, sampled, weights)
        return values * weights.to(values.dtype)

    def weights(
        self,
        mask: Tensor,
        *,
        loss_agg_mode: str | None = None,
        loss_agg_mode_args: Mapping[str, Any] | None = None,
        args: Mapping[str, Any] | None = None,
        dtype: torch.dtype | None = None,
        **inputs: Any,
    ) -> Tensor:
        """Return `[B, T]` weights from the mask of the whole batch, so that the loss is (weights * values).sum()."""
        rule = AGGREGATIONS.resolve(loss_agg_mode or self.loss_agg_mode)

        def aggregate(part: Tensor, rule: Aggregation = rule) -> Tensor:
            return rule.weights(part, dtype=dtype, **(loss_agg_mode_args or {}))

        if self.weigh is None:
            return aggregate(mask)
        arguments = {name: value for name, value in (args or {}).items() if name in keywords(self.weigh)}
        return call_with(self.weigh, {"mask": mask, "aggregate": aggregate} | inputs, arguments)

    def __call__(
        self,
        *,
        logprobs: Tensor,
        mask: Tensor,
        rollout_logprobs: Tensor | None = None,
        rollout_correction: str = "tis_token",
        rollout_correction_args: Mapping[str, Any] | None = None,
        loss_agg_mode: str | None = None,
        loss_agg_mode_args: Mapping[str, Any] | None = None,
        **rest: Any,
    ) -> tuple[Tensor, dict[str, float]]:
        """Return the scalar loss of a whole batch and its metrics.

        Tensors and `step` in `rest` are the loss's inputs, all others its arguments. With `rollout_logprobs`, the
        rollout correction is applied and the rollout gap reported. Raises InputError for NaNs, infinities and wrong
        shapes at action tokens.
        """
        mask = as_mask(mask)
        inputs = {name: value for name, value in rest.items() if name in NAMES}
        args = {name: value for name, value in rest.items() if name not in NAMES}
        self._check(mask, logprobs, rollout_logprobs, inputs)
        accumulator, rule = MetricAccumulator(), CORRECTIONS.resolve(rollout_correction)
        values = self.corrected(
            accumulator, rule, rollout_correction_args or {}, logprobs, mask, rollout_logprobs, args, inputs
        )
        weights = self.weights(
            mask,
            loss_agg_mode=loss_agg_mode,
            loss_agg_mode_args=loss_agg_mode_args,
            args=args,
            dtype=values.dtype,
            **inputs,
        )
        loss = (weights * values).sum()
        accumulator.total("pg_loss", loss)
        accumulator.total(self.metric, loss) if self.metric != "pg_loss" else None
        return loss, accumulator.metrics()

    def _check(self, mask: Tensor, logprobs: Tensor, rollout: Tensor | None, inputs: dict[str, Any]) -> None:
        """Raise InputError unless every tensor has the mask's shape and is finite at action tokens."""
        is_expert = inputs.get("is_expert")
        if is_expert is None and "is_expert" in self.inputs:
            raise InputError(f"the policy loss '{self.name}' needs is_expert [B]", key="is_expert")
        if is_expert is not None and is_expert.shape != mask.shape[:1]:
            raise InputError(
                f"is_expert has shape {tuple(is_expert.shape)}, but there are {mask.shape[0]} rows", key="is_expert"
            )
        require_finite(mask, logprobs=logprobs)
        sampled = mask if is_expert is None else mask & ~is_expert[:, None].bool()
        tensors = {name: inputs.get(name) for name in INPUTS if name in self.inputs}
        require_finite(sampled, **(tensors | {"rollout_logprobs": rollout}))


POLICY_LOSSES: Registry[PolicyLoss] = Registry(
    "policy loss", inputs=("logprobs", "mask", *NAMES), functions=lambda loss: (loss.function,)
)


def policy_loss(name: str, **options: Any) -> Callable[[Callable[..., tuple[Tensor, Stats]]], PolicyLoss]:
    """Decorator: register a per-token function as `POLICY_LOSSES[name]`; `options` are PolicyLoss's fields."""

    def add(function: Callable[..., tuple[Tensor, Stats]]) -> PolicyLoss:
        return POLICY_LOSSES.register(name)(PolicyLoss(name, function, **options))

    return add


def log_ratio_to(old_logprobs: Tensor | None, logprobs: Tensor, cap: float = 20.0) -> Tensor:
    """Return log pi - log pi_old, clamped to +-cap. Without `old_logprobs` it is 0 with the gradient of log pi."""
    if old_logprobs is None:
        return logprobs - logprobs.detach()
    return (logprobs - old_logprobs).clamp(-cap, cap)


def ratio_to(old_logprobs: Tensor | None, logprobs: Tensor, cap: float = 20.0) -> Tensor:
    """Return pi / pi_old. Without `old_logprobs` it is 1 with the gradient of log pi, and no exp is computed."""
    log_ratio = log_ratio_to(old_logprobs, logprobs, cap)
    return 1 + log_ratio if old_logprobs is None else log_ratio.exp()


def clip_ranges(clip_range: float, clip_range_low: float | None, clip_range_high: float | None) -> tuple[float, float]:
    """Return (low, high); either defaults to `clip_range`."""
    return (
        clip_range if clip_range_low is None else clip_range_low,
        clip_range if clip_range_high is None else clip_range_high,
    )


def clip_bounds(clip_range: float, clip_range_low: float | None, clip_range_high: float | None) -> tuple[float, float]:
    low, high = clip_ranges(clip_range, clip_range_low, clip_range_high)
    return 1 - low, 1 + high
