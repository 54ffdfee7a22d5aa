import logging
import re
from pathlib import Path

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st
from raising import raising

from trinity_core.base.errors import DataError
from trinity_core.workflows.rewards.answers import read, same, without_verifier
from trinity_core.workflows.rewards.boxed import math_boxed_reward, math_dapo_reward
from trinity_core.workflows.rewards.math import final_answer, format_reward, math_fast, math_reward, reference
from trinity_core.workflows.rewards.spelling import plain

logging.getLogger("math_verify").setLevel(logging.ERROR)  # it warns that the pool's time limits replace its own
PAIRS = [
    line for line in Path(__file__).with_name("answer_pairs.txt").read_text().splitlines() if not line.startswith("# ")
]
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


NUMERIC = st.lists(
    st.sampled_from([*"0123456789.,_ +-/%", "1_000", "e-05", "1,234", "\\frac12", "10^{3}"]), max_size=8
).map("".join)


@given(answer=NUMERIC, truth=NUMERIC, alike=st.booleans())
@example("1_000", "1000", False)
@settings(max_examples=200)
def test_fast_verdicts_of_numbers_are_the_verifiers(answer, truth, alike):
    fast = without_verifier(answer.strip(), answer.strip() if alike else truth.strip())
    if fast is not None:
        assert fast == same(answer.strip(), answer.strip() if alike else truth.strip())


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
        ("\\boxed 5", "5"),
        ("$\\boxed \\frac12$", "\\frac12"),
        ("\\boxed {5}", "5"),
        ("\\fbox{5}", "5"),
        ("\\boxed{4} \\fbox{5}", "5"),
        ("<answer>5</answer> in the \\boxed format", "5"),
        ("<answer>5</answer>, \\boxed{}", None),
        ("\\boxed{42}\n#### Check", "42"),
        ("\\boxed{42}\n\n#### Why 43 is wrong:\nIt is odd.", "42"),
        ("<answer>42</answer>\n#### Final remarks", "42"),
        ("\\boxed{42}\n#### 43", "43"),
        ("\\boxed{42}\n#### \\frac{1}{2}", "\\frac{1}{2}"),
        ("#### Tuesday", "Tuesday"),
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


@pytest.mark.parametrize("line", PAIRS)
def test_every_reward_reads_reference_and_answer_by_the_same_kinds(line):
    """`answer_pairs.txt`, by kind. Nothing here depends on the place of the answer, nor on the order of evaluation."""
    pytest.importorskip("math_verify")
    truth, wrong = line.partition(" =/= ")[::2]
    truth, right = truth.partition(" => ")[::2]
    for answers, accuracy in ((right, 1.0), (wrong, 0.0)):
        for answer in filter(None, answers.split(" ;; ")):
            for reward, response in (
                (math_boxed_reward, f"\\boxed{{{answer}}}"),
                (math_dapo_reward, f"Answer: {answer}"),
            ):
                assert reward(prompt="", response=response, truth=truth, task={}) == {"accuracy": accuracy}, answer
            assert full(f"#### {answer}", f"#### {truth}") == {"accuracy": accuracy}, answer


PLAIN = [r"\frac{1}{3}", r"\sqrt{2}", "x+1", r"2\pi", "(1,2)", r"\{5,6\}", r"50\%", "1e-5"]
VALUES = st.integers(2, 99).map(str) | st.integers(2, 99).map("{}.5".format) | st.sampled_from(PLAIN)
LETTERS, NAMES = st.sampled_from("ABCD"), st.sampled_from(["Alice", "Bob", "red", "even", "ABC", "CBA", "no solution"])
HEDGES = [
    r"{0} or {1}", "{0}, {1}", "{0} and {1}", "{0}; {1}", "{0} or maybe {1}", "either {0} or {1}", "({0}, {1})",
    "[{0}, {1}]", r"\{{{0}, {1}\}}", r"{0} \text{{ or }} {1}", r"{0} \pm {1}", r"{0} \vee {1}", r"{0} \cup {1}",
    "x = {0} or x = {1}", "x={0}, {1}", "{0} ({1})", "{0} (or {1})", "between {0} and {1}", "not {0}, {1}",
    r"{0} \quad {1}", r"{0} \\ {1}", "{0} & {1}", "{0} otherwise {1}", r"{0} \to {1}", "{0}...{1}", "{0} = {1}",
    r"{0} \approx {1}", "[{0}; {1})", r"{0} \text{{ (or }} {1} \text{{)}}", r"{0}\text{{ and }}{1}", "{0} if not {1}",
    "maybe {0}, maybe {1}", r"{0} \lor {1}", r"\{{{0}\}} \cup \{{{1}\}}", "{0}\n{1}", "**{0}** or **{1}**", "{0} | {1}",
    "{0}? {1}?", "{0} > {1}", r"{0} \ne {1}", "first {0} then {1}", "{0}: {1}", "{0} - {1}", "{0}{1}", "{0}. {1}",
]  # fmt: skip


