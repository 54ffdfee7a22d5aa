"""Micro-batches: planned within a token budget, the same number on every rank, then built as model input.

A *unit* is a set of rows that must share a micro-batch: the rollouts of a group, which share a prompt, or the two rows
of a DPO pair. How units are combined changes memory and time, but not the loss (see `update.py`).

Rows of a micro-batch share their prompts while the attention mask has at most `largest_mask` elements (None: no limit),
and are padded otherwise; their cost follows from that. With a limit of 0 all rows are padded.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace

import numpy as np
import torch
from torch import Tensor

from trinity_core.data.experience import Experience
from trinity_core.training.packing import Packed, each_tensor, pack

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
        chosen.with_(rejected, shared=rejected.prompt)
        for chosen, rejected in zip(rows[::2], rows[1::2], strict=True)
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
    wanted = max(1, -(-len(_cut(order, budget, largest_mask)) // ranks)) * ranks
    low, high = 1, budget
    while low < high:
        middle = (low + high) // 2
        if len(_cut(order, middle, largest_mask)) <= wanted:
            high = middle
        else:
            low = middle + 1
    bins = sorted(_cut(order, high, largest_mask), key=lambda unit: -unit.cost(largest_mask))
    rows: list[tuple[int, ...]] = [unit.rows for unit in bins]
    rows += [()] * (wanted - len(bins))
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


@dataclass(frozen=True, slots=True)
class Padded:
    """b sequences padded on the right to L tokens; causal attention never reads the padding."""

    tokens: Tensor
    """int64 [b, L]."""
    present: Tensor
    """int64 [b, L]: 1 for a token, 0 for padding."""


@dataclass(frozen=True, slots=True)
class Micro:
    """Rows of a batch with the positions of the K tokens that carry loss."""

    rows: Tensor
    """int64 [b]: indices of the rows in the batch."""
    inputs: Packed | Padded
    source: Tensor
    """int64 [K]: flat index (over S, or b * L) of the hidden state that predicts each token."""
    targets: Tensor
    """int64 [K]."""
    cells: Tensor
    """int64 [K]: the tokens' flat indices in [b, T]."""
    width: int
    """T of the batch."""
    temperature: float | Tensor | None = None
    """Temperature of the log-probs: float32 [K], one number for all tokens, or None if no row has one."""

    def grid(self, values: Tensor) -> Tensor:
        """[K] -> [b, T], zero at tokens without loss."""
        flat = values.new_zeros(len(self.rows) * self.width)
        return flat.index_copy(0, self.cells, values).view(len(self.rows), self.width)

    def emptied(self) -> Micro:
        """Drop all loss-carrying tokens but keep the inputs: all gradients are zero."""
        return replace(self, source=self.source[:0], targets=self.targets[:0], cells=self.cells[:0], temperature=None)

    def to(self, device: torch.device) -> Micro:
        """Return a copy with all tensors on `device`; copying from pinned memory does not block."""
        moved: Micro = each_tensor(self, lambda tensor: tensor.to(device, non_blocking=True))
        return moved


class Micros(Iterable[Micro]):
    """A rank's micro-batches on `device`; can be iterated several times.

    Each one is built in the first pass, just before it is used: on a GPU, while the previous one is computed.
    """

    def __init__(
        self, shares: Sequence[Sequence[int]], build: Callable[[Sequence[int]], Micro], device: torch.device
    ) -> None:
        self._shares, self._build, self._device = shares, build, device
        self._built: list[Micro] = []

    def __len__(self) -> int:
        return len(self._shares)

    def __iter__(self) -> Iterator[Micro]:
        for place, share in enumerate(self._shares):
            if place == len(self._built):
                micro = self._build(share)
                pinned = self._device.type == "cuda"
                self._built.append(each_tensor(micro, Tensor.pin_memory) if pinned else micro)
            yield self._built[place].to(self._device)


def build_micro(
    experiences: Sequence[Experience], rows: Sequence[int], width: int, packing: bool = True,
    largest_mask: int | None = LARGEST_MASK,
) -> Micro:  # fmt: skip
    """Return the micro-batch of `rows` of a batch whose longest response has `width` tokens.

    Rows share their prompts if `packing` is true and the mask is small enough (None: no limit); otherwise they are
    padded.
    """
    chosen = [experiences[row] for row in rows]
    prompts = [e.tokens[: e.prompt_length] for e in chosen]
    responses = [e.tokens[e.prompt_length :] for e in chosen]
    longest_prompt, longest_response = max(map(len, prompts)), max(map(len, responses))
    inputs: Packed | Padded
    mask = mask_elements(len(rows), longest_prompt, longest_response)
    if packing and (largest_mask is None or mask <= largest_mask):
        inputs, last, first = pack(prompts, responses)
    else:
        inputs, last, first = _pad(chosen)
    columns = [np.flatnonzero(e.action_mask) for e in chosen]
    source = [np.where(c == 0, last[i], first[i] + c - 1) for i, c in enumerate(columns)]
    return Micro(
        torch.tensor(rows),
        inputs,
        torch.from_numpy(np.concatenate(source)),
        torch.from_numpy(np.concatenate([r[c] for r, c in zip(responses, columns, strict=True)]).astype(np.int64)),
        torch.from_numpy(np.concatenate([c + i * width for i, c in enumerate(columns)])),
        width,
        _temperature([e.temperature for e in chosen], columns),
    )


def _temperature(rows: Sequence[float | np.ndarray | None], columns: Sequence[np.ndarray]) -> float | Tensor | None:
    """Return the temperature of each token in `columns` of its row, NaN for rows without one; one number, or None, if
    all are equal."""
    first = rows[0]
    if not isinstance(first, np.ndarray) and all(not isinstance(row, np.ndarray) and row == first for row in rows):
        return first
    tokens = [
        row[places] if isinstance(row, np.ndarray) else np.full(len(places), np.nan if row is None else row, np.float32)
        for row, places in zip(rows, columns, strict=True)
    ]
    return torch.from_numpy(np.concatenate(tokens))


def _pad(experiences: Sequence[Experience]) -> tuple[Padded, np.ndarray, np.ndarray]:
    longest = max(len(e.tokens) for e in experiences)
    tokens = np.zeros((len(experiences), longest), dtype=np.int64)
    present = np.zeros_like(tokens)
    for i, e in enumerate(experiences):
        tokens[i, : len(e.tokens)] = e.tokens
        present[i, : len(e.tokens)] = 1
    first = np.array([i * longest + e.prompt_length for i, e in enumerate(experiences)])
    return Padded(torch.from_numpy(tokens), torch.from_numpy(present)), first - 1, first
