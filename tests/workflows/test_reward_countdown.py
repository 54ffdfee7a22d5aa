import json
from fractions import Fraction

import pytest
from raising import raising

from trinity_core.base.errors import DataError
from trinity_core.workflows.rewards.countdown import countdown_reward, evaluate, toolcall_reward

TASK = {"nums": [3, 5, 7, 2], "target": 24}


def score(response, task=TASK, truth=None, **args):
    return countdown_reward(prompt="", response=response, truth=truth, task=task, **args)


@pytest.mark.parametrize("expression", ["(5 + 7) * (3 - 2) + 12", "7 * 3 + 5 - 2", "7*3+5-2 = 24", "\n7*3 + (5-2)\n"])
def test_the_target_and_each_number_once(expression):
    right = expression != "(5 + 7) * (3 - 2) + 12"
    assert score(f"so <answer>{expression}</answer>")["accuracy"] == right


def test_the_last_answer_counts():
    assert score("<answer>1</answer> no, <answer>7*3+5-2</answer>")["accuracy"] == 1
    assert score("<answer>7*3+5-2</answer> no, <answer>1</answer>") == {"accuracy": 0.0, "format": 0.1}
    assert score("7*3+5-2") == {"accuracy": 0.0, "format": 0.0}


def test_puzzle_may_be_given_as_reference_answer():
    assert score("<answer>2+2</answer>", task={}, truth={"nums": [2, 2], "target": 4})["accuracy"] == 1
    assert score("<answer>2+2</answer>", {"n": [2, 2], "t": 4}, numbers_key="n", target_key="t")["accuracy"] == 1
    text = '{"numbers": [2, 3, 5], "target": 16}'  # as in the data of Trinity-RFT's example
    for expression, accuracy in (("(3 + 5) * 2", 1.0), ("3 + 5 + 2", 0.0)):
        assert score(f"<answer>{expression}</answer>", {"answer": text}, text)["accuracy"] == accuracy
    with raising(DataError, key="nums"):
        score("<answer>2+2</answer>", task={})


@pytest.mark.parametrize("truth", ["{7*3} + 5 - 2", "{'nums': [1]}", "24", "[24]", ""])
def test_columns_are_used_beside_a_reference_that_is_no_object(truth):
    assert score("<answer>7*3+5-2</answer>", truth=truth)["accuracy"] == 1


def test_values_are_exact():
    assert evaluate("1 / 3 * 3") == ([1, 3, 3], Fraction(1))
    assert evaluate("-(2 - 5) * 3") == ([2, 3, 5], Fraction(9))
    assert evaluate("+(2 - -5)") == ([2, 5], Fraction(7))
    assert evaluate("10 / 4") == ([4, 10], Fraction(5, 2))


@pytest.mark.parametrize(
    "text",
    [
        "",
        "1 +",
        "1 / 0",
        "2 ** 9",
        "9 ** 9 ** 9",
        "abs(3)",
        "__import__('os')",
        "True + 1",
        "1.5",
        "x",
        "1 " * 300,
        "~3",
        "1_0",
        "0x10",
        "5 // 2",
        "(" * 99,
    ],
)
def test_other_syntax_is_not_an_expression(text):
    assert evaluate(text) is None


def called(response, truth):
    return toolcall_reward(prompt="", response=response, truth=truth, task={})["accuracy"]


BOOK = {"name": "book", "arguments": {"nights": 1, "kind": "single"}}
OTHER = {"name": "leave", "arguments": {}}


@pytest.mark.parametrize(
    "form",
    [
        BOOK,
        [BOOK],
        {"name": "book", "arguments": json.dumps(BOOK["arguments"])},
        {"type": "function", "function": BOOK},
        {"id": "1", "type": "function", "function": {"name": "book", "arguments": json.dumps(BOOK["arguments"])}},
        {"role": "assistant", "content": None, "tool_calls": [{"type": "function", "function": BOOK}]},
        {"type": "function_call", "call_id": "1", "name": "book", "arguments": json.dumps(BOOK["arguments"])},
        {"type": "tool_use", "id": "1", "name": "book", "input": BOOK["arguments"]},
        {"name": "book", "parameters": BOOK["arguments"]},
        [json.dumps(BOOK)],
    ],
)
def test_calls_are_understood_in_any_form(form):
    wrong = {"name": "book", "arguments": {"nights": 2, "kind": "single"}}
    for truth in (form, json.dumps(form), json.dumps(json.dumps(form))):
        assert [called(json.dumps([answer]), truth) for answer in (BOOK, wrong, OTHER)] == [1.0, 0.0, 0.0]
    assert called(json.dumps(form), [BOOK]) == 1.0 and called(json.dumps(form), [wrong]) == 0.0


@pytest.mark.parametrize(
    "one, other, same",
    [
        (1, 1.0, True),
        (0, -0.0, True),
        ([1, {"a": 2.0}], [1.0, {"a": 2}], True),
        (10**20, 1e20, True),
        ({"a": 1, "b": 2}, {"b": 2, "a": 1}, True),
        (1, True, False),
        (0, False, False),
        (0, None, False),
        (1, "1", False),
        (1.5, 1, False),
        ([1, 2], [2, 1], False),
        ({"a": None}, {}, False),
        ("a", "A", False),
        (10**17 + 1, 10**17, False),
    ],
)
def test_arguments_are_compared_as_json_values(one, other, same):
    calls = [json.dumps([{"name": "f", "arguments": {"x": value}}]) for value in (one, other)]
    assert called(*calls) == called(*reversed(calls)) == float(same)


def test_calls_in_any_order_none_too_many():
    assert called(json.dumps([OTHER, BOOK]), [BOOK, OTHER]) == 1.0
    assert called(json.dumps([BOOK, BOOK]), [BOOK]) == 0.0
    assert called("[]", []) == 1.0 and called("[]", [BOOK]) == 0.0


@pytest.mark.parametrize("calls", ["", "book", [1], [{"arguments": {}}], [{"name": "f", "arguments": "no JSON"}]])
def test_what_is_no_call_is_wrong_as_an_answer_and_an_error_as_a_reference(calls):
    assert called(json.dumps(calls), [BOOK]) == 0.0
    with pytest.raises(ValueError):
        called(json.dumps(calls), calls)
