"""Which `format` fits a data set, by the names of its columns and what they hold."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

from trinity_core.config.schema.buffer import FormatConfig
from trinity_core.data import formats
from trinity_core.errors import DataError

Row = formats.Row
PROMPTS = ("prompt", "question", "problem", "instruction", "query", "input", "goal", "text")
ANSWERS = (
    "response", "answer", "solution", "completion", "output", "target", "ground_truth", "final_answer", "label",
    "reward_model.ground_truth",
)  # fmt: skip
CONVERSATIONS = ("messages", "conversations", "conversation", "prompt", "chat")
PREFERRED = (("chosen", "rejected"), ("preferred", "dispreferred"), ("response_chosen", "response_rejected"))
SYSTEM, TOOLS = ("system_prompt", "system"), ("tools", "functions")
FORMATS: Mapping[str, Callable[[Row, FormatConfig], Any]] = {
    "tasks": formats.prompt_messages,
    "evaluation": formats.prompt_messages,
    "demonstrations": formats.demonstration,
    "preferences": formats.preference,
}
"""What reads a row, by the use of its data set (`DataSetReport.use`)."""


def guessed_format(rows: Sequence[Row], use: str) -> dict[str, str]:
    """The keys of the `format` by which the most of these rows can be read, if it is more than half of them; empty if
    none is found, or none is needed."""
    best, most = {}, len(rows) / 2
    for keys in _candidates(rows, use):
        form = FormatConfig.model_validate(keys)
        if (count := sum(_readable(row, form, use) for row in rows)) > most:
            best, most = keys, count
    return best


def _readable(row: Row, form: FormatConfig, use: str) -> bool:
    try:
        FORMATS[use](row, form)
    except DataError:
        return False
    return True


def _candidates(rows: Sequence[Row], use: str) -> Iterator[dict[str, str]]:
    """Formats that the columns of rows suggest, the likeliest first."""
    default = FormatConfig()
    more = _named(rows, "system_prompt_key", SYSTEM) | _named(rows, "tools_key", TOOLS)
    if use == "preferences":
        for chosen, rejected in PREFERRED[::-1]:
            more |= (
                {"chosen_key": chosen, "rejected_key": rejected}
                if any({chosen, rejected} <= row.keys() for row in rows)
                else {}
            )
    asked = [key for key in PROMPTS if any(isinstance(value, str) for value in _values(rows, key))]
    talks = [key for key in CONVERSATIONS if any(isinstance(row.get(key), list) for row in rows)]
    for kind, key, given in (
        *(("messages", key, {"messages_key": key}) for key in talks),
        *(("plaintext", key, {"prompt_key": key}) for key in asked),
        *((("messages", "", {}),) if use == "preferences" else ()),
    ):
        answers = {} if kind == "messages" and use == "demonstrations" else _named(rows, "response_key", ANSWERS, key)
        keys = {"prompt_type": kind, **given, **more, **(answers if use != "preferences" else {})}
        yield {name: column for name, column in keys.items() if column != getattr(default, name)}


def _values(rows: Sequence[Row], key: str) -> list[Any]:
    """The values of a column that are given; 0 and false are."""
    values = (formats.column(row, key) for row in rows if formats.has_column(row, key))
    return [value for value in values if value is not None and value not in ("", [])]


def _named(rows: Sequence[Row], setting: str, names: Sequence[str], taken: str = "") -> dict[str, str]:
    """The first of these columns that some row has a value of, as this setting."""
    name = next((name for name in names if name != taken and _values(rows, name)), None)
    return {} if name is None else {setting: name}
