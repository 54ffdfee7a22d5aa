"""Builds micro-batches as model input: rows that share prompts, packed, or padded rows."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace

import numpy as np
import torch
from torch import Tensor

from trinity_core.data.experience import Experience
from trinity_core.training.batching import LARGEST_MASK, mask_elements
from trinity_core.training.packing import Packed, each_tensor, pack


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

    teacher: Micro | None = None
    """The same K tokens after the prompts that the rows' teacher reads; None if no row has such a prompt."""

    @property
    def for_teacher(self) -> Micro:
        """The same tokens as the teacher reads them."""
        return self if self.teacher is None else self.teacher

    def grid(self, values: Tensor) -> Tensor:
        """[..., K] -> [..., b, T], zero at tokens without loss."""
        flat = values.new_zeros(*values.shape[:-1], len(self.rows) * self.width)
        return flat.index_copy(-1, self.cells, values).unflatten(-1, (len(self.rows), self.width))

    def emptied(self) -> Micro:
        """Drop all loss-carrying tokens but keep the inputs: all gradients are zero."""
        teacher = None if self.teacher is None else self.teacher.emptied()
        source, targets, cells = self.source[:0], self.targets[:0], self.cells[:0]
        return replace(self, source=source, targets=targets, cells=cells, temperature=None, teacher=teacher)

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
        for index, share in enumerate(self._shares):
            if index == len(self._built):
                micro = self._build(share)
                pinned = self._device.type == "cuda"
                self._built.append(each_tensor(micro, Tensor.pin_memory) if pinned else micro)
            yield self._built[index].to(self._device)


def build_micro(
    experiences: Sequence[Experience], rows: Sequence[int], width: int, packing: bool = True,
    largest_mask: int | None = LARGEST_MASK,
) -> Micro:  # fmt: skip
    """Return the micro-batch of `rows` of a batch whose longest response has `width` tokens.

    Rows share their prompts if `packing` is true and the mask is small enough (None: no limit); otherwise they are
    padded.
    """
    members = [experiences[row] for row in rows]
    teacher = None
    if any(e.teacher_prompt is not None for e in members):
        teacher = build_micro([_for_teacher(e) for e in members], range(len(members)), width, packing, largest_mask)
    prompts = [e.tokens[: e.prompt_length] for e in members]
    responses = [e.tokens[e.prompt_length :] for e in members]
    longest_prompt, longest_response = max(map(len, prompts)), max(map(len, responses))
    inputs: Packed | Padded
    mask = mask_elements(len(rows), longest_prompt, longest_response)
    if packing and (largest_mask is None or mask <= largest_mask):
        inputs, last, first = pack(prompts, responses)
    else:
        inputs, last, first = _pad(members)
    columns = [np.flatnonzero(e.action_mask) for e in members]
    source = [np.where(c == 0, last[i], first[i] + c - 1) for i, c in enumerate(columns)]
    return Micro(
        torch.tensor(rows),
        inputs,
        torch.from_numpy(np.concatenate(source)),
        torch.from_numpy(np.concatenate([r[c] for r, c in zip(responses, columns, strict=True)]).astype(np.int64)),
        torch.from_numpy(np.concatenate([c + i * width for i, c in enumerate(columns)])),
        width,
        _temperature([e.temperature for e in members], columns),
        teacher,
    )


def _for_teacher(row: Experience) -> Experience:
    """Return the row as its teacher reads it: after the teacher's prompt, if it has one."""
    if row.teacher_prompt is None:
        return row
    tokens = np.concatenate([row.teacher_prompt, row.tokens[row.prompt_length :]])
    return replace(row, tokens=tokens, prompt_length=len(row.teacher_prompt), teacher_prompt=None)


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
