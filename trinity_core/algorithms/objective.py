"""The objective of one algorithm, assembled from its parts. A batch may be divided anywhere between rows.

For each batch the trainer calls `advantages` and `weights` once on the whole batch, then `loss` on each micro-batch
(its rows, or for DPO its pairs, and its slice of the weights). The losses add up to the batch's loss. Gradients are
summed over ranks, not averaged. The trainer does not know which algorithm it runs.
"""

from __future__ import annotations

import inspect
from collections.abc import Mapping
from inspect import Parameter
from typing import TYPE_CHECKING, Any, Literal, NamedTuple

from trinity_core.algorithms.advantages import ADVANTAGES
from trinity_core.algorithms.advantages.grouping import token_rewards_of
from trinity_core.algorithms.aggregation import AGGREGATIONS
from trinity_core.algorithms.correction import CORRECTIONS
from trinity_core.algorithms.entropy import ENTROPY_LOSSES, EntropyCoefficient
from trinity_core.algorithms.kl import KL_FNS, split_kl_args
from trinity_core.algorithms.losses import POLICY_LOSSES
from trinity_core.algorithms.metric_accumulator import MetricAccumulator
from trinity_core.algorithms.tensors import as_mask, masked_mean, without_gradient
from trinity_core.base.errors import InputError
from trinity_core.base.lazy import torch
from trinity_core.base.signatures import call_with, keywords, refuse_unknown

if TYPE_CHECKING:
    from torch import Tensor

    from trinity_core.config.algorithm_types import AlgorithmType
    from trinity_core.config.schema.algorithm import AlgorithmConfig


REWARDS = ("rewards", "token_rewards")
EntropyUse = Literal["none", "metric", "loss"]


class Weights(NamedTuple):
    """`[B, T]` float32 weights of each token in the three terms of the loss."""

    policy: Tensor
    kl: Tensor
    entropy: Tensor

    def rows(self, rows: slice | Tensor) -> Weights:
        return Weights(self.policy[rows], self.kl[rows], self.entropy[rows])


class Teaching(NamedTuple):
    """How the trainer computes `divergences`, the policy's from a teacher that reads the rows' `teacher_prompt`."""

    beta: float
    """See `divergence_from_teacher`."""
    by_reference: bool
    """True if the teacher is the reference model; otherwise it is the policy of the moment."""


class Advantages(NamedTuple):
    """The result of `Objective.advantages` for the whole batch."""

    advantages: Tensor
    """[B, T] float32; 0 in excluded rows and at masked tokens."""
    metrics: dict[str, float]
    returns: Tensor | None
    """[B, T] the critic's target; None if the advantage function returns none."""
    selected: Tensor | None = None
    """[B, T] 1 at tokens that the policy loss treats apart (`kl_cov`); None if the advantage function selects none."""


