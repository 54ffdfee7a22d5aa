"""Data-Juicer's operators on experiences."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from trinity_core.data.experience import Experience
from trinity_core.data.values import number_of
from trinity_core.errors import TrinityError
from trinity_core.pipelines.data_juicer.client import Processes, Row, measured, process_rows
from trinity_core.pipelines.operators import OPERATORS

PLACE = "trinity_row"
TEXTS = ("prompt", "response")


@OPERATORS.register("data_juicer")
def data_juicer(
    experiences: list[Experience],
    data_juicer_server: Processes,
    operators: list[dict[str, Any]] | None = None,
    config_path: str | None = None,
) -> list[Experience]:
    """Run Data-Juicer's operators on the texts of experiences: rows of `prompt`, `response`, `text`, `reward`.

    Experiences whose rows a filter drops are dropped, and what filters measure is written to `info` by its name
    (`text_len`, `llm_quality_score` ...), for `reward_shaping_mapper`. A changed `reward` becomes the experience's;
    that of answers without a verdict stays null. `operators` is a list as in Data-Juicer's own configuration,
    `config_path` such a file. Raises TrinityError where an operator changes a prompt or a response,
    since the tokens would stay what they are, and where a changed reward is no finite number.
    """
    rows = [_row(place, each) for place, each in enumerate(experiences)]
    kept = []
    for left in process_rows(rows, data_juicer_server, operators, config_path):
        row = rows[left[PLACE]]
        if changed := [name for name in TEXTS if left[name] != row[name]]:
            raise TrinityError(
                f"data_juicer: an operator changes the {changed[0]} of an experience, but its tokens are those that "
                "were sampled; use such operators in the task pipeline"
            )
        experience = experiences[left[PLACE]]
        experience.info |= _numbers(measured(left))
        kept.append(_rewarded(experience, left.get("reward")))
    return kept


def _rewarded(experience: Experience, reward: Any) -> Experience:
    """The experience with this total reward; token rewards stay. Null columns come back as None or NaN."""
    total, number = experience.total_reward, number_of(reward)
    if total is None and (reward is None or reward != reward):
        return experience
    if total is None or number is None or not math.isfinite(number):
        raise TrinityError(f"data_juicer: an operator changes the reward {total} of an experience to {reward}")
    if number == total:
        return experience
    return replace(experience, reward=number - total + (experience.reward or 0.0))


def _row(place: int, experience: Experience) -> Row:
    texts = {name: str(experience.info.get(name, "")) for name in TEXTS}
    return {PLACE: place, **texts, "text": "\n".join(texts.values()), "reward": experience.total_reward}


def _numbers(statistics: Mapping[str, Any]) -> dict[str, float]:
    return {name: float(value) for name, value in statistics.items() if isinstance(value, int | float)}
