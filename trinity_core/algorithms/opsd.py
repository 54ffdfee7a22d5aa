"""OPSD over the whole vocabulary: the policy that sees a demonstration teaches the policy that does not."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING, Literal

from trinity_core.algorithms.losses.policy_loss import policy_loss
from trinity_core.algorithms.metric_accumulator import Stats
from trinity_core.config.algorithm_types import ON_POLICY_DISTILL, register_algorithm
from trinity_core.config.types import Share

if TYPE_CHECKING:
    from torch import Tensor


@policy_loss("opsd", metric="opsd_loss")
def opsd(
    logprobs: Tensor,
    mask: Tensor,
    *,
    divergences: Tensor,
    beta: Share = 0.0,
    teacher: Literal["policy", "reference"] = "policy",
) -> tuple[Tensor, Stats]:
    """The divergence from the teacher at each sampled token, over all tokens of the vocabulary (OPSD, arXiv 2601.18734;
    SDFT, 2601.19897).

    `divergences` [B, T] are those of `divergence_from_teacher`, with `beta`: 0 KL(p || q), 1 KL(q || p), between them
    the generalised Jensen-Shannon divergence; p the teacher's distribution, q the policy's. The teacher reads the
    row's `teacher_prompt`: it is the policy of the moment, without gradient, or the frozen reference model.
    """
    return divergences, {}


register_algorithm(
    replace(
        ON_POLICY_DISTILL,
        name="opsd_full",
        advantage_fn="none",
        advantage_fn_args={},
        policy_loss_fn="opsd",
        policy_loss_fn_args={"beta": 0.0, "teacher": "policy"},
    )
)
