"""Log-probs and entropy of tokens from the last hidden states, without the full logits.

The `[K, V]` logits of K positions over a vocabulary of V are never materialised: slices of the vocabulary are computed,
reduced with a running maximum (as in online softmax, arXiv 1805.02867) and dropped; the backward pass recomputes each
slice. This takes one matrix product more than the plain computation, but fewer passes over memory. There are no second
derivatives. `benchmarks/logprob_memory.py` measures memory and time.

On the CPU, rows with a zero gradient (masked tokens, zero-variance groups) are left out of the backward pass. On a GPU
the host would have to wait to learn which they are; there, all that is done to a slice between its matrix products is
one kernel (`head_kernels.py`) that reads it once.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from trinity_core.base.errors import InputError

if TYPE_CHECKING:
    from types import ModuleType

SLICE_ELEMENTS = {"cpu": 2**23, "cuda": 2**24}
"""Number of logits held at once, by device: small enough for 1/10 of the plain computation's peak memory at 2,048
positions, large enough that matrix products dominate."""
KERNEL_SLICE = 2**26
"""Number of logits held at once with kernels, in the dtype of the hidden states: 128 MiB in half precision."""
ALIGNED = 128
"""Slices for kernels hold a multiple of this many entries: tensor cores need aligned rows."""


class Head(NamedTuple):
    """An output embedding: `weight` [V, H], `bias` [V] or None."""

    weight: Tensor
    bias: Tensor | None = None


def token_logprobs_and_entropy(
    hidden: Tensor,
    lm_head_weight: Tensor,
    targets: Tensor,
    temperature: float | Tensor = 1.0,
    bias: Tensor | None = None,
    chunk: int | None = None,
    with_entropy: bool = True,
    kernels: bool = False,
) -> tuple[Tensor, Tensor]:
    """Return log-probs [K] of `targets` and entropies [K] of softmax((hidden @ weight.T + bias) / temperature), in
    nats.

    `hidden` [K, H], `lm_head_weight` [V, H], `targets` [K] integers below V, `temperature` one or [K], `bias` [V].
    Results are float32 (float64 for float64 inputs). Half-precision inputs are multiplied in half precision; everything
    else is float32. `chunk` is the number of vocabulary entries at a time, by default as many as `SLICE_ELEMENTS`
    allow. Without `with_entropy` entropies are 0 and cost nothing. `kernels`: compute with Triton, not for float64.
    Raises InputError for shapes that do not match and, for tensors only on the CPU, where the check is cheap, for
    temperatures of 0 or below and targets outside the vocabulary.
    """
    rows, vocabulary = hidden.shape[0], lm_head_weight.shape[0]
    if hidden.dim() != 2 or targets.shape != (rows,) or hidden.shape[1] != lm_head_weight.shape[1]:
        shapes = [tuple(t.shape) for t in (hidden, lm_head_weight, targets)]
        raise InputError(
            f"hidden [K, H], lm_head_weight [V, H] and targets [K] do not fit together: {shapes}", key="targets"
        )
    on_cpu = targets.device.type == "cpu"
    if not temperature > 0 if not isinstance(temperature, Tensor) else on_cpu and not (temperature > 0).all():
        raise InputError(f"the temperature must be positive, not {temperature}", key="temperature")
    if on_cpu and rows and not 0 <= int(targets.min()) <= int(targets.max()) < vocabulary:
        raise InputError(f"a target token lies outside the vocabulary of {vocabulary}", key="targets")
    if chunk is None and kernels:
        chunk = max(KERNEL_SLICE // max(rows, 1) // ALIGNED, 2) * ALIGNED
    result: tuple[Tensor, Tensor] = _TokenLogprobs.apply(
        hidden, lm_head_weight, bias, targets, 1.0 / temperature, chunk, with_entropy, kernels and rows > 0
    )
    return result


class Slices:
    """Computes slices of scaled logits in one reused buffer."""

    def __init__(
        self, hidden: Tensor, weight: Tensor, bias: Tensor | None, scale: float | Tensor, chunk: int | None,
        kernels: bool = False,
    ) -> None:  # fmt: skip
        """`chunk`: vocabulary entries of a slice; None: as many as `SLICE_ELEMENTS` allow."""
        size = chunk or max(SLICE_ELEMENTS.get(hidden.device.type, 2**24) // max(len(hidden), 1), 256)
        self.hidden, self.weight, self.bias, self.chunk = hidden, weight, bias, min(size, len(weight))
        self.dtype = torch.promote_types(hidden.dtype, torch.float32)
        self.buffer = hidden.new_empty(hidden.shape[0] * self.chunk)
        self.shared = 0.0 if isinstance(scale, Tensor) else scale
        """One scale for all rows; 0 if each has its own."""
        factor = scale if isinstance(scale, Tensor) else hidden.new_full((1,), scale, dtype=self.dtype)
        self.in_product = bool(self.shared) and not kernels and self.dtype == hidden.dtype
        """True if the product itself is scaled. A half-precision one is rounded first, bias included, as in engines and
        `linear`: scaling before would change each logit by its rounding, 0.02 nats on average."""
        self.alpha = self.shared if self.in_product else 1.0
        self.factor = factor[:, None].to(self.dtype)
        self.kernels: ModuleType | None = None
        if kernels:
            from trinity_core.algorithms import head_kernels

            self.kernels, self.inverse = head_kernels, self.factor.expand(len(hidden), 1).contiguous()
        else:
            self.wide_buffer = self.buffer.to(self.dtype)
            """The buffer itself unless the product is in half precision."""

    def bounds(self) -> list[tuple[int, int]]:
        """First and last + 1 vocabulary entry of each slice."""
        size = self.weight.shape[0]
        return [(start, min(start + self.chunk, size)) for start in range(0, size, self.chunk)]

    def head(self, start: int, end: int) -> Tensor:
        return self.weight[start:end].to(self.hidden.dtype)

    def logits(self, start: int, end: int) -> Tensor:
        """[K, end - start], in the shared buffer: valid until the next call. Kernels scale it themselves."""
        size = self.hidden.shape[0] * (end - start)
        out = self.buffer[:size].view(-1, end - start)
        if self.bias is None:
            out.addmm_(self.hidden, self.head(start, end).t(), beta=0, alpha=self.alpha)
        else:
            bias = self.bias[start:end].to(self.hidden.dtype)
            torch.addmm(bias, self.hidden, self.head(start, end).t(), beta=self.alpha, alpha=self.alpha, out=out)
        if self.in_product or self.kernels is not None:
            return out
        return torch.mul(out, self.factor, out=self.wide_buffer[:size].view_as(out))


def _place(targets: Tensor, start: int, end: int) -> tuple[Tensor, Tensor]:
    """[K, 1] column of each target in a slice, clamped, and whether the slice holds it."""
    column = targets[:, None] - start
    return column.clamp(0, end - start - 1), (column >= 0) & (column < end - start)


def reduce_slices(slices: Slices, targets: Tensor, with_entropy: bool) -> tuple[Tensor, Tensor, Tensor]:
    """[K, 1] each: the target's logit, log sum exp, and entropy (0 without `with_entropy`)."""
    rows = (slices.hidden.shape[0], 1)
    peak = slices.hidden.new_full(rows, -torch.inf, dtype=slices.dtype)
    total, weighed = torch.zeros_like(peak), torch.zeros_like(peak)  # sum e^(z - peak), sum e^(z - peak) (z - peak)
    chosen = torch.zeros_like(peak)
    for start, end in slices.bounds():
        logits = slices.logits(start, end)
        if slices.kernels is not None:
            state = (peak, total, weighed, chosen)
            slices.kernels.reduce_slice(logits, slices.inverse, targets, state, start, with_entropy)
            continue
        column, inside = _place(targets, start, end)
        chosen = torch.where(inside, logits.gather(1, column), chosen)
        higher = torch.maximum(peak, logits.amax(1, keepdim=True))
        shift = torch.where(total > 0, peak - higher, 0.0)
        logits.sub_(higher)
        if with_entropy:
            powers = logits.exp()
            products = torch.linalg.vecdot(powers, logits, dim=1).unsqueeze(1)
            weighed = (weighed + shift * total) * shift.exp() + products
        else:
            powers = logits.exp_()
        total = total * shift.exp() + powers.sum(1, keepdim=True)
        peak = higher
    log_total = total.log()
    entropy = log_total - weighed / total if with_entropy else torch.zeros_like(peak)
    return chosen, peak + log_total, entropy


