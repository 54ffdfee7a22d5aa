"""The divergence of a policy from its teacher over the whole vocabulary, from last hidden states, in slices.

As in `logprobs.py` no `[K, V]` tensor is ever materialised: each pass computes a slice of both distributions and drops
it. Only the policy's side has a gradient.
"""

from __future__ import annotations

import math
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from trinity_core.algorithms.logprobs import Gradients, Head, Slices, reduce_slices
from trinity_core.base.errors import InputError


class Taught(NamedTuple):
    """What the divergences of a micro-batch from its teacher need."""

    beta: float
    """See `divergence_from_teacher`."""
    hidden: Tensor | None = None
    """[K, H]: the teacher's states in `Micro.for_teacher`; None: those of the policy itself, without gradient."""
    head: Head | None = None
    """None: the policy's."""


def divergence_from_teacher(
    hidden: Tensor,
    head: Head,
    teacher_hidden: Tensor,
    teacher_head: Head,
    beta: float,
    temperature: float | Tensor = 1.0,
    chunk: int | None = None,
) -> Tensor:
    """Return the divergence [K] in nats of q, the policy's distribution at each of K positions, from the teacher's p.

    KL(p || q) for `beta` 0, KL(q || p) for 1, and between them beta KL(p || m) + (1 - beta) KL(q || m) with m = beta p
    + (1 - beta) q, the generalised Jensen-Shannon divergence (arXiv 2306.13649, eq. 1). `hidden` [K, H],
    `teacher_hidden` [K, H'], `temperature` of both distributions, one or [K]; `chunk` is the number of vocabulary
    entries at a time. Results are float32 (float64 for float64 inputs). Raises InputError for another number of
    positions or entries.
    """
    shapes = [(len(hidden), len(head.weight)), (len(teacher_hidden), len(teacher_head.weight))]
    if shapes[0] != shapes[1]:
        raise InputError(f"policy and teacher have different positions or vocabularies: {shapes}", key="teacher_hidden")
    result: Tensor = _Divergence.apply(hidden, *head, teacher_hidden, *teacher_head, 1.0 / temperature, beta, chunk)
    return result


def _terms(log_p: Tensor, log_q: Tensor, beta: float) -> tuple[Tensor, Tensor]:
    """Return each entry's term of the divergence, and s with dD/dz = q (s - sum q s), z the policy's logits; for `beta`
    0, where s would be -p / q, zeros."""
    p, q = log_p.exp(), log_q.exp()
    if beta == 0:
        return p * (log_p - log_q), torch.zeros_like(q)
    if beta == 1:
        return q * (log_q - log_p), log_q - log_p
    log_m = torch.logaddexp(log_p + math.log(beta), log_q + math.log1p(-beta))
    score = (1 - beta) * (log_q - log_m)
    return beta * p * (log_p - log_m) + q * score, score


class _Divergence(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, hidden: Tensor, weight: Tensor, bias: Tensor | None, teacher_hidden: Tensor, teacher_weight: Tensor,
        teacher_bias: Tensor | None, scale: float | Tensor, beta: float, chunk: int | None,
    ) -> Tensor:  # fmt: skip
        with torch.autocast(hidden.device.type, enabled=False):
            policy = Slices(hidden, weight, bias, scale, chunk)
            teacher = Slices(teacher_hidden, teacher_weight, teacher_bias, scale, chunk)
            nothing = torch.zeros(len(hidden), dtype=torch.int64, device=hidden.device)
            totals = [reduce_slices(slices, nothing, False)[1] for slices in (policy, teacher)]
            value, mean_score = torch.zeros_like(totals[0]), torch.zeros_like(totals[0])
            for start, end in policy.bounds():
                log_q = policy.logits(start, end).sub_(totals[0])
                terms, score = _terms(teacher.logits(start, end).sub_(totals[1]), log_q, beta)
                value += terms.sum(1, keepdim=True)
                mean_score += (log_q.exp() * score).sum(1, keepdim=True)
        saved = (hidden, weight, bias, teacher_hidden, teacher_weight, teacher_bias, *totals, mean_score)
        ctx.save_for_backward(*saved)
        ctx.scale, ctx.beta, ctx.chunk = scale, beta, policy.chunk
        return value.squeeze(1)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        hidden, weight, bias, *of_teacher, total, teacher_total, mean_score = ctx.saved_tensors
        with torch.autocast(hidden.device.type, enabled=False):
            teacher = Slices(of_teacher[0], of_teacher[1], of_teacher[2], ctx.scale, ctx.chunk)
            gradients = _Gradients(hidden, weight, bias, ctx.scale, ctx.chunk)
            gradients.teacher, gradients.teacher_total = teacher, teacher_total
            gradients.mean_score, gradients.beta = mean_score, ctx.beta
            upstream, nothing = grad[:, None].contiguous(), torch.zeros_like(grad, dtype=torch.int64)
            d_hidden, d_weight, d_bias = gradients.compute(
                nothing, total, total, upstream, None, ctx.needs_input_grad[:3]
            )
        return None if d_hidden is None else d_hidden.to(hidden.dtype), d_weight, d_bias, *[None] * 6


class _Gradients(Gradients):
    teacher: Slices
    teacher_total: Tensor
    mean_score: Tensor
    """[K, 1]: sum q s."""
    beta: float

    def differentiate(
        self, logits: Tensor, targets: Tensor, log_total: Tensor, constant: Tensor, g: Tensor, h: Tensor | None,
        start: int,
    ) -> Tensor:  # fmt: skip
        """dz = g (q - p) for the forward KL, otherwise g q (s - sum q s)."""
        log_q = logits.sub_(log_total)
        log_p = self.teacher.logits(start, start + logits.shape[1]).sub_(self.teacher_total)
        if self.beta == 0:
            d_logits = log_q.exp() - log_p.exp()
        else:
            d_logits = log_q.exp() * (_terms(log_p, log_q, self.beta)[1] - self.mean_score)
        return d_logits * g * self.factor
