"""Plans micro-batches within a token budget, the same number on every rank. Pure arithmetic, without torch.

A *unit* is a set of rows that must share a micro-batch: the rollouts of a group, which share a prompt, or the two rows
of a DPO pair. How units are combined changes memory and time, but not the loss (see `update.py`).

Rows of a micro-batch share their prompts while the attention mask has at most `largest_mask` elements (None: no limit),
and are padded otherwise (see `micro.py`); their cost follows from that. With a limit of 0 all rows are padded.
"""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from dataclasses import dataclass

LARGEST_MASK = 1 << 26
"""Largest attention mask (b * T * (P + T) elements); beyond it rows are padded, as causal kernels need no mask."""


@dataclass(frozen=True, slots=True)
class RowUnit:
    """Rows that stay together, in this order."""

    rows: tuple[int, ...]
    tokens: int
    """Tokens of the rows in one micro-batch without padding; a shared prompt counts once."""
    longest: int
    """Tokens of the longest sequence. Units of similar length are combined."""
    prompt: int = 0
    response: int = 0

    def with_(self, other: RowUnit, shared: int = 0) -> RowUnit:
        """Join both units; `shared` tokens of `other` are already counted in this one."""
        return RowUnit(
            self.rows + other.rows, self.tokens + other.tokens - shared, max(self.longest, other.longest),
            max(self.prompt, other.prompt), max(self.response, other.response),
        )  # fmt: skip

    def cost(self, largest_mask: int | None) -> int:
        """Tokens that the model processes for this unit as a micro-batch, padding included."""
        shares = largest_mask is None or mask_elements(len(self.rows), self.prompt, self.response) <= largest_mask
        return self.tokens if shares else len(self.rows) * self.longest


Plan = list[list[tuple[int, ...]]]
"""[rank][micro-batch] -> rows. An empty micro-batch keeps ranks in step and carries no loss."""


def mask_elements(rows: int, prompt: int, response: int) -> int:
    return rows * response * (prompt + response)


def units_of(
    groups: Sequence[Hashable], prompts: Sequence[int], responses: Sequence[int], budget: int,
    largest_mask: int | None = None,
) -> list[RowUnit]:  # fmt: skip
    """Return one unit for each group of rows that share a prompt; a group beyond the budget is split.

    `prompts` and `responses` are lengths in tokens. Rows of a group need not be adjacent.
    """
    members: dict[Hashable, list[RowUnit]] = {}
    for i, group in enumerate(groups):
        members.setdefault(group, []).append(_unit(i, prompts, responses))
    units: list[RowUnit] = []
    for first, *others in members.values():
        units.append(first)
        for row in others:
            together = units[-1].with_(row, shared=row.prompt)
            if together.cost(largest_mask) <= budget:
                units[-1] = together
            else:
                units.append(row)
    return units


def pairs_of(prompts: Sequence[int], responses: Sequence[int]) -> list[RowUnit]:
    """Return one unit for each two adjacent rows (DPO: chosen, rejected). Raises ValueError for an odd number of
    rows."""
    if len(prompts) % 2:
        raise ValueError(f"pairs need an even number of rows, got {len(prompts)}")
    rows = [_unit(row, prompts, responses) for row in range(len(prompts))]
    return [
        preferred.with_(rejected, shared=rejected.prompt)
        for preferred, rejected in zip(rows[::2], rows[1::2], strict=True)
    ]  # fmt: skip


def _unit(row: int, prompts: Sequence[int], responses: Sequence[int]) -> RowUnit:
    whole = prompts[row] + responses[row]
    return RowUnit((row,), whole, whole, prompts[row], responses[row])


def plan(units: Sequence[RowUnit], budget: int, ranks: int, largest_mask: int | None = None) -> Plan:
    """Assign every unit to a micro-batch of at most `budget` tokens, with the same number of micro-batches on each
    rank.

    The number of micro-batches is the smallest that the budget allows. For that number the largest micro-batch is as
    small as possible, so that ranks wait little for each other. A unit beyond the budget gets its own micro-batch.
    """
    order = sorted(units, key=lambda unit: (-unit.longest, unit.rows))
    number = max(1, -(-len(_cut(order, budget, largest_mask)) // ranks)) * ranks
    low, high = 1, budget
    while low < high:
        middle = (low + high) // 2
        if len(_cut(order, middle, largest_mask)) <= number:
            high = middle
        else:
            low = middle + 1
    bins = sorted(_cut(order, high, largest_mask), key=lambda unit: -unit.cost(largest_mask))
    rows: list[tuple[int, ...]] = [unit.rows for unit in bins]
    rows += [()] * (number - len(bins))
    return [_share(rows, rank, ranks) for rank in range(ranks)]


def _share(bins: list[tuple[int, ...]], rank: int, ranks: int) -> list[tuple[int, ...]]:
    """The rank's share of bins sorted by cost, dealt in alternating direction to even out totals."""
    return [
        bins[start + (rank if (start // ranks) % 2 == 0 else ranks - 1 - rank)] for start in range(0, len(bins), ranks)
    ]


def _cut(order: Sequence[RowUnit], capacity: int, largest_mask: int | None) -> list[RowUnit]:
    bins: list[RowUnit] = []
    for unit in order:
        if bins and (together := bins[-1].with_(unit)).cost(largest_mask) <= capacity:
            bins[-1] = together
        else:
            bins.append(unit)
    return bins
