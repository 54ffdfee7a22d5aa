"""Tools: their schemas, and all kinds of failing calls. None of them raises."""

from __future__ import annotations

import asyncio
import sys
import time
from typing import Annotated, Literal

import pytest
from hypothesis import given
from hypothesis import strategies as st
from pydantic import BaseModel, Field
from raising import raising

from trinity_core.base.errors import InputError
from trinity_core.workflows.tools import KINDS, TOOLS, Toolbox, tool_spec


class Place(BaseModel):
    title: str
    floor: int = 0


def book(
    room: Place, nights: Annotated[int, Field(ge=1)], kind: Literal["single", "double"] = "single", title: str = ""
) -> str:
    """Book a room.

    It may be cancelled.

    Args:
        room: where
            exactly
        nights (int): how many

    Returns:
        the number of the booking
    """
    return f"{title}{room.title}/{room.floor}: {nights} {kind}"


def test_schema_comes_from_signature_and_docstring():
    schema = tool_spec(book).schema
    assert schema["type"] == "function" and schema["function"]["name"] == "book"
    assert schema["function"]["description"] == "Book a room.\n\nIt may be cancelled."
    parameters = schema["function"]["parameters"]
    assert parameters["type"] == "object" and parameters["required"] == ["room", "nights"]
    assert parameters["properties"]["nights"] == {"description": "how many", "minimum": 1, "type": "integer"}
    assert parameters["properties"]["kind"] == {"default": "single", "enum": ["single", "double"], "type": "string"}
    assert parameters["properties"]["room"]["description"] == "where exactly"
    assert parameters["properties"]["title"] == {"default": "", "type": "string"}
    assert parameters["additionalProperties"] is False


def test_a_sphinx_docstring_is_read_too():
    def find(what, most=3):
        """Find.

        :param what: the words
        :param int most: results
        :return: the results
        """

    schema = tool_spec(find).schema["function"]
    assert schema["description"] == "Find."
    assert [parameter["description"] for parameter in schema["parameters"]["properties"].values()] == [
        "the words",
        "results",
    ]


@pytest.mark.parametrize("function", [lambda *numbers: 0, lambda **options: 0, lambda a, /: a, print])
def test_a_function_without_named_arguments_is_no_tool(function):
    with raising(InputError, key=function.__name__):
        tool_spec(function)


def call(box: Toolbox, name: str, arguments) -> str:
    return asyncio.run(box.call(name, arguments))


def test_arguments_are_converted_to_their_types():
    box = Toolbox(book)
    assert call(box, "book", '{"room": {"title": "B"}, "nights": "2"}') == "B/0: 2 single"
    assert call(box, "book", {"room": {"title": "B", "floor": 4}, "nights": 1, "kind": "double"}) == "B/4: 1 double"
    assert box.metrics["tool_calls"] == 2 and box.metrics["tool_errors"] == 0


@pytest.mark.parametrize(
    "arguments",
    ['{"nights": 1}', "no JSON", [1], '{"room": {"title": "B"}, "nights": 0}', None, '{"rooms": 1}', "[" * 9999],
)
def test_wrong_arguments_are_told_to_the_model(arguments):
    box = Toolbox(book)
    assert call(box, "book", arguments).startswith("error: wrong arguments of 'book': ")
    assert box.metrics["tool_errors/arguments"] == 1


def raises() -> str:
    raise KeyError("no such row")


def quits() -> str:
    sys.exit(3)


async def quits_too() -> str:
    raise SystemExit


def stops() -> str:
    raise StopIteration


def hangs() -> str:
    while True:
        time.sleep(0.01)


async def hangs_too() -> str:
    while True:
        try:
            await asyncio.sleep(1000)
        except asyncio.CancelledError:  # a tool that does not let itself be cancelled
            if sys.exc_info()[1].args == ("end",):
                raise


def circle() -> list:
    rows: list = []
    rows.append(rows)
    return rows


@pytest.mark.parametrize(
    ("function", "kind", "text"),
    [
        (raises, "raised", "KeyError: 'no such row'"),
        (quits, "raised", "SystemExit: 3"),
        (quits_too, "raised", "SystemExit"),
        (stops, "raised", "StopIteration"),
        (circle, "raised", "ValueError"),
        (hangs, "timeout", "took longer than 1 s"),
        (hangs_too, "timeout", "took longer than 1 s"),
    ],
)
def test_a_tool_that_fails_is_told_to_the_model(function, kind, text):
    async def main():
        box = Toolbox(function, book, time_limit=1.0 if kind == "timeout" else 60.0)
        answers = [await box.call(function.__name__, {}), await box.call("book", {"room": {"title": "B"}, "nights": 1})]
        for task in asyncio.all_tasks() - {asyncio.current_task()}:
            task.cancel("end")
        return answers, box.metrics

    (failed, worked), metrics = asyncio.run(main())
    assert failed.startswith("error: ") and text in failed
    assert worked == "B/0: 1 single"
    assert metrics["tool_calls"] == 2 and metrics["tool_errors"] == 1
    assert [kind for kind in KINDS if metrics[f"tool_errors/{kind}"]] == [kind]


@given(st.text(), st.one_of(st.none(), st.text(), st.dictionaries(st.text(), st.integers())))
def test_no_call_raises(name, arguments):
    assert call(Toolbox(book), name, arguments).startswith("error: ")


def message(*calls) -> dict:
    return {
        "role": "assistant",
        "tool_calls": [
            {"id": f"c{i}", "function": {"name": name, "arguments": given}} for i, (name, given) in enumerate(calls)
        ],
    }


def test_each_call_of_a_turn_is_answered_in_order():
    async def add(a: int, b: int) -> dict:
        return {"sum": a + b}

    box = Toolbox(add, most_calls=2)
    answers = asyncio.run(box.answers(message(("add", {"a": 1, "b": 2}), ("ad", {}), ("add", {"a": 1, "b": 2}))))
    assert [answer["tool_call_id"] for answer in answers] == ["c0", "c1", "c2"]
    assert {answer["role"] for answer in answers} == {"tool"}
    assert [answer["content"] for answer in answers] == [
        '{"sum": 3}', "error: there is no tool 'ad'; there are add", "error: at most 2 calls at once",
    ]  # fmt: skip
    assert asyncio.run(box.answers({"role": "assistant", "content": "done"})) == []


def test_tools_are_found_by_name(monkeypatch):
    monkeypatch.setitem(TOOLS, "rooms", book)
    assert [tool["function"]["name"] for tool in Toolbox("rooms").schemas] == ["rooms"]
    with raising(InputError, key="roms"):
        Toolbox("roms")
    with raising(InputError, key="book"):
        Toolbox(book, book)
