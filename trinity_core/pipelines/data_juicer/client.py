"""Asks a Data-Juicer server to process rows."""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from typing import Any, Protocol

import httpx

from trinity_core.config import source
from trinity_core.config.findings import ConfigError
from trinity_core.errors import InputError, TransientFault, TrinityError
from trinity_core.files import expanded

log = logging.getLogger(__name__)

Row = dict[str, Any]
Step = Mapping[str, Any]
"""A name of Data-Juicer's → its arguments."""

STATISTICS, SCORE, RECORD = "__dj__stats__", "_score", "_record"
"""The column of what filters measure; endings of a model's score and of what it said, empty if that was no verdict."""
SECONDS = 3000.0
"""For the operators on the rows of one call. A model may be among them."""
READ = ("process", "text_keys")
"""Keys of a Data-Juicer configuration that decide what happens to rows; the others are about its own files."""


class Processes(Protocol):
    """Whoever has Data-Juicer's operators."""

    def process(self, rows: Sequence[Row], steps: Sequence[Step]) -> list[Row]:
        """What the operators leave of the rows."""
        ...


@dataclass(frozen=True)
class DataJuicer:
    """A server that runs already."""

    url: str
    key: str = ""

    def process(self, rows: Sequence[Row], steps: Sequence[Step]) -> list[Row]:
        """See `Processes`. Raises TrinityError where an operator fails, TransientFault where no server answers."""
        try:
            answer = httpx.post(
                f"{self.url.rstrip('/')}/process",
                json={"rows": list(rows), "process": [dict(each) for each in steps]},
                headers={"Authorization": f"Bearer {self.key}"} if self.key else {},
                timeout=httpx.Timeout(SECONDS, connect=30.0),
                trust_env=False,
            )
        except httpx.HTTPError as error:
            raise TransientFault(f"the Data-Juicer server at {self.url} does not answer: {error!r}") from error
        content = answer.json() if answer.headers.get("Content-Type") == "application/json" else {}
        if answer.status_code != httpx.codes.OK or "rows" not in content:
            reason = content.get("error") or f"status {answer.status_code}"
            raise TrinityError(f"the Data-Juicer server at {self.url}: {reason}")
        left: list[Row] = content["rows"]
        return left


def steps_of(operators: Sequence[Step] | None, config_path: str | None) -> list[dict[str, Any]]:
    """Data-Juicer's operators with their arguments, as given or from a configuration file of its own.

    Raises InputError unless there is one of the two with a list of operators.
    """
    if (operators is None) == (config_path is None):
        raise InputError("data_juicer takes either `operators` or `config_path`")
    configuration: Any = {"process": operators} if config_path is None else _read(config_path)
    steps = configuration.get("process")
    if not isinstance(steps, Sequence) or not steps or not all(map(_is_step, steps)):
        where = config_path or "data_juicer"
        raise InputError(f"{where}: `process` must be a list of operators, each `name: arguments`")
    key = configuration.get("text_keys")
    default = {"text_key": key if isinstance(key, str) else key[0]} if key else {}
    return [{name: {**default, **(args or {})} for name, args in step.items()} for step in steps]


def _is_step(step: Any) -> bool:
    """True for `name: arguments`, where there may be no arguments."""
    return isinstance(step, Mapping) and len(step) == 1 and isinstance(next(iter(step.values())), Mapping | None)


def measured(left: Row) -> dict[str, Any]:
    """What filters measured of a row. Where a model gave no verdict Data-Juicer scores 0, which is left out here."""
    statistics = {name: value for name, value in (left.get(STATISTICS) or {}).items() if value is not None}
    unjudged = {
        name.removesuffix(RECORD) + SCORE for name, value in statistics.items() if name.endswith(RECORD) and not value
    }
    return {name: value for name, value in statistics.items() if name not in unjudged}


def process_rows(
    rows: Sequence[Row], server: Processes, operators: Sequence[Step] | None = None, config_path: str | None = None
) -> list[Row]:
    """What Data-Juicer's operators leave of the rows. Statistics that filters wrote are in `__dj__stats__`."""
    return server.process(rows, steps_of(operators, config_path))


def _read(path: str) -> dict[str, Any]:
    if not isinstance(path, str):
        raise InputError("`config_path` must be a path")
    return _contents(path)


@cache
def _contents(path: str) -> dict[str, Any]:
    """Read once, so that a run keeps to what it began with."""
    try:
        configuration = source.read(expanded(path), None).valid_tree()
    except ConfigError as error:
        raise InputError(f"the Data-Juicer configuration cannot be used: {error.problems[0]}") from None
    if not configuration:
        raise InputError(f"the Data-Juicer configuration {path} has no keys")
    if unread := [key for key in configuration if key not in READ]:
        log.warning("without effect in %s, as rows come from the pipeline: %s", path, ", ".join(unread))
    return configuration
