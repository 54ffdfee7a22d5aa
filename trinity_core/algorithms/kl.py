"""Per-token estimators of the KL divergence from a reference policy, and their coefficient.

With d = logprobs - ref_logprobs of a token sampled from the policy: k1, k2, k3 are Schulman's estimators of
KL(policy || reference) (joschu.net/blog/kl-approx.html). In the reward any of them is a penalty. In the loss their
*gradients* matter: k2's is the gradient of the KL itself on tokens of the current policy, k1's is 0 on average.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Annotated, Any

from trinity_core.algorithms.tensors import as_mask, clean, require_finite
from trinity_core.base.errors import InputError
from trinity_core.base.lazy import torch
from trinity_core.base.registry import Registry
from trinity_core.base.signatures import ActsWith, call_with
from trinity_core.config.types import NonNegative

if TYPE_CHECKING:
    from torch import Tensor


@dataclass(frozen=True)
class KLFn:
    """An estimator: (logprobs, ref_logprobs, mask) -> [B, T] nats, 0 at masked tokens."""

    name: str
    function: Callable[..., Tensor]

    def tokens(
        self, logprobs: Tensor, ref_logprobs: Tensor, mask: Tensor, old_logprobs: Tensor | None = None, **args: Any
    ) -> Tensor:
        """The estimate, without the check for NaNs (which would synchronise with the device)."""
        inputs = {"logprobs": logprobs, "ref_logprobs": ref_logprobs, "old_logprobs": old_logprobs}
        cleaned = {name: None if value is None else clean(value, mask) for name, value in inputs.items()}
        return clean(call_with(self.function, cleaned, args), mask)

    def __call__(
        self, logprobs: Tensor, ref_logprobs: Tensor, mask: Tensor, old_logprobs: Tensor | None = None, **args: Any
    ) -> Tensor:
        """The estimate. Raises InputError for a NaN or infinity at an action token."""
        mask = as_mask(mask)
        require_finite(mask, logprobs=logprobs, ref_logprobs=ref_logprobs, old_logprobs=old_logprobs)
        return self.tokens(logprobs, ref_logprobs, mask, old_logprobs, **args)


KL_FNS: Registry[KLFn] = Registry(
    "KL estimator",
    inputs=("logprobs", "ref_logprobs", "old_logprobs"),
    functions=lambda estimator: (KLCoefficient, estimator.function),
)


def kl_fn(name: str) -> Callable[[Callable[..., Tensor]], KLFn]:
    """Decorator: register a function of (logprobs, ref_logprobs[, old_logprobs]) as `KL_FNS[name]`."""

    def add(function: Callable[..., Tensor]) -> KLFn:
        return KL_FNS.register(name)(KLFn(name, function))

    return add


@kl_fn("none")
def none(logprobs: Tensor) -> Tensor:
    """0."""
    return torch.zeros_like(logprobs)


@kl_fn("k1")
def k1(logprobs: Tensor, ref_logprobs: Tensor) -> Tensor:
    """d: unbiased, of either sign."""
    return logprobs - ref_logprobs


@kl_fn("k2")
def k2(logprobs: Tensor, ref_logprobs: Tensor) -> Tensor:
    """d^2 / 2: never negative."""
    return (logprobs - ref_logprobs).square() / 2


@kl_fn("k3")
def k3(logprobs: Tensor, ref_logprobs: Tensor) -> Tensor:
    """exp(-d) - 1 + d: unbiased and never negative (GRPO, arXiv 2402.03300, eq. 4)."""
    return torch.expm1(ref_logprobs - logprobs) - (ref_logprobs - logprobs)


@kl_fn("low_var_kl")
def low_var_kl(logprobs: Tensor, ref_logprobs: Tensor) -> Tensor:
    """k3 with the log-ratio clamped to +-20 and the result to 10, against overflow."""
    log_ratio = (ref_logprobs - logprobs).clamp(-20, 20)
    return (torch.expm1(log_ratio) - log_ratio).clamp(max=10)


@kl_fn("abs")
def absolute(logprobs: Tensor, ref_logprobs: Tensor) -> Tensor:
    """|d|: never negative."""
    return (logprobs - ref_logprobs).abs()


@kl_fn("corrected_k3")
def corrected_k3(
    logprobs: Tensor, ref_logprobs: Tensor, old_logprobs: Tensor | None = None, ratio_cap: float | None = 2.0
) -> Tensor:
    """pi / pi_old * k3: unbiased, gradient included, for tokens that an older policy sampled (DeepSeek-V3.2, arXiv
    2512.02556, section 3.1).

    In the loss, `old_logprobs` are those of the rollout. `ratio_cap` truncates the ratio for stability (None: no cap).
    Without `old_logprobs` the old policy is the current one.
    """
    old = logprobs.detach() if old_logprobs is None else old_logprobs
    ratio = (logprobs - old).exp()
    if ratio_cap is not None:
        ratio = ratio.clamp(max=ratio_cap)
    return ratio * (torch.expm1(ref_logprobs - logprobs) - (ref_logprobs - logprobs))


@dataclass
class KLCoefficient:
    """The coefficient of a KL term: fixed, or adapted to keep the KL near a target (arXiv 1909.08593, section 2.2).

    Its only state is `kl_coef`, which checkpoints store.
    """

    kl_coef: NonNegative = 0.001
    adaptive: bool = False
    target_kl: Annotated[float | None, ActsWith("adaptive")] = None
    horizon: Annotated[float | None, ActsWith("adaptive")] = None
    """Number of experiences over which a lasting error of 20 % moves the coefficient by about 20 %. A larger batch
    counts as this many: it is one measurement of the KL, which moves the coefficient by at most 20 %."""

    def __post_init__(self) -> None:
        if self.adaptive and not (self.target_kl and self.horizon and self.target_kl > 0 and self.horizon > 0):
            raise InputError(
                "an adaptive KL coefficient needs a positive target_kl and a positive horizon", key="target_kl"
            )

    def update(self, current_kl: float, experiences: int) -> float:
        """Return the coefficient after a batch: if adaptive, times 1 + clip(KL / target - 1, +-0.2) * min(n / horizon,
        1).

        Without the limit to 1, a batch of five horizons would make the coefficient 0, and a larger one negative: the
        term would push away from the reference, further with each step.
        """
        if self.adaptive and self.target_kl and self.horizon:
            if current_kl != current_kl:
                raise InputError(
                    "the KL of this batch is NaN; the adaptive coefficient cannot follow it", key="current_kl"
                )
            error = min(max(current_kl / self.target_kl - 1, -0.2), 0.2)
            self.kl_coef *= 1 + error * min(experiences / self.horizon, 1.0)
        return self.kl_coef


def split_kl_args(args: dict[str, Any]) -> tuple[KLCoefficient, dict[str, Any]]:
    """Split `kl_loss_fn_args` or `kl_penalty_fn_args` into the coefficient and the estimator's own arguments."""
    names = ("kl_coef", "adaptive", "target_kl", "horizon")
    return (
        KLCoefficient(**{name: args[name] for name in names if name in args}),
        {name: value for name, value in args.items() if name not in names},
    )
