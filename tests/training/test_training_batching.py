"""Micro-batches: nothing lost, nothing parted, nothing over the budget, ranks in step."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from trinity_core.training.batching import Unit, pairs_of, plan, units_of

lengths = st.integers(1, 60)
rows = st.lists(st.tuples(st.integers(0, 5), lengths), min_size=1, max_size=60)


def _units(rows, budget):
    prompts = [7 + group for group, _ in rows]
    return units_of([str(group) for group, _ in rows], prompts, [r for _, r in rows], budget)


@given(rows, st.integers(20, 300), st.integers(1, 4), st.booleans())
@settings(max_examples=200, deadline=None)
def test_every_row_is_in_exactly_one_micro_batch(rows, budget, ranks, padded):
    shares = plan(_units(rows, budget), budget, ranks, padded)
    assert len(shares) == ranks
    assert sorted(row for share in shares for micro in share for row in micro) == list(range(len(rows)))


@given(rows, st.integers(20, 300), st.integers(1, 4), st.booleans())
@settings(max_examples=200, deadline=None)
def test_ranks_have_the_same_number_of_micro_batches_and_no_needless_round(rows, budget, ranks, padded):
    shares = plan(_units(rows, budget), budget, ranks, padded)
    counts = {len(share) for share in shares}
    assert len(counts) == 1
    empty = sum(not micro for share in shares for micro in share)
    assert empty < ranks or len(rows) < ranks * counts.pop()


@given(rows, st.integers(20, 300), st.integers(1, 4), st.booleans())
@settings(max_examples=200, deadline=None)
def test_no_micro_batch_of_several_units_exceeds_the_budget(rows, budget, ranks, padded):
    units = _units(rows, budget)
    unit_of = {row: unit for unit in units for row in unit.rows}
    for share in plan(units, budget, ranks, padded):
        for micro in share:
            members = {unit_of[row].rows: unit_of[row] for row in micro}
            cost = sum(unit.tokens for unit in members.values())
            if padded:
                cost = len(micro) * max((unit.longest for unit in members.values()), default=0)
            assert cost <= budget or len(members) == 1


@given(rows, st.integers(20, 300), st.integers(1, 4))
@settings(max_examples=100, deadline=None)
def test_units_stay_whole_and_in_order(rows, budget, ranks):
    units = _units(rows, budget)
    shares = plan(units, budget, ranks)
    micros = [micro for share in shares for micro in share]
    for unit in units:
        assert any(unit.rows == micro[i : i + len(unit.rows)] for micro in micros for i in range(len(micro)))


def test_a_groups_prompt_counts_once_and_a_large_group_is_cut():
    assert units_of(["a", "a", "b"], [10, 10, 4], [3, 5, 2], 100) == [Unit((0, 1), 18, 15), Unit((2,), 6, 6)]
    assert [unit.rows for unit in units_of(["a"] * 4, [10] * 4, [5] * 4, 20)] == [(0, 1), (2, 3)]
    assert [unit.tokens for unit in units_of(["a"] * 4, [10] * 4, [5] * 4, 20)] == [20, 20]
    assert [unit.rows for unit in units_of(["a"] * 2, [10] * 2, [50] * 2, 20)] == [(0,), (1,)]


def test_pairs_are_never_cut():
    pairs = pairs_of([4, 4, 6, 6], [10, 20, 30, 40])
    assert [unit.rows for unit in pairs] == [(0, 1), (2, 3)]
    assert [micro for share in plan(pairs, 5, 1) for micro in share] == [(2, 3), (0, 1)]
    with pytest.raises(ValueError, match="even number"):
        pairs_of([1], [1])


def test_two_ranks_get_even_shares():
    units = [Unit((i,), tokens, tokens) for i, tokens in enumerate([9, 8, 7, 6, 5, 4, 3, 2])]
    first, second = plan(units, 44, 2)
    assert len(first) == len(second) == 1
    assert abs(sum(9 - i for i in first[0]) - sum(9 - i for i in second[0])) <= 4
