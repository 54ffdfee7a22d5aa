"""Keep rows whose text has a given form, such as an answer that a reward can read."""

from __future__ import annotations

import re

from trinity_core.data.files import Row
from trinity_core.errors import InputError
from trinity_core.pipelines.tasks.task_operator import TASK_OPERATORS, Memory, TaskOperator, text_of


@TASK_OPERATORS.register("format_check_filter")
class FormatCheckFilter(TaskOperator):
    """Keep rows in whose column `input_key` the regular expression `pattern` is found."""

    def __init__(self, input_key: str, pattern: str) -> None:
        self._key = input_key
        try:
            self._pattern = re.compile(pattern)
        except re.error as error:
            raise InputError(f"format_check_filter: pattern {pattern!r} is no regular expression: {error}") from error

    def row(self, row: Row, memory: Memory) -> list[Row]:
        return [row] if self._pattern.search(text_of(row, self._key)) else []
