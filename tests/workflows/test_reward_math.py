import re

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from trinity_core.errors import DataError
from trinity_core.workflows.rewards.math import final_answer, format_reward, math_fast, math_reward, reference

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
@settings(max_examples=150)
def test_the_fast_path_gives_the_verifiers_verdict(answer, truth):
    pytest.importorskip("math_verify")
    response, reference_answer = f"So it is.\n#### {answer}", f"work\n#### {truth}"
    fast = math_fast(response=response, truth=reference_answer)
    assert fast is not None and fast == full(response, reference_answer)


@given(number=integers)
@settings(max_examples=50)
def test_fast_path_decides_plain_integers(number):
    assert math_fast(response=f"\\boxed{{{number}}}", truth=f"#### {number}") == {"accuracy": 1.0}
    assert math_fast(response=f"#### {number + 1}", truth=f"#### {number}") == {"accuracy": 0.0}


@given(text=st.text("#0123456789 -+.,$%{}\\boxed\n", max_size=20), truth=st.sampled_from(["#### 5", "#### -12", "3"]))
@settings(max_examples=150)
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


@pytest.mark.parametrize(
    "answer, truth, right",
    [
        ("1,000", "1000", True),
        ("$18", "18", True),
        ("18.00", "18", True),
        ("\\frac{1}{2}", "0.5", True),
        ("7 apples", "7", True),
        ("7.5", "7", False),
        ("17", "7", False),
        ("-7", "7", False),
        ("seven", "7", False),
        ("2+5", "7", True),
        ("7.", "7", True),
        ("7 dollars", "7", True),
        ("7 hours.", "7", True),
        ("$1,000.", "1000", True),
        ("€7", "7", True),
        ("**7**", "7", True),
        ("The answer is 7", "7", True),
        ("7 (eggs)", "7", True),
        ("about 1,800 km", "1800", True),
        ("-3 degrees", "-3", True),
        ("7 or 8", "7", False),
        ("8 or 7", "7", False),
        ("8, 7", "7", False),
        ("5 6 7", "7", False),
        ("between 5 and 7", "7", False),
        ("x - 7", "7", False),
        ("x \\neq 7", "7", False),
        ("\\pm 7", "7", False),
        ("7!", "7", False),
        ("\\log 7", "7", False),
        ("14 \\div 7", "7", False),
        ("3 \\cdot 7", "7", False),
        ("2 \\times 7", "7", False),
        ("(6, 7)", "7", False),
        ("\\{6, 7\\}", "7", False),
        ("not 7", "7", False),
        ("minus 7", "7", False),
        ("7 thousand", "7", False),
        ("x 7", "7", False),
        ("-7 dollars.", "7", False),
        ("17 dollars", "7", False),
    ],
)
def test_what_math_verify_decides(answer, truth, right):
    pytest.importorskip("math_verify")
    assert full(f"\\boxed{{{answer}}}", f"#### {truth}") == {"accuracy": float(right)}
    assert full(f"#### {answer}", f"#### {truth}") == {"accuracy": float(right)}


def test_a_bare_reference_is_the_answer():
    assert reference(" 42 ") == "42" and reference(42) == "42" and reference("x\n#### 4") == "4"
    for empty in (None, "", "  "):
        with pytest.raises(DataError, match="no reference answer"):
            reference(empty)


def test_unreadable_reference_is_a_verifier_error():
    pytest.importorskip("math_verify")
    with pytest.raises(ValueError, match="cannot read the reference"):
        full("#### 5", "\\text{}")


FORM = re.compile(r".*?<think>.*?</think>\s*<answer>.*?</answer>\s*", re.DOTALL)
PIECES = st.sampled_from(["<think>", "</think>", "<answer>", "</answer>", " ", "\n", "x"])


@given(pieces=st.lists(PIECES, max_size=12))
@example(pieces=["<think>", "x", "</think>", "\n", "<answer>", "x", "</answer>", "\n"])
@settings(max_examples=300)
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
def test_a_degenerate_response_does_not_hold_up_the_explorer(response):
    """Fast paths run in its process; a regular expression with `.*?` would take minutes to hours here."""
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
    with pytest.raises(DataError, match="cannot read the pattern"):
        score("5", pattern="(")