@given(
    values=st.sampled_from([VALUES, LETTERS, NAMES]).flatmap(
        lambda kind: st.lists(kind, min_size=2, max_size=2, unique=True)
    ),
    hedge=st.sampled_from(HEDGES),
    backwards=st.booleans(),
)
@settings(max_examples=200)
def test_no_hedge_is_right(values, hedge, backwards):
    """An answer that names two values is not the reference, which is one of them."""
    pytest.importorskip("math_verify")
    answer = hedge.format(*(reversed(values) if backwards else values))
    for reward, form in (
        (math_reward, "#### {}"),
        (math_boxed_reward, "\\boxed{{{}}}"),
        (math_dapo_reward, "Answer: {}"),
    ):
        if form.startswith("\\") or "\n" not in answer:
            item = {"response": form.format(answer), "truth": values[0], "task": {}}
            assert reward(prompt="", **item) == {"accuracy": 0.0}


@pytest.mark.parametrize(
    "question, answer, truth, right",
    [
        ("Convert 1358 to base 8.", "2516", "2516_8", True),
        ("Convert 1358 to base 8.", "1358", "2516_8", False),
        ("Find $2x$.", "2x = 42", "42", True),
        ("Find $x$.", "2x = 42", "42", False),
        ("What is the ratio?", "6:30", "1:5", True),
        ("When does he arrive?", "6:30", "1:5", False),
        ("What percent is that?", "0.5%", "0.5", True),
        ("What is the probability?", "0.5%", "0.5", False),
        ("Find $a^2+b^2$.", "a^2+b^2 = 7", "7", True),
        ("Find the length in terms of $m$.", "12", "12m", False),
        ("Find the area in terms of $m$.", "6", "6m^2", False),
        ("A rope of 4 m is cut. How long is a part?", "12", "12m", True),
    ],
)
def test_the_question_decides_what_an_answer_means(question, answer, truth, right):
    pytest.importorskip("math_verify")
    assert same(answer, truth, question) == right


@pytest.mark.timeout(20)
@pytest.mark.parametrize(
    "piece", ["a", "(", "{", "** ", "=", "1,", "and ", "\\text{", "^(", "base ", "7 m ", "0.", " ab/", "%  "]
)
def test_an_endless_answer_is_read_in_linear_time(piece):
    assert read(plain("7 " + piece * (20_000 // len(piece)) + "!")).text


@pytest.mark.timeout(20)
@pytest.mark.parametrize("piece", ["{", "(", "\\frac{1}{2}", "x^", "\\sqrt{", "9", "1,"])
def test_an_endless_answer_is_wrong_at_once(piece):
    """math-verify would take longer than the pool allows, and the policy would not learn that this is wrong."""
    assert not same(piece * 200_000, "5")


def test_astronomic_numbers_need_no_verifier_to_be_refused():
    """Fast paths run in the explorer's process."""
    for answer in ("1e999999999", "9" * 5000, "1e9999", "0.(" + "1" * 200 + ")"):
        assert math_fast(response=f"#### {answer}", truth="5") in (None, {"accuracy": 0.0})


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


def test_a_bare_reference_is_the_answer():
    assert reference(" 42 ") == "42" and reference(42) == "42" and reference("x\n#### 4") == "4"
    for empty in (None, "", "  ", float("nan"), "nan"):
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


def test_a_list_of_one_is_that_reference():
    """OlympiadBench's `final_answer`, of which most have one."""
    for answer, right in (("34", 1.0), ("5", 0.0)):
        judged = math_reward(prompt="", response=f"\\boxed{{{answer}}}", truth=["34"], task={})
        assert judged["accuracy"] == right


@pytest.mark.parametrize(
    "truth",
    [
        {"ground_truth": "34"},
        ["34", "35"],
        ("3", "4"),
        '{"ground_truth": "34", "style": "rule"}',
        "{'ground_truth': '34'}",
    ],
)
@pytest.mark.parametrize("answer", ["34", "5"])
def test_reference_that_is_an_object_or_a_list_is_refused(truth, answer):
    """veRL's `reward_model`, OlympiadBench's `final_answer`, NQ's `golden_answers`."""
    for judge in (math_reward, math_boxed_reward, math_dapo_reward):
        with raising(DataError, key="format.response_key"):
            judge(prompt="", response=f"\\boxed{{{answer}}}", truth=truth, task={})
    with raising(DataError, key="format.response_key"):
        math_fast(response=f"#### {answer}", truth=truth)


def test_a_set_is_no_object():
    assert reference("\\{1, 2\\}") == "\\{1, 2\\}" and reference("{1, 2}") == "{1, 2}"
