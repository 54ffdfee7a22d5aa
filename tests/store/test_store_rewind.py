"""Going back to a checkpoint: exact, whatever happened after it."""

import pytest
from store_helpers import ids, make_rows

from trinity_core.base.errors import TransientFault
from trinity_core.exchange.store.schema import EXPLORER
from trinity_core.exchange.store.store import LineageChanged
from trinity_core.exchange.store.strategies import StalenessControl
from trinity_core.training.sources import wait_lease


def play(store, steps, offset=0):
    """Explorer and trainer in turn, on policy (`offset` steps ahead); returns the batches."""
    batches = {}
    for step in range(1, steps + offset + 1):
        version = max(0, step - 1 - offset)
        store.put("e", step, {"offset": step}, make_rows(2, 2, version, tag=f"s{step}"), version)
    for step in range(1, steps + 1):
        batches[step] = ids(store.lease(step, 4, step - 1))
    return batches


def on_policy(store, first, last, batches):
    for step in range(first, last + 1):
        store.put("e", step, {"offset": step}, make_rows(2, 2, step - 1, tag=f"s{step}"), step - 1)
        batches[step] = ids(store.lease(step, 4, step - 1))
    return batches


def test_on_policy_rewind_is_exact(store):
    batches = on_policy(store, 1, 6, {})
    store.commit(3)
    assert (store.rewind(3), store.stats().ready, store.lineage()) == (0, 4, 1)
    position = store.position("e")
    assert (position.step, position.position) == (4, {"offset": 4})
    assert ids(store.lease(4, 4, 3)) == batches[4]
    assert on_policy(store, 5, 6, {})[5] == batches[5]


def test_rewound_rows_return_in_their_old_order(store):
    batches = play(store, 4, offset=9)
    waiting = store.stats().ready
    store.rewind(1)
    assert store.stats().ready == waiting + 12 - 8, "versions 2 and 3 are not known at checkpoint 1"
    assert {step: ids(store.lease(step, 4, step - 1)) for step in (2, 3, 4)} == {s: batches[s] for s in (2, 3, 4)}


def test_finished_explorer_whose_steps_are_undone_is_not_at_work(store, caplog):
    """It is waited for as one that is still to start, for `max_read_timeout`, and a warning says so."""
    store.expect("e")
    store.mark_seen(EXPLORER, "e")
    on_policy(store, 1, 6, {})
    store.mark_finished("e")
    store.commit(3)
    store.rewind(3)
    explorer = store.stats().explorers["e"]
    assert (explorer.step, explorer.is_expected, explorer.is_at_work(store.now())) == (4, True, False)
    assert "explorer e" in caplog.text
    assert len(wait_lease(store, 4, 4, 3, timeout=0.1)) == 4
    with pytest.raises(TransientFault, match=r"in 0\.1 s \(max_read_timeout\)"):
        wait_lease(store, 5, 4, 4, timeout=0.1)


def test_explorer_of_old_lineage_cannot_cut_a_batch_short(store):
    """The explorer of a killed run calls `mark_waiting` or `mark_finished` after the next run has rewound the store."""
    on_policy(store, 1, 3, {})
    store.rewind(2)
    for report in (lambda: store.mark_waiting("e", 3), lambda: store.mark_finished("e")):
        with pytest.raises(LineageChanged):
            report()
    assert len(store.lease(3, 4, 2)) == 4
    assert store.lease(4, 4, 3) is None, "not an empty batch: the new explorer is still to come"


def test_oldest_rewind_since_a_lineage(store):
    """To 4, then to 6 after that was made again, then to 5."""
    for leased, back in (((1, 2, 3, 4, 5, 6), 4), ((5, 6, 7), 6), ((7,), 5)):
        for step in leased:
            store.lease(step, 2, step - 1, final=True)
        store.rewind(back)
    assert store.lineage() == 3
    assert [store.went_back_to(lineage) for lineage in (0, 1, 2)] == [4, 5, 5]
    assert store.went_back_to(3) == store.trainer().committed == 5


def test_groups_that_became_stale_without_a_batch_return(store):
    store.put("e", 1, {}, make_rows(2), 0)
    assert store.lease(1, 2, 0)
    store.commit(1)
    assert store.lease(2, 2, 1, StalenessControl(0)) is None and store.stats().stale == 2
    store.rewind(1)
    assert (store.stats().stale, store.stats().ready, store.lineage()) == (0, 2, 0)


def test_pruned_rows_are_counted_as_lost(store):
    play(store, 3, offset=9)
    store.commit(3)
    store.prune(3)
    assert store.rewind(1) == 8


def test_pruned_rows_that_are_sampled_again_are_not_lost(store):
    """Checkpoint 1 knows the policy that sampled the batch of step 2, but none of those of steps 3 and 4."""
    on_policy(store, 1, 4, {})
    store.commit(4)
    store.prune(3)
    assert store.rewind(1) == 4
    assert store.position("e").step == 2
