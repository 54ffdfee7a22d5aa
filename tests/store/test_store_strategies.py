"""Which groups make a batch."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from store_helpers import ids, make_rows

from trinity_core.base.errors import TrinityError
from trinity_core.data.experience import Experience
from trinity_core.exchange.store import leasing
from trinity_core.exchange.store.expert import ExpertData
from trinity_core.exchange.store.strategies import (
    PRIORITY_FNS,
    Candidate,
    DecayLimitRandomization,
    Fifo,
    Mix,
    Priority,
    StalenessControl,
    make_strategy,
    take_until,
)

candidates = st.lists(st.tuples(st.integers(1, 8), st.integers(0, 9)), max_size=20).map(
    lambda pairs: [Candidate(i, size, version, version) for i, (size, version) in enumerate(pairs)]
)


@given(candidates, st.integers(1, 40))
def test_fifo_takes_the_shortest_sufficient_prefix(groups, rows):
    taken = take_until(groups, rows)
    assert taken == groups[: len(taken)]
    assert sum(g.size for g in taken[:-1]) < rows
    assert sum(g.size for g in taken) >= min(rows, sum(g.size for g in groups))


@given(candidates, st.integers(1, 40), st.integers(0, 5), st.integers(0, 12))
def test_staleness_splits_by_age(groups, rows, limit, version):
    choice = StalenessControl(limit).choose(groups, rows, version)
    assert all(version - g.oldest > limit for g in choice.stale)
    assert all(version - g.oldest <= limit for g in choice.take)
    assert not {g.id for g in choice.take} & {g.id for g in choice.stale}


def test_priority_prefers_new_and_rarely_used_groups():
    groups = [Candidate(1, 1, 5, 5), Candidate(2, 1, 6, 6, uses=1), Candidate(3, 1, 5, 5), Candidate(4, 1, 7, 7)]
    assert [g.id for g in Priority(decay=2.0).choose(groups, 4, 9).take] == [4, 1, 3, 2]


def test_decay_limit_randomization_is_the_guides():
    """`newest version - decay * uses + sigma * noise`; equal for the same seed and version."""
    groups = [Candidate(1, 1, 5, 5), Candidate(2, 1, 6, 6, uses=1), Candidate(3, 1, 5, 5), Candidate(4, 1, 7, 7)]

    def order(version=9, seed=1, **args):
        named = {"priority_fn": "decay_limit_randomization", "priority_fn_args": args}
        return [g.id for g in make_strategy("default", replay={"seed": seed, **named}).choose(groups, 4, version).take]

    assert order() == [4, 1, 3, 2] and order(decay=0.5) == [4, 2, 1, 3]
    assert order(sigma=50.0) == order(sigma=50.0)
    assert len({tuple(order(version, seed, sigma=50.0)) for version in range(5) for seed in range(5)}) > 5
    assert set(PRIORITY_FNS) >= {"linear_decay", "linear_decay_use_count_control_randomization"}


def test_a_group_is_used_up_to_its_limit_and_then_pruned(store):
    limited = {"priority_fn": "decay_limit_randomization", "priority_fn_args": {"use_count_limit": 2}}
    strategy = make_strategy("default", replay={"reuse_cooldown_time": 10.0, **limited})
    store.put("e", 1, {}, make_rows(2), 0)
    store.mark_finished("e")
    assert [len(store.lease(step, 4, step - 1, strategy, now=20.0 * step)) for step in (1, 2, 3)] == [4, 4, 0]
    store.commit(2)
    store.rewind(2)
    store.position("e")
    store.put("e", 2, {}, make_rows(1, version=2), 2)
    assert len(store.lease(3, 2, 2, strategy, now=90.0)) == 2
    store.commit(3)
    assert store.prune(3, strategy) == 4, "one group was used once: it may be used again"
    assert len(store.lease(4, 2, 3, strategy, now=190.0)) == 2
    assert len(store.batch(1)) == 0 and len(store.batch(4)) == 2


def test_a_group_that_was_passed_over_long_enough_has_sunk(store, monkeypatch):
    """It is not taken again, and its rows go once no rewind may need them."""
    monkeypatch.setattr(leasing, "RETENTION", 4)
    strategy = make_strategy("default", replay={"reuse_cooldown_time": 2.0})

    def lease(step, rows):
        return store.lease(step, rows, step - 1, strategy, now=100.0 + step, final=True)

    for step in range(1, 20):  # each has fresh rows, which are preferred
        store.put("e", step, {}, make_rows(1, version=step - 1, tag=f"step {step} "), step - 1)
        assert {row.group for row in lease(step, 2)} == {f"step {step} g0"}
    store.commit(19)
    assert store.prune(18, strategy) == 2 * 12, "step 13 is the first that a rewind to 18 can take again"
    store.put("e", 20, {}, make_rows(1, version=19, tag="step 20 "), 19)
    assert {row.group for row in lease(20, 1000)} == {f"step {step} g0" for step in (15, 16, 17, 18, 20)}


def test_a_group_that_newer_ones_displace_from_batches_becomes_stale(store, monkeypatch):
    monkeypatch.setattr(leasing, "RETENTION", 4)
    for step in range(1, 11):  # each brings two groups, of which one is taken
        store.put("e", step, {}, make_rows(2, version=step - 1, tag=f"step {step} "), step - 1)
        assert {row.group for row in store.lease(step, 2, step - 1, Priority())} == {f"step {step} g0"}
        store.commit(step)
    assert (store.stats().stale, store.stats().ready) == (2 * 5, 2 * 5), "those put before step 6 took its batch"
    store.rewind(8)
    assert (store.stats().stale, store.prune(8)) == (2 * 3, 2 * (8 + 3))


@pytest.mark.parametrize("newest", [0, 11])
def test_a_trainer_comes_to_all_groups_of_a_queue_that_is_no_longer_filled(store, monkeypatch, newest):
    monkeypatch.setattr(leasing, "RETENTION", 4)
    for step in range(1, 13):
        store.put("e", step, {}, make_rows(1, version=min(step - 1, newest)), newest)
    assert [len(store.lease(step, 2, 11, Priority())) for step in range(1, 13)] == [2] * 12


def test_stale_groups_are_counted_and_never_trained(store):
    store.put("e", 1, {}, make_rows(2, version=0, tag="old"), 0)
    store.put("e", 2, {}, make_rows(2, version=3, tag="new"), 3)
    assert store.lease(5, 6, 4, StalenessControl(2)) is None
    assert store.stats().stale == 4
    store.put("e", 3, {}, make_rows(1, version=4), 4)
    assert ids(store.lease(5, 6, 4, StalenessControl(2)))[0] == "newg0r0"
    store.rewind(4)
    assert (store.stats().stale, store.stats().ready) == (0, 10)


def test_reuse_after_the_cooldown_only(store):
    strategy = make_strategy("default", replay={"reuse_cooldown_time": 10.0})
    store.put("e", 1, {}, make_rows(2), 0)
    store.mark_finished("e")
    assert len(store.lease(1, 4, 0, strategy, now=100.0)) == 4
    assert store.lease(2, 4, 1, strategy, now=105.0) == []
    assert len(store.lease(3, 4, 2, strategy, now=110.0)) == 4
    store.commit(1)
    store.rewind(1)
    assert store.stats().trained == 4


def test_make_strategy():
    assert make_strategy(None) == Fifo()
    assert make_strategy("staleness_control", {"max_staleness": 3}) == StalenessControl(3)
    assert make_strategy("default", max_staleness=2) == make_strategy("staleness_control", max_staleness=2)
    assert make_strategy("default", max_staleness=2) == StalenessControl(2)
    assert make_strategy("mix", {"inner": "fifo"}, max_staleness=2) == Mix(inner=StalenessControl(2))
    assert make_strategy("mix", {"expert_data_ratio": 0.25}) == Mix(0.25, Fifo())
    assert make_strategy("mix", replay={"reuse_cooldown_time": 1}) == Mix(0.5, Priority(1))
    assert make_strategy("priority", {"decay": 1.0}, replay={"seed": 3}) == Priority(decay=1.0, seed=3)
    limited = make_strategy("priority", {"decay": 1.0, "priority_fn": "decay_limit_randomization"})
    assert isinstance(limited, Priority) and limited.function == DecayLimitRandomization(decay=1.0)
    for name, args in [("fofo", {}), ("priority", {"dekay": 1}), ("mix", {"expert_data_ratio": 1.0})]:
        with pytest.raises(TrinityError):
            make_strategy(name, args)


def expert(length=5, seed=None, per_row=1):
    def make(i):
        mask = [True, True]
        return [
            Experience(tokens=[i, i, r], prompt_length=1, action_mask=mask, group=f"row {i}", is_expert=True)
            for r in range(per_row)
        ]

    return ExpertData(length, make, seed)


def test_expert_rows_repeat_by_epoch_and_resume():
    data = expert(seed=3)
    whole, _ = data.take(12)
    first, position = data.take(7)
    rest, _ = data.take(5, position)
    assert [e.tokens[0] for e in whole] == [e.tokens[0] for e in first + rest]
    assert all(e.is_expert for e in whole)
    assert sorted(int(e.tokens[0]) for e in whole[:5]) == list(range(5))
    assert [e.tokens[0] for e in whole[:5]] != [e.tokens[0] for e in whole[5:10]]


def test_mix_takes_both_and_resumes_both(store):
    strategy, data = Mix(0.25), expert(seed=1)
    store.put("e", 1, {}, make_rows(6, 3), 0)
    store.mark_finished("e")
    batches = {step: store.lease(step, 8, step - 1, strategy, data) for step in (1, 2, 3)}
    for batch in batches.values():
        assert [e.is_expert for e in batch] == [False] * 6 + [True] * 2
    again = store.lease(2, 8, 1, strategy, data)
    store.rewind(1)
    replayed = {step: store.lease(step, 8, step - 1, strategy, data) for step in (2, 3)}
    for one, other in ((again, batches[2]), (replayed[2], batches[2]), (replayed[3], batches[3])):
        assert all(np.array_equal(a.tokens, b.tokens) and a.group == b.group for a, b in zip(one, other, strict=True))
    assert store.lease(4, 8, 3, strategy, data) == [], "without rollouts there is no step"
