"""Data-Juicer's operators on experiences."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from trinity_core.data.experience import Experience
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
    (`text_len`, `llm_quality_score` ...), for `reward_shaping_mapper`. `operators` is a list as in Data-Juicer's own
    configuration, `config_path` such a file. Raises TrinityError where an operator changes a prompt or a response,
    since the tokens would stay what they are.
    """
    rows = [_row(place, each) for place, each in enumerate(experiences)]
    kept = []
    for left in process_rows(rows, data_juicer_server, operators, config_path):
        given = rows[left[PLACE]]
        if changed := [name for name in TEXTS if left[name] != given[name]]:
            raise TrinityError(
                f"data_juicer: an operator changes the {changed[0]} of an experience, but its tokens are those that "
                "were sampled; use such operators in the task pipeline"
            )
        experience = experiences[left[PLACE]]
        experience.info |= _numbers(measured(left))
        kept.append(experience)
    return kept


def _row(place: int, experience: Experience) -> Row:
    texts = {name: str(experience.info.get(name, "")) for name in TEXTS}
    return {PLACE: place, **texts, "text": "\n".join(texts.values()), "reward": experience.reward}


def _numbers(statistics: Mapping[str, Any]) -> dict[str, float]:
    return {name: float(value) for name, value in statistics.items() if isinstance(value, int | float)}
