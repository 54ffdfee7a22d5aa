"""Accumulates metrics exactly over micro-batches and ranks."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, TypeAlias

from trinity_core.algorithms.tensors import clean
from trinity_core.base.lazy import torch

if TYPE_CHECKING:
    from torch import Tensor

Stat: TypeAlias = "tuple[Tensor, Tensor]"
"""Values `[B, T]` and the bool mask `[B, T]` of the tokens over which they are averaged."""
Stats = dict[str, Stat]


class MetricAccumulator:
    """Running sums, means, maxima and effective sample sizes, kept on the device in float64 until `metrics()`.

    Every micro-batch of a run adds the same names, so ranks agree on their order in `reduce`.
    """

    def __init__(self) -> None:
        self.sums: dict[str, Tensor] = {}
        """Name -> `[weighted sum, weight]` of a mean, `[sum]` of a total, `[sum w, sum w^2, n]` of an ESS."""
        self.maxima: dict[str, Tensor] = {}

    def mean(self, name: str, values: Tensor, mask: Tensor) -> None:
        self._add(name, torch.stack([clean(values.detach().double(), mask).sum(), mask.sum().double()]))

    def means(self, stats: Stats) -> None:
        for name, (values, mask) in stats.items():
            self.mean(name, values, mask)

    def total(self, name: str, value: Tensor) -> None:
        """Add a term of a whole-batch sum, such as a micro-batch's share of the loss."""
        self._add(name, value.detach().double().reshape(1))

    def maximum(self, name: str, values: Tensor, mask: Tensor) -> None:
        """Keep the largest value under the mask, 0 if the mask is empty. Values must not be negative."""
        peak = clean(values.detach().double(), mask)
        peak = peak.max() if peak.numel() else peak.new_zeros(())
        self.maxima[name] = torch.maximum(self.maxima[name], peak) if name in self.maxima else peak

    def effective_sample_size(self, name: str, weights: Tensor, mask: Tensor) -> None:
        """(sum w)^2 / (n sum w^2): the effective sample size as a share of the tokens; 1 without tokens."""
        w = clean(weights.detach().double(), mask)
        self._add(name, torch.stack([w.sum(), w.square().sum(), mask.sum().double()]))

    def _add(self, name: str, value: Tensor) -> None:
        self.sums[name] = self.sums[name] + value if name in self.sums else value

    def reduce(self, all_reduce: Callable[[Tensor, str], None]) -> None:
        """Combine over ranks: `all_reduce(tensor, op)` works in place, op is `sum` or `max`."""
        for op, table in (("sum", self.sums), ("max", self.maxima)):
            if not table:
                continue
            packed = torch.cat([table[name].reshape(-1) for name in sorted(table)])
            all_reduce(packed, op)
            parts = packed.split([table[name].numel() for name in sorted(table)])
            table.update(zip(sorted(table), parts, strict=True))

    def metrics(self) -> dict[str, float]:
        """Return floats by name, without averages over no token."""
        result: dict[str, float] = {}
        tables = [*self.maxima.values(), *self.sums.values()]
        fetched = iter(torch.cat([value.reshape(-1) for value in tables]).tolist() if tables else [])
        for name in self.maxima:
            result[name] = next(fetched)
        for name, value in self.sums.items():
            numbers = [next(fetched) for _ in range(value.numel())]
            if len(numbers) == 1:
                result[name] = numbers[0]
            elif len(numbers) == 2:
                if numbers[1] > 0:
                    result[name] = numbers[0] / numbers[1]
            else:
                result[name] = numbers[0] ** 2 / (numbers[1] * numbers[2]) if numbers[1] > 0 else 1.0
        return result
