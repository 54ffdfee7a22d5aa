"""Micro-batches: as many tokens as fit, the same number on every rank, whole units together. Pure arithmetic.

A *unit* is a set of rows that belong in one micro-batch: the rollouts of a group, because they share a prompt, or the
two rows of a DPO pair, because the loss is of the pair. The loss never depends on the cut (see `update.py`), so a cut
is only a matter of memory and time.
"""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Unit:
    """Rows that stay together, in this order."""

    rows: tuple[int, ...]
    tokens: int
    """What they cost in one micro-batch without padding."""
    longest: int
    """Their longest sequence, in tokens: similar lengths are put together."""


Plan = list[list[tuple[int, ...]]]
"""[rank][micro-batch] -> rows. An empty micro-batch keeps the ranks in step and carries no loss."""


def units_of(groups: Sequence[Hashable], prompts: Sequence[int], responses: Sequence[int], budget: int) -> list[Unit]:
    """One unit for each group of rows that share a prompt; a group beyond the budget is cut into several.

    `prompts` and `responses` are lengths in tokens. A group's prompt counts once. Rows need not be adjacent.
    """
    members: dict[Hashable, list[int]] = {}
    for row, group in enumerate(groups):
        members.setdefault(group, []).append(row)
    units = []
    for rows in members.values():
        start = 0
        size = prompts[rows[0]]
        for i, row in enumerate(rows):
            if i > start and size + responses[row] > budget:
                units.append(_unit(rows[start:i], size, prompts, responses))
                start, size = i, prompts[row]
            size += responses[row]
        units.append(_unit(rows[start:], size, prompts, responses))
    return units


def pairs_of(prompts: Sequence[int], responses: Sequence[int]) -> list[Unit]:
    """One unit for each two adjacent rows (DPO: chosen, rejected). Raises ValueError for an odd number of rows."""
    if len(prompts) % 2:
        raise ValueError(f"pairs need an even number of rows, got {len(prompts)}")
    return [
        _unit([i, i + 1], prompts[i] + responses[i] + responses[i + 1], prompts, responses)
        for i in range(0, len(prompts), 2)
    ]


def _unit(rows: Sequence[int], tokens: int, prompts: Sequence[int], responses: Sequence[int]) -> Unit:
    return Unit(tuple(rows), tokens, max(prompts[row] + responses[row] for row in rows))


def plan(units: Sequence[Unit], budget: int, ranks: int, padded: bool = False) -> Plan:
    """Put every unit into one micro-batch of at most `budget` tokens, the same number of micro-batches on each rank.

    As few rounds as the budget allows, and within them the largest micro-batch as small as it can be, so that ranks
    wait little for each other. A unit beyond the budget gets a micro-batch of its own. With `padded`, a micro-batch
    costs its rows times its longest sequence; otherwise the sum of its units' tokens.
    """
    order = sorted(units, key=lambda unit: (-unit.longest, unit.rows))
    wanted = max(1, -(-len(_cut(order, budget, padded)) // ranks)) * ranks
    low, high = 1, budget
    while low < high:
        middle = (low + high) // 2
        if len(_cut(order, middle, padded)) <= wanted:
            high = middle
        else:
            low = middle + 1
    bins = _cut(order, high, padded)
    bins.sort(key=lambda units: -_cost(units, padded))
    bins += [[] for _ in range(wanted - len(bins))]
    rows = [tuple(row for unit in units for row in unit.rows) for units in bins]
    return [_share(rows, rank, ranks) for rank in range(ranks)]


def _share(bins: list[tuple[int, ...]], rank: int, ranks: int) -> list[tuple[int, ...]]:
    """Rank's share of bins sorted by cost: dealt forth and back, so that totals are even."""
    return [
        bins[start + (rank if (start // ranks) % 2 == 0 else ranks - 1 - rank)] for start in range(0, len(bins), ranks)
    ]


def _cost(units: Sequence[Unit], padded: bool) -> int:
    if padded:
        return sum(len(unit.rows) for unit in units) * max(unit.longest for unit in units)
    return sum(unit.tokens for unit in units)


def _cut(order: Sequence[Unit], capacity: int, padded: bool) -> list[list[Unit]]:
    """Fill bins in order up to `capacity`."""
    bins: list[list[Unit]] = []
    used = rows = longest = 0
    for unit in order:
        used += unit.tokens
        rows += len(unit.rows)
        longest = max(longest, unit.longest)
        if bins and (rows * longest if padded else used) <= capacity:
            bins[-1].append(unit)
        else:
            bins.append([unit])
            used, rows, longest = unit.tokens, len(unit.rows), unit.longest
    return bins