class Objective:
    """The objective of a resolved algorithm section (or a bare AlgorithmType).

    The constructor raises InputError for names that do not exist and for unknown arguments of a part.
    """

    def __init__(self, spec: AlgorithmConfig | AlgorithmType) -> None:
        self.policy_loss = POLICY_LOSSES.resolve(spec.policy_loss_fn or "ppo")
        self.policy_args = dict(spec.policy_loss_fn_args or {})
        self.advantage_name = spec.advantage_fn or "none"
        self.advantage_args = dict(spec.advantage_fn_args or {})
        refuse_unknown(ADVANTAGES.resolve(self.advantage_name), self.advantage_args)
        self.kl_loss_fn = KL_FNS.resolve(spec.kl_loss_fn or "none")
        self.kl_loss, self.kl_loss_args = split_kl_args(dict(spec.kl_loss_fn_args or {}))
        self.kl_penalty_fn = KL_FNS.resolve(spec.kl_penalty_fn or "none")
        self.kl_penalty, self.kl_penalty_args = split_kl_args(dict(spec.kl_penalty_fn_args or {}))
        self.entropy_loss = ENTROPY_LOSSES.resolve(spec.entropy_loss_fn or "none")
        self.entropy_bonus: EntropyCoefficient = call_with(EntropyCoefficient, {}, spec.entropy_loss_fn_args or {})
        self.loss_agg_mode = spec.loss_agg_mode or self.policy_loss.loss_agg_mode
        self.aggregation = AGGREGATIONS.resolve(self.loss_agg_mode)
        self.loss_agg_mode_args = dict(spec.loss_agg_mode_args or {})
        self.correction = CORRECTIONS.resolve(spec.rollout_correction or "none")
        self.correction_args = dict(spec.rollout_correction_args or {})
        for part, args in (
            (self.policy_loss, self.policy_args),
            (self.kl_loss_fn, self.kl_loss_args),
            (self.kl_penalty_fn, self.kl_penalty_args),
            (self.aggregation, self.loss_agg_mode_args),
            (self.correction, self.correction_args),
        ):
            refuse_unknown(part.function, args)

    @property
    def kl_in_loss(self) -> bool:
        """True if `loss` needs ref_logprobs for its KL term."""
        return self.kl_loss_fn.name != "none" and (self.kl_loss.adaptive or self.kl_loss.kl_coef != 0)

    @property
    def kl_in_reward(self) -> bool:
        """True if `advantages` needs old_logprobs and ref_logprobs for its KL penalty."""
        return self.kl_penalty_fn.name != "none" and (self.kl_penalty.adaptive or self.kl_penalty.kl_coef != 0)

    @property
    def advantage_inputs(self) -> set[str]:
        """The parameter names of the advantage function, including its arguments."""
        return set() if self.advantage_name == "none" else keywords(ADVANTAGES.resolve(self.advantage_name))

    @property
    def teaching(self) -> Teaching | None:
        """None if the policy loss takes no `divergences`."""
        if "divergences" not in self.policy_loss.inputs:
            return None
        return Teaching(self.policy_args.get("beta", 0.0), self.policy_args.get("teacher") == "reference")

    @property
    def needs_ref_logprobs(self) -> bool:
        return self.kl_in_loss or self.kl_in_reward or "ref_logprobs" in self.policy_loss.inputs | self.advantage_inputs

    @property
    def needs_reference(self) -> bool:
        return self.needs_ref_logprobs or (self.teaching is not None and self.teaching.by_reference)

    @property
    def needs_old_logprobs(self) -> bool:
        """True if the policy loss uses old log-probs (None stands for the stop-gradient of the new ones)."""
        return "old_logprobs" in self.policy_loss.inputs

    @property
    def needs_of_rows(self) -> frozenset[str]:
        """Values that a rollout needs for an advantage: `reward` (or token rewards), `teacher_logprobs`; for
        `divergences`: `teacher_prompt`."""
        if self.advantage_name == "none":
            return frozenset({"teacher_prompt"} if self.teaching else ())
        parameters = inspect.signature(ADVANTAGES.resolve(self.advantage_name)).parameters
        taught = "teacher_logprobs" in parameters
        required = any(name in parameters and parameters[name].default is Parameter.empty for name in REWARDS)
        rewarded = required or (not taught and any(name in parameters for name in REWARDS))
        needs = {"reward": rewarded, "teacher_logprobs": taught, "teacher_prompt": self.teaching is not None}
        return frozenset(name for name, needed in needs.items() if needed)

    @property
    def entropy_use(self) -> EntropyUse:
        """What reads the policy's entropy: the loss, a metric alone, which needs no graph, or nothing."""
        if self.entropy_loss.name == "none":
            return "none"
        adapted = self.entropy_bonus.target_entropy is not None
        return "loss" if adapted or self.entropy_bonus.entropy_coef else "metric"

    def learns_from(self, mask: Tensor, advantages: Tensor) -> Tensor:
        """bool [B]: the rows that may have a gradient, given mask and advantages [B, T] of the batch; the loss of the
        others is a constant."""
        terms = self.kl_in_loss or self.entropy_use == "loss" or not self.policy_loss.scales_with_advantages
        return (mask if terms else mask & (advantages != 0)).any(-1)

    def state(self) -> dict[str, float]:
        """Return the current coefficients, for a checkpoint."""
        return {
            "kl_loss_coef": self.kl_loss.kl_coef,
            "kl_penalty_coef": self.kl_penalty.kl_coef,
            "entropy_coef": self.entropy_bonus.entropy_coef,
            "entropy_bonus_acts": float(self.entropy_bonus.acts),
        }

    def load_state(self, state: Mapping[str, float]) -> None:
        """Restore adaptive coefficients from `state`; fixed ones keep the configured value."""
        for coefficient, name in ((self.kl_loss, "kl_loss_coef"), (self.kl_penalty, "kl_penalty_coef")):
            if coefficient.adaptive and name in state:
                coefficient.kl_coef = state[name]
        if self.entropy_bonus.target_entropy is not None and "entropy_coef" in state:
            self.entropy_bonus.entropy_coef = state["entropy_coef"]
            self.entropy_bonus.acts = bool(state["entropy_bonus_acts"])

    @without_gradient
    def advantages(self, mask: Tensor, excluded: Tensor | None = None, **inputs: Any) -> Advantages:
        """Compute the advantages of the whole batch. On CUDA the last bits may differ from call to call.

        `inputs` are the inputs of the advantage function: rewards [B], group_ids [B] (tensor or strings), rollout_ids
        [B], run_ids [B], turns [B], states [B] (strings), token_rewards, values, teacher_logprobs, old_logprobs,
        ref_logprobs [B, T], lengths [B], numbers [B] (each row's metrics by name). A KL penalty is first subtracted
        from the token rewards (and from `rewards`, their sum), and its adaptive coefficient is updated; `penalties` [B]
        are the totals subtracted from each row. The rows of `excluded` bool [B] (expert rows, unscored answers) get 0
        and do not count in groups. Raises InputError for inputs that are missing or not finite.
        """
        mask = as_mask(mask)
        if self.advantage_name == "none":
            return Advantages(torch.zeros(mask.shape, device=mask.device), {}, None)
        if excluded is not None and bool(excluded.any()):
            return self._of_rows((~excluded.bool()).nonzero()[:, 0], mask, inputs)
        metrics: dict[str, float] = {}
        if self.kl_in_reward:
            inputs, metrics = self._penalised(mask, inputs)
        rewards = inputs.get("rewards")
        if rewards is not None and inputs.get("token_rewards") is None and "token_rewards" in self.advantage_inputs:
            inputs = inputs | {"token_rewards": token_rewards_of(rewards.float(), None, mask)}
        no_penalties = torch.zeros(len(mask), device=mask.device)
        function = ADVANTAGES.resolve(self.advantage_name)
        result = call_with(function, {"mask": mask, "penalties": no_penalties} | inputs, self.advantage_args)
        returns, selected = (*result[2:], None, None)[:2]
        return Advantages(
            result[0].float(), metrics | result[1], None if returns is None else returns.float(), selected
        )

    def _of_rows(self, rows: Tensor, mask: Tensor, inputs: dict[str, Any]) -> Advantages:
        """Compute advantages from these rows alone; 0 in the others."""
        part = {name: _take(value, rows) for name, value in inputs.items()}
        advantages, metrics, *others = self.advantages(mask[rows], None, **part)
        returns, selected = (None if other is None else _scatter(other, rows, mask) for other in others)
        return Advantages(_scatter(advantages, rows, mask), metrics, returns, selected)

    def _penalised(self, mask: Tensor, inputs: dict[str, Any]) -> tuple[dict[str, Any], dict[str, float]]:
        """Return the inputs with kl_coef * KL(old || reference) subtracted from the rewards, and the KL's metrics."""
        old, reference = inputs.get("old_logprobs"), inputs.get("ref_logprobs")
        if old is None or reference is None:
            raise InputError("a KL penalty in the reward needs old_logprobs and ref_logprobs", key="ref_logprobs")
        kl = self.kl_penalty_fn(old, reference, mask, old, **self.kl_penalty_args)
        coefficient, metrics = self.kl_penalty.kl_coef, {"kl_coef": self.kl_penalty.kl_coef}
        if mask.any():
            metrics["kl"] = float(masked_mean(kl, mask))
            self.kl_penalty.update(metrics["kl"], mask.shape[0])
        rewards = inputs.get("rewards")
        alone = None if rewards is None else rewards.float()
        token_rewards = token_rewards_of(alone, inputs.get("token_rewards"), mask)
        rewards = token_rewards.sum(-1) if rewards is None else rewards
        penalties = coefficient * kl.sum(-1)
        changed = {
            "token_rewards": token_rewards - coefficient * kl, "rewards": rewards - penalties, "penalties": penalties,
        }  # fmt: skip
        return inputs | changed, metrics

    def weights(self, mask: Tensor, is_expert: Tensor | None = None, step: int = 0) -> Weights:
        """Return weights from the mask (and `is_expert` [B]) of the whole batch, all ranks' rows included.

        The KL term covers the tokens that the policy sampled; in a batch of only expert rows (SFT), those rows. `step`
        is the train step, for losses with a schedule.
        """
        mask = as_mask(mask)
        policy = self.policy_loss.weights(
            mask,
            loss_agg_mode=self.loss_agg_mode,
            loss_agg_mode_args=self.loss_agg_mode_args,
            args=self.policy_args,
            is_expert=is_expert,
            step=step,
        )
        aggregate = self.aggregation.weights
        sampled = _sampled(mask, is_expert)
        entropic = self.entropy_loss.select(mask, is_expert)
        return Weights(
            policy, aggregate(sampled, **self.loss_agg_mode_args), aggregate(entropic, **self.loss_agg_mode_args)
        )

    def loss(
        self,
        accumulator: MetricAccumulator,
        weights: Weights,
        *,
        logprobs: Tensor,
        mask: Tensor,
        entropy: Tensor | None = None,
        rollout_logprobs: Tensor | None = None,
        has_rollout_logprobs: Tensor | None = None,
        ref_logprobs: Tensor | None = None,
        old_logprobs: Tensor | None = None,
        advantages: Tensor | None = None,
        selected: Tensor | None = None,
        divergences: Tensor | None = None,
        is_expert: Tensor | None = None,
        step: int = 0,
    ) -> Tensor:
        """Return a micro-batch's term of the loss, with gradient; add its metrics to `accumulator`.

        All tensors are `[b, T]` of the same rows. `old_logprobs` None means the stop-gradient of `logprobs`: no second
        forward pass, and the ratio's clip is skipped. The rollout gap to `rollout_logprobs` is measured and corrected
        for, except in expert rows and where `has_rollout_logprobs` [b] is false; for those, a loss or KL estimator that
        takes the rollout's log-probs gets the old policy's. Nothing here synchronises with the device.
        """
        inputs = {
            "old_logprobs": old_logprobs, "advantages": advantages, "ref_logprobs": ref_logprobs,
            "selected": selected, "divergences": divergences, "is_expert": is_expert, "step": step,
        }  # fmt: skip
        values = self.policy_loss.corrected(
            accumulator,
            self.correction,
            self.correction_args,
            logprobs,
            mask,
            rollout_logprobs,
            self.policy_args,
            inputs,
            has_rollout_logprobs,
        )
        loss = (weights.policy * values).sum()
        for name in {"pg_loss", self.policy_loss.metric}:
            accumulator.total(name, loss)
        if self.kl_in_loss:
            sampler = _sampler_logprobs(logprobs, old_logprobs, rollout_logprobs, has_rollout_logprobs, is_expert)
            loss = loss + self.kl_loss.kl_coef * self._kl(accumulator, weights, logprobs, ref_logprobs, sampler, mask)
        if entropy is not None and self.entropy_loss.name != "none":
            value = (weights.entropy * torch.where(mask, entropy, 0.0)).sum()
            accumulator.total("entropy_loss", value)
            accumulator.mean("entropy_mean", entropy, mask & (weights.entropy != 0))
            if self.entropy_use == "loss":
                loss = loss - self.entropy_bonus.used * value
        accumulator.total("final_loss", loss)
        return loss

    def _kl(
        self, accumulator: MetricAccumulator, weights: Weights, logprobs: Tensor, reference: Tensor | None,
        old: Tensor, mask: Tensor,
    ) -> Tensor:  # fmt: skip
        """Return this micro-batch's term of the aggregated KL, without coefficient."""
        if reference is None:
            raise InputError(f"the KL loss '{self.kl_loss_fn.name}' needs ref_logprobs", key="ref_logprobs")
        tokens = self.kl_loss_fn.tokens(logprobs, reference, mask, old, **self.kl_loss_args)
        value = (weights.kl * tokens).sum()
        accumulator.total("kl_loss", value)
        accumulator.mean("kl_mean", tokens, mask & (weights.kl != 0))
        return value

    def after_batch(self, metrics: dict[str, float], experiences: int) -> dict[str, float]:
        """Return the metrics plus the coefficients used, `kl_coef` and `entropy_coef`; then update adaptive ones with
        the KL and the entropy per token, if any."""
        if self.entropy_bonus.target_entropy is not None and "entropy_mean" in metrics:
            metrics = metrics | {"entropy_coef": self.entropy_bonus.used}
            self.entropy_bonus.update(metrics["entropy_mean"])
        if not self.kl_in_loss:
            return metrics
        used = self.kl_loss.kl_coef
        if "kl_mean" in metrics:
            self.kl_loss.update(metrics["kl_mean"], experiences)
        return metrics | {"kl_coef": used}