class _TokenLogprobs(torch.autograd.Function):
    """dz = g (1[target] - p) - h p (log p + entropy), with g and h the gradients of log-prob and entropy, z the
    logits."""

    @staticmethod
    def forward(
        ctx: Any, hidden: Tensor, weight: Tensor, bias: Tensor | None, targets: Tensor, scale: float | Tensor,
        chunk: int | None, with_entropy: bool, kernels: bool,
    ) -> tuple[Tensor, Tensor]:  # fmt: skip
        with torch.autocast(hidden.device.type, enabled=False):
            slices = Slices(hidden, weight, bias, scale, chunk, kernels)
            chosen, log_total, entropy = reduce_slices(slices, targets, with_entropy)
        ctx.save_for_backward(hidden, weight, bias, targets, log_total, entropy)
        ctx.scale, ctx.chunk, ctx.kernels = scale, slices.chunk, kernels
        ctx.set_materialize_grads(False)
        entropies = entropy.squeeze(1)
        if not with_entropy:
            ctx.mark_non_differentiable(entropies)
        return (chosen - log_total).squeeze(1), entropies

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad_logprobs: Tensor | None, grad_entropy: Tensor | None) -> tuple[Tensor | None, ...]:
        hidden, weight, bias, targets, log_total, entropy = ctx.saved_tensors
        g = torch.zeros_like(log_total) if grad_logprobs is None else grad_logprobs[:, None].contiguous()
        h = None if grad_entropy is None else grad_entropy[:, None].contiguous()
        scale, part, active = ctx.scale, hidden, None
        if not hidden.is_cuda and not ctx.kernels:
            active = ((g != 0) if h is None else (g != 0) | (h != 0)).squeeze(1).nonzero()[:, 0]
            part, targets, log_total, entropy, g = (x[active] for x in (hidden, targets, log_total, entropy, g))
            h = None if h is None else h[active]
            scale = scale[active] if isinstance(scale, Tensor) else scale
        with torch.autocast(hidden.device.type, enabled=False):
            gradients = Gradients(part, weight, bias, scale, ctx.chunk, ctx.kernels)
            d_part, d_weight, d_bias = gradients.compute(targets, log_total, entropy, g, h, ctx.needs_input_grad[:3])
        d_hidden = None if d_part is None else d_part.to(hidden.dtype)
        if d_hidden is not None and active is not None:
            d_hidden = torch.zeros_like(hidden).index_copy_(0, active, d_hidden)
        return d_hidden, d_weight, d_bias, None, None, None, None, None


