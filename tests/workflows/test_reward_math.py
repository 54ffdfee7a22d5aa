import re

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st
from raising import raising

from trinity_core.errors import DataError
from trinity_core.workflows.rewards.boxed import math_boxed_reward, math_dapo_reward
from trinity_core.workflows.rewards.math import final_answer, format_reward, math_fast, math_reward, readings, reference

integers = st.integers(-(10**15) + 1, 10**15 - 2) | st.integers(-20, 20)
written = st.builds(
    lambda sign, zeros, digits: sign + "0" * zeros + digits,
    st.sampled_from(["", "-", "+"]),
    st.integers(0, 2),
    st.integers(0, 999).map(str),
)


def full(response, truth, **args):
    return math_reward(prompt="", response=response, truth=truth, task={}, **args)


@given(answer=written | integers.map(str), truth=written | integers.map(str))
@example("-0", "0")
@example("+7", "007")
@settings(max_examples=60)
def test_the_fast_path_gives_the_verifiers_verdict(answer, truth):
    pytest.importorskip("math_verify")
    response, reference_answer = f"So it is.\n#### {answer}", f"work\n#### {truth}"
    fast = math_fast(response=response, truth=reference_answer)
    assert fast is not None and fast == full(response, reference_answer)


@given(text=st.text("#0123456789 -+.,$%{}\\boxed\n", max_size=20), truth=st.sampled_from(["#### 5", "#### -12", "3"]))
@settings(max_examples=60)
def test_fast_path_never_contradicts_the_verifier(text, truth):
    pytest.importorskip("math_verify")
    fast = math_fast(response=text, truth=truth)
    if fast is not None:
        assert fast == full(text, truth)


@pytest.mark.parametrize(
    "text, answer",
    [
        ("2+3=<<2+3=5>>5 apples.\n#### 5", "5"),
        ("#### 5\nor rather\n#### 6", "6"),
        ("#### 7 apples", "7 apples"),
        ("thus \\boxed{\\frac{1}{2}}.", "\\frac{1}{2}"),
        ("#### 5 and \\boxed{6}", "6"),
        ("\\boxed{6}\n#### 5", "5"),
        ("The answer is 5", None),
        ("5", None),
        ("####", None),
        ("#### \n5", None),
        ("<answer>5</answer> or rather <answer> 6\n</answer>", "6"),
        ("in <answer> tags: <answer>5</answer>, closed by </answer>", "5"),
        ("#### 18 </answer> \n", "18"),
        ("<answer>#### 18</answer> .", "18"),
        ("<answer>\n#### 18\n</answer>", "18"),
        ("#### <answer>18</answer> it is", "18"),
        ("so #### 18\n<answer></answer>", "18"),
        ("so #### 18 <answer> </answer>", "18"),
        ("<answer>18</answer> <answer></answer>", "18"),
        ("<answer></answer>", None),
        ("<answer>5", None),
        ("5</answer>", None),
        ("</answer><answer>", None),
        ("\\boxed{5", None),
        ("\\boxed{ }", None),
        ("", None),
    ],
)
def test_only_a_declared_answer_counts(text, answer):
    assert final_answer(text) == answer


RIGHT = {
    "7": r"""$7 | 7.00 | 7 apples | 2+5 | 7. | 7 dollars | 7 hours. | €7 | US$7 | Rs. 7 | **7** | `7` | ~7
        The answer is 7 | 7 (eggs) | 7 % | 7 times | 7\text{ times} | 7 times as many | 7 dollars/day | $7/day
        7~\text{miles per hour} | 7 km/h | 7 m/s | 7 ° | 7 °F | 7 ¢ | 7 cm^2 | 7 m² | 7 points | 7 pairs
        7 more apples | Jo has a total of 7 eggs at the farmers' market.""",
    "1000": "1,000 | $1,000. | 1 thousand | 10 hundred dollars | \\textbf{1{,}000} m | 1\\text{ thousand}",
    "-3": "-3 degrees | –3 | −3 °C | -$3",
    "24": "2 dozen | 2 dozen eggs | 48 half-hours",
    "1800": "about 1,800 km | \\approx 1800",
    "0.5": r"\frac{1}{2} | $\frac12$ | \(\frac{1}{2}\) | 2 quarters | .5 miles",
}
WRONG = {
    "7": r"""7.5 | 17 | -7 | seven | 7 or 8 | 8 or 7 | 8, 7 | 5 6 7 | between 5 and 7 | x - 7 | x \neq 7
        \pm 7 | 7! | \log 7 | 14 \div 7 | 3 \cdot 7 | 2 \times 7 | (6, 7) | \{6, 7\} | not 7 | isn't 7
        minus 7 | x 7 | -7 dollars. | 17 dollars | 7 thousand | 7 dozen | 7\text{ dozen} | 7 lakh
        7\text{ lakh} | 7 万元 | 7 M | 7 and three quarters | 7½ cups | 7 pi | 7 and a half | 7 hundredths
        zero point 7 | six point 7 | three quarters 7 | twenty 7 | three times 7 | times 7 | less than 7
        at least 7 | over 7 | 7 or less | 7 or eight | 6 & 7 | 6 @ 7 | 6 → 7 | 6 ## $7$ | 6 \foo 7 | \ne 7""",
    "10": "8-10 | 2 dozen | 10 half-hours | 10 quarters",
}


