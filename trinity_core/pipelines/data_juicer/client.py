"""Lets a Data-Juicer server process rows, or experiences as the operator `data_juicer`."""

from __future__ import annotations

import logging
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cache
from typing import Any, Protocol

from trinity_core.base.errors import InputError, TransientFault, TrinityError
from trinity_core.base.files import expanded
from trinity_core.base.lazy import httpx
from trinity_core.config import source
from trinity_core.config.findings import ConfigError
from trinity_core.data.experience import Experience
from trinity_core.data.values import number_of
from trinity_core.pipelines.operators import OPERATORS

log = logging.getLogger(__name__)

Row = dict[str, Any]
Step = Mapping[str, Any]

STATISTICS, SCORE, RECORD = "__dj__stats__", "_score", "_record"
"""Column with the filters' statistics; suffixes of a model's score and of its record, which is empty if there was no
verdict."""
SECONDS = 3000.0
"""Time limit for the operators on one call's rows. They may include a model."""
READ = ("process", "text_keys")
"""Keys of a Data-Juicer configuration that affect rows; the others are about its own files."""
PLACE = "trinity_row"
TEXTS = ("prompt", "response")


class Processes(Protocol):
    def process(self, rows: Sequence[Row], steps: Sequence[Step]) -> list[Row]: ...


@dataclass(frozen=True)
class DataJuicer:
    """A server that is already running."""

    url: str
    key: str = ""

    def process(self, rows: Sequence[Row], steps: Sequence[Step]) -> list[Row]:
        """See `Processes`. Raises TrinityError if an operator fails, TransientFault if no server answers."""
        try:
            answer = httpx.post(
                f"{self.url.rstrip('/')}/process",
                json={"rows": list(rows), "process": [dict(step) for step in steps]},
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
    """Return Data-Juicer's operators with their arguments, as given or from its own configuration file.

    Raises InputError unless exactly one of the two is given with a list of operators.
    """
    if (operators is None) == (config_path is None):
        raise InputError("data_juicer takes either `operators` or `config_path`", key="config_path")
    configuration: Any = {"process": operators} if config_path is None else _read(config_path)
    steps = configuration.get("process")
    if not isinstance(steps, Sequence) or not steps or not all(map(_is_step, steps)):
        where = config_path or "data_juicer"
        raise InputError(f"{where}: `process` must be a list of operators, each `name: arguments`", key="process")
    key = configuration.get("text_keys")
    default = {"text_key": key if isinstance(key, str) else key[0]} if key else {}
    return [{name: {**default, **(args or {})} for name, args in step.items()} for step in steps]


def _is_step(step: Any) -> bool:
    """True for `name: arguments`, where arguments may be missing."""
    return isinstance(step, Mapping) and len(step) == 1 and isinstance(next(iter(step.values())), Mapping | None)


def measured(left: Row) -> dict[str, Any]:
    """Return the filters' statistics of a row. Data-Juicer scores 0 if a model gave no verdict; such scores are left
    out."""
    statistics = {name: value for name, value in (left.get(STATISTICS) or {}).items() if value is not None}
    unjudged = {
        name.removesuffix(RECORD) + SCORE for name, value in statistics.items() if name.endswith(RECORD) and not value
    }
    return {name: value for name, value in statistics.items() if name not in unjudged}


def _read(path: str) -> dict[str, Any]:
    if not isinstance(path, str):
        raise InputError("`config_path` must be a path", key="config_path")
    return _contents(path)


@cache
def _contents(path: str) -> dict[str, Any]:
    """Read the file once, so that a run keeps its initial configuration."""
    try:
        configuration = source.read(expanded(path), None).valid_tree()
    except ConfigError as error:
        raise InputError(f"the Data-Juicer configuration cannot be used: {error.problems[0]}", key=error.key) from None
    if not configuration:
        raise InputError(f"the Data-Juicer configuration {path} has no keys", key=str(path))
    if unread := [key for key in configuration if key not in READ]:
        log.warning("without effect in %s, as rows come from the pipeline: %s", path, ", ".join(unread))
    return configuration


@OPERATORS.register("data_juicer")
def data_juicer(
    experiences: list[Experience],
    data_juicer_server: Processes,
    operators: list[dict[str, Any]] | None = None,
    config_path: str | None = None,
) -> list[Experience]:
    """Run Data-Juicer's operators on the texts of experiences: rows of `prompt`, `response`, `text`, `reward`.

    Experiences whose rows a filter drops are dropped. Filters' statistics are written to `info` by name (`text_len`,
    `llm_quality_score` ...), for `reward_shaping_mapper`. A changed `reward` becomes the experience's; answers without
    a verdict keep a null reward. `operators` is a list as in Data-Juicer's own configuration, `config_path` such a
    file. Raises TrinityError if an operator changes a prompt or a response, because the tokens would not change with
    it, or if a changed reward is not a finite number.
    """
    rows = [_row(index, experience) for index, experience in enumerate(experiences)]
    shaped = []
    for left in data_juicer_server.process(rows, steps_of(operators, config_path)):
        row = rows[left[PLACE]]
        if changed := [name for name in TEXTS if left[name] != row[name]]:
            raise TrinityError(
                f"data_juicer: an operator changes the {changed[0]} of an experience, but its tokens are those that "
                "were sampled; use such operators in the task pipeline",
                key=changed[0],
            )
        experience = experiences[left[PLACE]]
        experience.info |= _numbers(measured(left))
        shaped.append(_rewarded(experience, left.get("reward")))
    return shaped


def _rewarded(experience: Experience, reward: Any) -> Experience:
    """Return the experience with this total reward; token rewards stay. Null columns come back as None or NaN."""
    total, number = experience.total_reward, number_of(reward)
    if total is None and (reward is None or reward != reward):
        return experience
    if total is None or number is None or not math.isfinite(number):
        raise TrinityError(
            f"data_juicer: an operator changes the reward {total} of an experience to {reward}", key="reward"
        )
    if number == total:
        return experience
    return replace(experience, reward=number - total + (experience.reward or 0.0))


def _row(index: int, experience: Experience) -> Row:
    texts = {name: str(experience.info.get(name, "")) for name in TEXTS}
    return {PLACE: index, **texts, "text": "\n".join(texts.values()), "reward": experience.total_reward}


def _numbers(statistics: Mapping[str, Any]) -> dict[str, float]:
    return {name: float(value) for name, value in statistics.items() if isinstance(value, int | float)}