class Gradients(Slices):
    def compute(
        self, targets: Tensor, log_total: Tensor, entropy: Tensor, g: Tensor, h: Tensor | None,
        needs: tuple[bool, bool, bool],
    ) -> tuple[Tensor | None, Tensor | None, Tensor | None]:  # fmt: skip
        """Gradients of hidden (float32 or wider), weight and bias, where needed."""
        d_hidden = torch.zeros_like(self.hidden, dtype=self.dtype) if needs[0] else None
        d_weight = torch.empty_like(self.weight) if needs[1] else None
        d_bias = torch.empty_like(self.bias) if needs[2] and self.bias is not None else None
        constant = -g if h is None else -g - h * entropy
        for start, end in self.bounds():
            d_logits = self.logits(start, end)
            if self.kernels is not None:
                self.kernels.differentiate_slice(d_logits, self.inverse, targets, log_total, constant, g, h, start)
            else:
                d_logits = self.differentiate(d_logits, targets, log_total, constant, g, h, start)
            if d_bias is not None:
                d_bias[start:end] = d_logits.sum(0, dtype=self.dtype)
            d_logits = d_logits.to(self.hidden.dtype)
            if d_hidden is not None:
                self._accumulate(d_hidden, d_logits, self.head(start, end))
            if d_weight is not None:
                self._write(d_weight[start:end], d_logits)
        return d_hidden, d_weight, d_bias

    def differentiate(
        self, logits: Tensor, targets: Tensor, log_total: Tensor, constant: Tensor, g: Tensor, h: Tensor | None,
        start: int,
    ) -> Tensor:  # fmt: skip
        logprobs = logits.sub_(log_total)
        if h is None:
            d_logits = logprobs.exp_().mul_(constant)
        else:
            d_logits = logprobs.exp()
            d_logits.mul_(logprobs.mul_(-h).add_(constant))
        column, inside = _place(targets, start, start + logits.shape[1])
        d_logits.scatter_add_(1, column, torch.where(inside, g, 0.0).to(d_logits.dtype))
        return d_logits if self.shared == 1 else d_logits.mul_(self.factor)

    def _write(self, target: Tensor, d_logits: Tensor) -> None:
        """target = d_logits.t() @ hidden, without a copy if the dtypes agree."""
        if target.dtype == d_logits.dtype:
            torch.mm(d_logits.t(), self.hidden, out=target)
        else:
            target.copy_(d_logits.t() @ self.hidden)

    def _accumulate(self, total: Tensor, d_logits: Tensor, head: Tensor) -> None:
        if total.dtype == d_logits.dtype:
            total.addmm_(d_logits, head)
        else:
            total += d_logits @ head