@pytest.mark.parametrize(
    "answer, truth, right",
    [
        (answer.strip(), truth, right)
        for table, right in ((RIGHT, True), (WRONG, False))
        for truth, answers in table.items()
        for answer in re.split(r"\||\n", answers)
    ],
)
def test_what_math_verify_decides(answer, truth, right):
    pytest.importorskip("math_verify")
    assert full(f"\\boxed{{{answer}}}", f"#### {truth}") == {"accuracy": float(right)}
    assert full(f"#### {answer}", f"#### {truth}") == {"accuracy": float(right)}


@pytest.mark.parametrize(
    "question, answer, right",
    [
        ("How many dozen eggs did she buy?", "7 dozen", True),
        ("How much, in thousands of dollars, does he pay?", "7 thousand dollars", True),
        ("How many state quarters are there?", "7\\text{ quarters}", True),
        ("How many half-gallons of milk?", "7 half-gallons", True),
        ("She buys two dozen. How many eggs are left?", "7 dozen", False),
        ("How many dozen eggs did she buy?", "7 thousand", False),
    ],
)
def test_a_multiplier_that_the_question_asks_for_is_a_unit(question, answer, right):
    pytest.importorskip("math_verify")
    item = {"prompt": question, "response": f"\\boxed{{{answer}}}", "truth": "7", "task": {}}
    for reward in (math_reward, math_boxed_reward, math_dapo_reward):
        assert reward(**item) == {"accuracy": float(right)}


@pytest.mark.timeout(20)
@pytest.mark.parametrize("answer", ["7 " + "a" * 9999 + "!", "7" + "%  " * 3333 + "!", "7" + " ab/" * 3333 + "!"])
def test_an_endless_unit_is_read_in_linear_time(answer):
    assert readings(answer, "") == [answer]


def test_a_bare_reference_is_the_answer():
    assert reference(" 42 ") == "42" and reference(42) == "42" and reference("x\n#### 4") == "4"
    for empty in (None, "", "  "):
        with raising(DataError, key="format.response_key"):
            reference(empty)


def test_unreadable_reference_is_a_verifier_error():
    pytest.importorskip("math_verify")
    with pytest.raises(ValueError):
        full("#### 5", "\\text{}")


FORM = re.compile(r".*?<think>.*?</think>\s*<answer>.*?</answer>\s*", re.DOTALL)
PIECES = st.sampled_from(["<think>", "</think>", "<answer>", "</answer>", " ", "\n", "x"])


@given(pieces=st.lists(PIECES, max_size=12))
@example(pieces=["<think>", "x", "</think>", "\n", "<answer>", "x", "</answer>", "\n"])
@settings(max_examples=80)
def test_think_score_is_for_thought_then_answer(pieces):
    pytest.importorskip("math_verify")
    response = "".join(pieces)
    expected = 0.5 if FORM.fullmatch(response) else -0.5
    assert full(response, "5", think_score=0.5)["format_score"] == expected


@pytest.mark.timeout(20)
@pytest.mark.parametrize(
    "response",
    [
        "<answer>" * 1_000_000,
        "</answer>" * 1_000_000,
        "<answer></answer>" * 500_000,
        "<think>" * 1_000_000,
        "<think></think><answer></answer>" * 200_000 + "x",
        "<think>" + "</think> " * 500_000 + "</answer>",
        "#### \n" * 1_000_000,
    ],
    ids=["open", "close", "empty", "think", "forms", "thoughts", "hashes"],
)
def test_degenerate_response_does_not_block_the_explorer(response):
    """Fast paths run in the explorer's process; a regular expression with `.*?` would take minutes to hours here."""
    assert math_fast(response=response, truth="5", think_score=0.5) == {"accuracy": 0.0, "format_score": -0.5}


def test_format_weight_adds_a_format_part():
    assert full("nothing", "5", format_weight=0.5) == {"accuracy": 0.0, "format": 0.0}
    assert math_fast(response="#### 4", truth="5", format_weight=0.5) == {"accuracy": 0.0, "format": 0.5}
    assert math_fast(response="#### 5", truth="5", format_weight=0.5) == {"accuracy": 1.0, "format": 0.5}


def test_format_reward():
    def score(response, **args):
        return format_reward(prompt="", response=response, truth=None, task={}, **args)["format"]

    assert score("#### 5") == 1 and score("5") == 0
    assert score("<think>\nx</think> 5", pattern="^<think>.*</think>") == 1
    assert score("5", miss_score=-0.1) == -0.1 and score("#### 5", match_score=0.1) == 0.1
    with raising(DataError, key="pattern"):
        score("5", pattern="(")
