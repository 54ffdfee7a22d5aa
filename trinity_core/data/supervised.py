"""Supervised data sets (SFT, DPO, expert data): rows as experiences, with loss only on answers."""

from __future__ import annotations

import logging
import re
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Literal

import numpy as np

from trinity_core.base.errors import DataError
from trinity_core.config.schema.buffer import ExperienceBufferConfig
from trinity_core.data import formats
from trinity_core.data.chat import ChatEncoder, EncodedConversation
from trinity_core.data.experience import Experience
from trinity_core.data.files import RejectedRow, Row, RowLocation, fingerprint, read_rows
from trinity_core.data.rejected import RejectedRows
from trinity_core.data.selectors import SelectorRows, TaskSelector, make_selector

log = logging.getLogger(__name__)

Kind = Literal["demonstrations", "preferences"]
CHUNK = 2048
"""Number of rows tokenised together: enough to keep all cores busy, few enough to hold their texts in memory."""


@dataclass(slots=True)
class SupervisedSet:
    """A data set tokenised and checked once, when it is opened; batches are then lookups.

    A row becomes one experience, or for preferences two of the same group: run 0 the chosen, run 1 the rejected answer.
    """

    name: str
    kind: Kind
    rows: list[list[EncodedConversation]]
    locations: list[RowLocation]
    rejected: list[RejectedRow]
    order: TaskSelector = field(repr=False)
    fingerprint: str
    """Hash of the usable rows as read, in order; it does not depend on the path."""

    @classmethod
    def open(
        cls,
        config: ExperienceBufferConfig,
        encoder: ChatEncoder,
        seed: int,
        kind: Kind = "demonstrations",
        max_tokens: int | None = None,
        selector: str = "shuffle",
        rejected_rows: RejectedRows | None = None,
    ) -> SupervisedSet:
        """Return the rows of `read_supervised`, in an order; raises DataError like `of`."""
        read = read_supervised(config, encoder, kind, max_tokens)
        return cls.of(read, config.name or "dataset", kind, seed, selector, rejected_rows)

    @classmethod
    def of(
        cls,
        read: SupervisedRows,
        name: str,
        kind: Kind,
        seed: int,
        selector: str = "shuffle",
        rejected_rows: RejectedRows | None = None,
        number: int = 0,
    ) -> SupervisedSet:
        """Put these rows in an order, which differs between data sets of different `number`.

        Raises DataError if none is usable, or more are rejected than `rejected_rows` allows.
        """
        (rejected_rows or RejectedRows()).settle(name, read.rejected, len(read.rows))
        source = SelectorRows(len(read.rows), np.empty((len(read.rows), 0)), (seed, number))
        order = make_selector(selector, source, {})
        return cls(name, kind, read.rows, read.locations, read.rejected, order, read.fingerprint)

    def __len__(self) -> int:
        return len(self.rows)

    @property
    def experiences_per_row(self) -> int:
        """2 for preferences, else 1."""
        return 2 if self.kind == "preferences" else 1

    def experiences(self, index: int, group: str = "") -> list[Experience]:
        """Return the experiences of row `index`, all in `group`."""
        return [
            Experience(
                tokens=conversation.tokens,
                prompt_length=conversation.prompt_length,
                action_mask=conversation.answer[conversation.prompt_length :],
                group=group or f"{self.name}/{index}",
                run=run,
                task_index=index,
                is_expert=True,
            )
            for run, conversation in enumerate(self.rows[index])
        ]

    def batch(self, step: int, size: int) -> list[Experience]:
        """Return the `size` experiences of train step `step` (from 1): a pure function of (data, seed, step, size).

        Batches run across epoch boundaries. Raises DataError if `size` splits a preference pair.
        """
        count = rows_of_batch(size, self.experiences_per_row)
        drawn = self.order.draw((step - 1) * count, count, ())
        return [
            experience
            for slot, row in enumerate(drawn)
            for experience in self.experiences(row, f"{self.name}/{step}/{slot}")
        ]

    def steps(self, epochs: int, size: int) -> int:
        """Return the fewest batches of `size` experiences that train each row at least `epochs` times."""
        return -(-epochs * len(self) * self.experiences_per_row // size)


def rows_of_batch(size: int, experiences_per_row: int) -> int:
    """Return the rows of a batch of `size` experiences. Raises DataError if `size` splits a preference pair."""
    if size % experiences_per_row:
        raise DataError(
            f"a batch of preference pairs needs an even size, not train_batch_size = {size}",
            key="buffer.train_batch_size",
        )
    return size // experiences_per_row


@dataclass(frozen=True, slots=True)
class SupervisedRows:
    rows: list[list[EncodedConversation]]
    locations: list[RowLocation]
    rejected: list[RejectedRow]
    fingerprint: str
    """Hash of the usable rows as read, in order; it does not depend on the path."""


def read_supervised(
    config: ExperienceBufferConfig, encoder: ChatEncoder, kind: Kind = "demonstrations", max_tokens: int | None = None,
    limit: int | None = None,
) -> SupervisedRows:  # fmt: skip
    """Read, render, tokenise and check all rows, or the first `limit`; those longer than `max_tokens` are rejected.

    Raises DataError if the data set cannot be read.
    """
    encoder = encoder.with_template(config.format.chat_template)
    storage = config.storage_type or "file"
    read = read_rows(config.path or "", config.split, config.subset_name, storage, config.name, limit)
    for notice in formats.unread_columns(read.rows, config.format) if limit is None else ():
        log.warning("data set '%s': %s", config.name, notice)
    usable_rows: list[list[EncodedConversation]] = []
    locations: list[RowLocation] = []
    rejected = list(read.rejected)
    usable: list[Row] = []
    for start in range(0, len(read.rows), CHUNK):
        stretch = slice(start, start + CHUNK)
        encoded = encode_rows(read.rows[stretch], config.format, encoder, kind, max_tokens)
        for row, encoded_row, location in zip(read.rows[stretch], encoded, read.locations[stretch], strict=True):
            if isinstance(encoded_row, DataError):
                rejected.append(RejectedRow(location, str(encoded_row)))
            else:
                samples = [[piece] for piece in encoded_row] if config.format.prompt_type == "text" else [encoded_row]
                usable_rows += samples
                locations += [location] * len(samples)
                usable.append(row)
    return SupervisedRows(usable_rows, locations, rejected, fingerprint(usable))


def encode_rows(
    rows: list[dict[str, object]],
    form: formats.FormatConfig,
    encoder: ChatEncoder,
    kind: Kind = "demonstrations",
    max_tokens: int | None = None,
) -> list[list[EncodedConversation] | DataError]:
    """Return the tokens of each row's conversations, or the error that rejects it."""
    conversations: list[list[formats.Conversation] | DataError] = []
    for row in rows:
        try:
            pair = formats.preference(row, form) if kind == "preferences" else (formats.demonstration(row, form),)
            conversations.append(list(pair))
        except DataError as error:
            conversations.append(error)
    encoded = iter(
        encoder.conversations([conversation for row in conversations if isinstance(row, list) for conversation in row])
    )
    results: list[list[EncodedConversation] | DataError] = []
    for pair_or_error in conversations:
        if isinstance(pair_or_error, DataError):
            results.append(pair_or_error)
        elif form.prompt_type == "text":
            text = next(encoded)
            results.append(text if isinstance(text, DataError) else _pieces(text, max_tokens))
        else:
            results.append(_accepted([next(encoded) for _ in pair_or_error], max_tokens))
    return results


def _pieces(text: EncodedConversation, max_tokens: int | None) -> list[EncodedConversation]:
    """Cut a text into pieces of at most `max_tokens`. Each begins with the last token of the one before, so that every
    token but the text's first is predicted once."""
    step = max((max_tokens or len(text.tokens)) - 1, 1)
    parts = [text.tokens[start : start + step + 1] for start in range(0, len(text.tokens) - 1, step)]
    return [EncodedConversation(part, text.answer[: len(part)]) for part in parts]


def _accepted(
    row: list[EncodedConversation | DataError], max_tokens: int | None
) -> list[EncodedConversation] | DataError:
    accepted: list[EncodedConversation] = []
    for conversation in row:
        if isinstance(conversation, DataError):
            return conversation
        if problem := too_long(conversation, max_tokens):
            return problem
        accepted.append(conversation)
    return accepted


def too_long(conversation: EncodedConversation, max_tokens: int | None) -> DataError | None:
    """Return the error for a conversation with too many tokens; None if it fits."""
    count = len(conversation.tokens)
    if max_tokens is None or count <= max_tokens:
        return None
    return DataError(f"the row has {count} tokens, more than model.max_model_len = {max_tokens}")


def has_empty_thought(conversation: EncodedConversation, encoder: ChatEncoder) -> bool:
    """True if the last answer begins with `<think></think>`, as Qwen3's template writes it where a row has no thought.

    It carries loss, and teaches the policy not to think; with `model.enable_thinking: false` it belongs to the prompt.
    """
    starts = np.flatnonzero(np.diff(conversation.answer, prepend=False) & conversation.answer)
    text = encoder.tokenizer.decode(conversation.tokens[starts[-1] : starts[-1] + 32].tolist())
    return re.match(r"\s*<think>\s*</think>", text) is not None


def apportioned(count: int, shares: Sequence[float]) -> list[int]:
    """Return how many of the first `count` rows each set provides: integers that add up to `count` and never shrink as
    it grows."""
    counts, left, weight = [], count, sum(shares)
    for share in shares[:-1]:
        part = min(int(left * share / weight + 0.5), left)
        counts.append(part)
        left, weight = left - part, weight - share
    return [*counts, left]


@dataclass(frozen=True)
class SupervisedMixture:
    """Data sets that provide rows of every batch in proportion to their shares, each in its own order.

    Epochs count for the first one; the others are repeated, or used in part.
    """

    sets: Sequence[SupervisedSet]
    shares: Sequence[float]

    def __len__(self) -> int:
        return sum(map(len, self.sets))

    @property
    def experiences_per_row(self) -> int:
        return self.sets[0].experiences_per_row

    def take(self, start: int, count: int, prefix: str = "") -> list[Experience]:
        """Return the experiences of `count` rows after `start` rows; with `prefix` groups are numbered within it."""
        first_counts, last_counts = apportioned(start, self.shares), apportioned(start + count, self.shares)
        experiences: list[Experience] = []
        for data, first, last in zip(self.sets, first_counts, last_counts, strict=True):
            for slot, row in enumerate(data.order.draw(first, last - first, ())):
                experiences += data.experiences(row, f"{data.name}/{prefix}/{slot}" if prefix else "")
        return experiences

    def batch(self, step: int, size: int) -> list[Experience]:
        count = rows_of_batch(size, self.experiences_per_row)
        return self.take((step - 1) * count, count, str(step))

    def steps(self, epochs: int, size: int) -> int:
        """Return the fewest batches that train each row of the first set at least `epochs` times."""
        count, rows = rows_of_batch(size, self.experiences_per_row), epochs * len(self.sets[0])
        steps = max(1, int(rows * sum(self.shares) / self.shares[0]) // count - 1)
        while apportioned(steps * count, self.shares)[0] < rows:
            steps += 1
        return steps
