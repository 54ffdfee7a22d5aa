"""Keep rows whose text is neither too short nor too long."""

from __future__ import annotations

from typing import Annotated

from annotated_types import Ge

from trinity_core.data.files import Row
from trinity_core.errors import InputError
from trinity_core.pipelines.tasks.task_operator import TASK_OPERATORS, Memory, TaskOperator, checked_keys, text_of


@TASK_OPERATORS.register("text_length_filter")
class TextLengthFilter(TaskOperator):
    """Keep rows in which the text of each column has `min_len` to `max_len` characters, both included."""

    def __init__(
        self,
        input_keys: list[str],
        min_len: Annotated[int, Ge(0)] = 1,
        max_len: Annotated[int, Ge(0)] | None = None,
    ) -> None:
        self._keys = checked_keys("text_length_filter", input_keys)
        self._min, self._max = min_len, float("inf") if max_len is None else max_len
        if self._max < self._min:
            raise InputError(f"text_length_filter: max_len {max_len} is below min_len {min_len}")

    def row(self, row: Row, memory: Memory) -> list[Row]:
        return [row] if all(self._min <= len(text_of(row, key)) <= self._max for key in self._keys) else []
