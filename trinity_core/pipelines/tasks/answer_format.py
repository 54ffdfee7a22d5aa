"""Keep rows whose text has a given form, such as an answer that a reward can read."""

from __future__ import annotations

import regex

from trinity_core.data.files import Row
from trinity_core.errors import InputError
from trinity_core.pipelines.tasks.task_operator import TASK_OPERATORS, Memory, Outcome, TaskOperator, Unusable, text_of

SEARCH_SECONDS = 1.0
"""For a row. Some expressions take time that doubles with every letter, such as `(a|aa)+$`."""


@TASK_OPERATORS.register("format_check_filter")
class FormatCheckFilter(TaskOperator):
    """Keep rows in whose column `input_key` the regular expression `pattern` is found."""

    def __init__(self, input_key: str, pattern: str) -> None:
        self._key = input_key
        try:
            self._pattern = regex.compile(pattern)
        except regex.error as error:
            raise InputError(f"format_check_filter: pattern {pattern!r} is no regular expression: {error}") from error

    def row(self, row: Row, memory: Memory) -> Outcome:
        try:
            return [row] if self._pattern.search(text_of(row, self._key), timeout=SEARCH_SECONDS) else []
        except TimeoutError:
            return Unusable(f"format_check_filter: searching '{self._key}' took longer than {SEARCH_SECONDS:g} s")
