"""Keep the first of equal rows. Paraphrases are not found: only case, punctuation and spaces may differ."""

from __future__ import annotations

from trinity_core.data.files import Row
from trinity_core.pipelines.tasks.task_operator import TASK_OPERATORS, Memory, TaskOperator, checked_keys, text_of
from trinity_core.pipelines.tasks.words import digest, words


@TASK_OPERATORS.register("duplicate_filter")
class DuplicateFilter(TaskOperator):
    """Drop rows whose columns `input_keys` hold the same text as those of an earlier row.

    With `ignore_format` texts that differ in case, punctuation or spaces count as the same.
    """

    def __init__(self, input_keys: list[str], ignore_format: bool = True) -> None:
        self._keys = checked_keys("duplicate_filter", input_keys)
        self._ignore_format = ignore_format

    def row(self, row: Row, memory: Memory) -> list[Row]:
        texts = [text_of(row, key) for key in self._keys]
        # Symbols can be all that tells two formulas apart, so a text without words is compared as it is.
        compared = [" ".join(words(text)) or text for text in texts] if self._ignore_format else texts
        return [row] if memory.add(self.label, digest("\0".join(compared), 16)) else []
