"""The tool `calculate` of a recipe: values by hand, and nothing but arithmetic."""

from __future__ import annotations

import asyncio

import pytest
from calculate_tool import MOST_CHARACTERS, calculate

from trinity_core.data.tiny import CALCULATE
from trinity_core.workflows.tools import Toolbox, tool_spec


@pytest.mark.parametrize(
    ("expression", "value"),
    [
        ("7-3", "4"),
        (" 2*(3+4) ", "14"),
        ("-4.5+1e3", "995.5"),
        ("0.1+0.2", "0.3"),
        ("10/4", "2.5"),
        ("1/3", "0.3333333333"),
        ("+10/5", "2"),
    ],
)
def test_values(expression, value):
    assert calculate(expression) == value


@pytest.mark.parametrize(
    "expression", ["9**9", "abs(3)", "True", "x", "1 < 2", "[1]", "'a'*9", "1e999", "1/0", "(", ""]
)
def test_anything_else_is_an_error_to_the_model(expression):
    box = Toolbox("calculate")
    assert asyncio.run(box.call("calculate", {"expression": expression})).startswith("error: ")
    assert box.metrics["tool_errors/raised"] == 1


def test_the_work_of_an_expression_is_bounded():
    with pytest.raises(ValueError):
        calculate("9*" * MOST_CHARACTERS + "9")


def test_the_small_models_examples_show_the_tool_as_it_is():
    assert tool_spec(calculate).schema == CALCULATE