def _sampled(mask: Tensor, is_expert: Tensor | None) -> Tensor:
    """Return the mask of the tokens that the policy sampled; of all tokens if every row is an expert's."""
    if is_expert is None or bool(is_expert.all()):
        return mask
    return mask & ~is_expert[:, None].bool()


def _sampler_logprobs(
    logprobs: Tensor, old: Tensor | None, rollout: Tensor | None, has_rollout: Tensor | None, is_expert: Tensor | None
) -> Tensor:
    """Return log-probs under the policy that sampled each token, or under the old policy in rows without them.

    `old` None stands for the current policy, without gradient.
    """
    old = logprobs.detach() if old is None else old
    if rollout is None:
        return old
    sampled = torch.ones(len(logprobs), dtype=torch.bool, device=logprobs.device)
    sampled = sampled if has_rollout is None else has_rollout.bool()
    sampled = sampled if is_expert is None else sampled & ~is_expert.bool()
    return torch.where(sampled[:, None], rollout, old)


def _take(values: Any, rows: Tensor) -> Any:
    """Return these rows of a tensor or sequence; any other value unchanged."""
    if isinstance(values, torch.Tensor):
        return values[rows.to(values.device)] if values.dim() else values
    return [values[row] for row in rows.tolist()] if isinstance(values, list | tuple) else values


def _scatter(part: Tensor, rows: Tensor, mask: Tensor) -> Tensor:
    """`[B, T]` with `part` at its rows and 0 elsewhere."""
    whole = torch.zeros(mask.shape, dtype=part.dtype, device=part.device)
    whole[rows] = part
    return whole
