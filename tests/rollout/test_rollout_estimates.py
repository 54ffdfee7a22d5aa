"""pass@k and intervals: compared with enumeration, values by hand, and simulated evaluations."""

from __future__ import annotations

from itertools import combinations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from trinity_core.rollout.metrics import deviation, expected_best, interval, sizes, standard_error, wilson


@given(st.lists(st.sampled_from([0.0, 0.25, 0.5, 1.0]), min_size=1, max_size=9), st.data())
def test_expected_best_is_the_mean_over_all_draws(scores: list[float], data: st.DataObject) -> None:
    k = data.draw(st.integers(1, len(scores)))
    draws = [max(draw) for draw in combinations(scores, k)]
    assert expected_best(scores, k) == pytest.approx(sum(draws) / len(draws), abs=1e-12)


def test_pass_at_k_of_many_answers_by_chens_product() -> None:
    """1 - prod(1 - k / i for i in n-c+1 … n), as Chen et al. compute it; 17 of 200 answers are right."""
    scores = [1.0] * 17 + [0.0] * 183
    for k in (1, 10, 100, 184):
        product = np.prod(1 - k / np.arange(200 - 17 + 1, 201)) if k <= 183 else 0.0
        assert expected_best(scores, k) == pytest.approx(1 - product, abs=1e-12)


@pytest.mark.parametrize(("n", "expected"), [(1, [1]), (2, [1, 2]), (5, [1, 2, 4, 5]), (8, [1, 2, 4, 8])])
def test_k_are_powers_of_two_and_n(n: int, expected: list[int]) -> None:
    assert sizes(n) == expected


def test_standard_error_by_hand() -> None:
    # one answer each: s / sqrt(Q) with s² = 0.25 * 4 / 3
    assert standard_error([[1.0], [1.0], [0.0], [0.0]]) == pytest.approx((0.25 * 4 / 3 / 4) ** 0.5)
    # equal answers within a question add nothing: as if each had been asked once
    assert standard_error([[1.0] * 5, [1.0] * 5, [0.0] * 5, [0.0] * 5]) == pytest.approx((0.25 * 4 / 3 / 4) ** 0.5)
    assert standard_error([[0.0, 1.0]] * 6) == 0
    assert standard_error([[1.0, 0.0, 1.0]]) is None


def test_wilson_by_hand() -> None:
    """8 of 10: the textbook's (0.490, 0.943)."""
    assert wilson(0.8, 10) == pytest.approx((0.4902, 0.9433), abs=1e-4)


def test_wilson_ends_exactly_where_all_answers_do() -> None:
    assert {wilson(1.0, n)[1] for n in range(1, 1000)} == {1.0}
    assert {wilson(0.0, n)[0] for n in range(1, 1000)} == {0.0}


def test_interval_of_all_right_answers_is_not_a_point() -> None:
    low, high = interval([[1.0, 1.0]] * 10) or (0.0, 0.0)
    assert high == pytest.approx(1.0)
    assert low == pytest.approx(wilson(1.0, 10)[0]) and low < 0.8


@pytest.mark.parametrize("answers", [[0.1] * 8, [0.3] * 8, [0.1, 0.6] * 4])
def test_interval_of_questions_with_equal_means(answers: list[float]) -> None:
    """Rounding leaves a standard error of about 1e-17."""
    assert interval([answers] * 10) == pytest.approx(wilson(sum(answers) / 8, 10))


def test_interval_of_other_scores_than_shares() -> None:
    assert interval([[0.0], [4.0]]) == pytest.approx((2 - 1.959964 * 2, 2 + 1.959964 * 2))


def test_deviation_between_repeats_by_hand() -> None:
    assert deviation([[1.0, 0.0], [1.0, 1.0]]) == pytest.approx(0.125**0.5)
    assert deviation([[1.0, 0.0], []]) is None


@pytest.mark.parametrize("repeats", [1, 4])
@pytest.mark.parametrize("hardness", [(1.0, 1.0), (0.2, 0.4), (6.0, 0.5)])
def test_intervals_cover_the_truth(repeats: int, hardness: tuple[float, float]) -> None:
    """2,000 evaluations on 100 new questions each, whose difficulty is drawn from a beta distribution."""
    random = np.random.default_rng(7)
    truth = hardness[0] / sum(hardness)
    covered = 0
    for _ in range(2000):
        chances = random.beta(*hardness, size=(100, 1))
        answers = (random.random((100, repeats)) < chances).astype(float)
        low, high = interval(answers.tolist()) or (0.0, 0.0)
        covered += low <= truth <= high
    assert 0.93 <= covered / 2000 <= 0.975
