"""Data-Juicer's operators on the rows of a task pipeline."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from trinity_core.data.files import Row
from trinity_core.errors import InputError
from trinity_core.files import expanded
from trinity_core.pipelines.data_juicer.client import PLACE, Processes, Step, measured, steps_of
from trinity_core.pipelines.tasks.task_operator import TASK_OPERATORS, Memory, Outcome, TaskOperator

WHOLE = ("deduplicator", "selector", "grouper", "aggregator")
"""Suffixes of Data-Juicer's operators that need all rows of a data set at once."""
OWN = "__dj__"


@TASK_OPERATORS.register("data_juicer")
class DataJuicerOperators(TaskOperator):
    """Run Data-Juicer's filters and mappers on rows. `operators` is a list as in its own configuration, `config_path`
    such a file.

    Filters' statistics become columns of the same name (`text_len`, `llm_quality_score` …). Operators that need all
    rows of a data set at once are refused, because rows are processed in chunks.
    """

    def __init__(
        self,
        data_juicer_server: Processes | None = None,
        operators: list[dict[str, Any]] | None = None,
        config_path: str | None = None,
    ) -> None:
        self._server, self._path = data_juicer_server, config_path
        self._steps: list[Step] = list(steps_of(operators, config_path))
        names = [name for step in self._steps for name in step]
        if whole := [name for name in names if name.endswith(WHOLE)]:
            raise InputError(
                f"data_juicer: {whole[0]} looks at all rows of a data set at once, but rows pass in chunks; leave it "
                "out, or run Data-Juicer on the file first. duplicate_filter finds duplicates across chunks.",
                key="operators",
            )

    @property
    def files(self) -> Sequence[Path]:
        return () if self._path is None else (expanded(self._path),)

    def start(self) -> None:
        """See `TaskOperator`. Without rows, the server checks that it can create the operators."""
        assert self._server is not None, "whoever runs the pipeline gives the server"
        self._server.process([], self._steps)

    def rows(self, rows: Sequence[Row], memory: Memory) -> list[Outcome]:
        """See `TaskOperator`. Raises TransientFault if the server is away, TrinityError if an operator fails."""
        assert self._server is not None, "whoever runs the pipeline gives the server"
        columns = list(dict.fromkeys(key for row in rows for key in row))
        sent = [{PLACE: place, **{key: row.get(key) for key in columns}} for place, row in enumerate(rows)]
        outcomes: list[list[Row]] = [[] for _ in rows]
        for left in self._server.process(sent, self._steps):
            place = left[PLACE]
            outcomes[place].append(_row(left, rows[place]))
        return list(outcomes)


def _row(left: Row, original: Row) -> Row:
    """Return a row without Data-Juicer's own columns, and with its statistics."""
    kept = {
        key: value
        for key, value in left.items()
        if key != PLACE and not key.startswith(OWN) and (value is not None or key in original)
    }
    return kept | measured(left)
