"""Find training rows that hold a piece of an eval set (n-gram overlap, as in GPT-3: arXiv 2005.14165, appendix C)."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Annotated

from annotated_types import Ge

from trinity_core.data.files import Row, data_files, stream_rows
from trinity_core.errors import DataError
from trinity_core.pipelines.tasks.task_operator import TASK_OPERATORS, Memory, TaskOperator, checked_keys, text_of
from trinity_core.pipelines.tasks.words import digest, ngrams, words


@TASK_OPERATORS.register("contamination_filter")
class ContaminationFilter(TaskOperator):
    """Drop rows that share a run of `ngram` words with a row of an eval set; without `remove`, only mark them.

    A marked row has the column `contaminated`, true or false. An eval text of fewer words than `ngram` counts only
    where it is the whole training text. The n-grams of the eval sets are in memory; the training set is not.
    """

    def __init__(
        self,
        eval_paths: list[str],
        input_keys: list[str],
        split: str = "test",
        ngram: Annotated[int, Ge(1)] = 13,
        remove: bool = True,
    ) -> None:
        self._paths, self._split, self._ngram, self._remove = eval_paths, split, ngram, remove
        self._keys = checked_keys("contamination_filter", input_keys)
        self._known: set[bytes] = set()

    @property
    def files(self) -> Sequence[Path]:
        return [file for path in self._paths for file in data_files(path, self._split)]

    def start(self) -> None:
        for path in self._paths:
            for location, row in stream_rows(path, self._split):
                if isinstance(row, str):
                    raise DataError(f"contamination_filter cannot read the eval set: {location}: {row}")
                self._known |= self._digests(row)

    def _digests(self, row: Row) -> set[bytes]:
        return {digest(run) for key in self._keys for run in ngrams(words(text_of(row, key)), self._ngram)}

    def row(self, row: Row, memory: Memory) -> list[Row]:
        contaminated = not self._known.isdisjoint(self._digests(row))
        if self._remove:
            return [] if contaminated else [row]
        return [{**row, "contaminated": contaminated}]
