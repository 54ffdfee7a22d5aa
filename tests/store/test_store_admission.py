"""Explorers that share a bound on staleness through the store."""

import pytest
from store_helpers import make_rows

from trinity_core.config.sync_schedule import StalenessBound
from trinity_core.exchange.store import members
from trinity_core.exchange.store.presence import LOST_SECONDS
from trinity_core.exchange.store.schema import EXPLORER
from trinity_core.exchange.store.store import LineageChanged

ROWS = 2
STRICT, LOOSE = StalenessBound(0, ROWS).awaited, StalenessBound(1, ROWS).awaited


@pytest.fixture
def explorers(store, open_store):
    """The store as two explorers have it open."""
    opened = [open_store() for _ in "ab"]
    for name, explorer in zip("ab", opened, strict=True):
        explorer.position(name)
    yield opened
    for explorer in opened:
        explorer.close()


def seen(store, explorer, when):
    """Note that `explorer` was seen, as it does itself every few seconds."""
    with store._database.write() as connection:
        members.note(connection, store._tables, EXPLORER, explorer, seen=when)


def test_a_step_waits_for_those_that_others_have_begun(store, explorers):
    a, b = explorers
    assert a.admit("a", ROWS, 0, STRICT) == (None, 0)
    assert b.admit("b", ROWS, 0, STRICT) == (1, 0)
    assert store.stats().explorers["b"].waiting == 1
    a.put("a", 1, {}, make_rows(1, ROWS), 0)
    assert b.admit("b", ROWS, 0, STRICT) == (1, 0), "its rows still wait for the trainer"
    assert len(store.lease(1, ROWS, 0)) == ROWS
    assert b.admit("b", ROWS, 0, STRICT) == (1, 1)
    assert b.admit("b", ROWS, 1, STRICT) == (None, 1)
    assert store.stats().explorers["b"].waiting is None


def test_a_step_begun_earlier_is_not_overtaken_too_often(store, explorers):
    """Rows of the other explorer may arrive first; what began before them must still be fresh when its turn comes."""
    a, b = explorers
    assert a.admit("a", ROWS, 0, LOOSE) == (None, 0)
    assert b.admit("b", ROWS, 0, LOOSE) == (None, 0)
    b.put("b", 1, {}, make_rows(1, ROWS, tag="b"), 0)
    assert len(store.lease(1, ROWS, 0)) == ROWS
    assert b.admit("b", ROWS, 1, LOOSE) == (1, 1), "version 1 would do, but the step of a is of version 0"
    a.put("a", 1, {}, make_rows(1, ROWS, tag="a"), 0)
    assert b.admit("b", ROWS, 1, LOOSE) == (None, 1)


def test_a_step_does_not_overtake_one_that_has_waited_longer(store, explorers):
    """A large step needs the queue almost empty: the fast explorer leaves it so, once."""
    a, b = explorers
    bound = StalenessBound(1, ROWS).awaited
    assert a.admit("a", ROWS, 0, bound) == (None, 0)
    assert b.admit("b", 2 * ROWS, 0, bound)[0] == 1
    a.put("a", 1, {}, make_rows(1, ROWS, tag="a1"), 0)
    assert a.admit("a", ROWS, 0, bound)[0] == 1, "there is room for this step, but b has waited longer"
    assert len(store.lease(1, ROWS, 0)) == ROWS
    assert a.admit("a", ROWS, 1, bound)[0] is not None
    assert b.admit("b", 2 * ROWS, 1, bound)[0] is None
    assert a.admit("a", ROWS, 1, bound)[0] == 2
    b.put("b", 1, {}, make_rows(2, ROWS, 1, tag="b1"), 1)
    assert len(store.lease(2, ROWS, 1)) == ROWS
    assert b.admit("b", 2 * ROWS, 1, bound)[0] is not None, "now it is a's turn"
    assert a.admit("a", ROWS, 2, bound)[0] is None


@pytest.mark.parametrize("how", ["starts anew", "leaves", "is lost"])
def test_a_dead_explorer_loses_its_turn(store, explorers, how):
    a, b = explorers
    now = 1e6
    assert a.admit("a", ROWS, 0, LOOSE, now)[0] is None
    seen(store, "b", now)
    assert b.admit("b", 2 * ROWS, 0, LOOSE, now)[0] == 1
    a.put("a", 1, {}, make_rows(1, ROWS), 0)
    assert a.admit("a", ROWS, 0, LOOSE, now + 1)[0] == 1
    if how == "starts anew":
        b.position("b")
    elif how == "leaves":
        b.leave("b")
    later = now + (LOST_SECONDS + 1 if how == "is lost" else 1)
    assert a.admit("a", ROWS, 0, LOOSE, later)[0] is None


def test_a_short_batch_ends_a_wait_for_room(store, explorers):
    """One row is left over, too few for a batch; with a further step on top, its last row would be too old."""
    a, b = explorers
    b.mark_finished("b")
    assert a.admit("a", ROWS, 0, STRICT) == (None, 0)
    a.put("a", 1, {}, make_rows(1, 1), 0)
    assert store.lease(1, ROWS, 0) is None
    assert a.admit("a", ROWS, 0, STRICT) == (1, 0)
    assert len(store.lease(1, ROWS, 0)) == 1
    assert a.admit("a", ROWS, 1, STRICT) == (None, 1)


@pytest.mark.parametrize("how", ["starts anew", "is lost", "is lost, and the clock was set back"])
def test_a_dead_explorers_step_counts_until_then(store, explorers, how):
    a, b = explorers
    now = 1e6
    assert a.admit("a", ROWS, 0, STRICT, now) == (None, 0)
    seen(store, "a", now + 10)
    later = now + 9 + LOST_SECONDS
    assert b.admit("b", ROWS, 0, STRICT, later)[0] == 1
    if how == "starts anew":
        a.position("a")
        assert b.admit("b", ROWS, 0, STRICT, later)[0] is None
    else:
        later = now + 8 - LOST_SECONDS if "set back" in how else later + 2
        assert b.admit("b", ROWS, 0, STRICT, later)[0] is None


def test_lost_explorers_do_not_hold_back_a_short_batch(store, explorers):
    a, b = explorers
    now = 1e6
    seen(store, "a", now)
    a.admit("a", ROWS, 0, STRICT, now)
    b.put("b", 1, {}, make_rows(1, 1), 0)
    assert b.admit("b", ROWS, 0, STRICT, now + 1)[0] == 1
    assert store.lease(1, ROWS, 0, now=now + 2) is None
    seen(store, "b", now + LOST_SECONDS)
    assert len(store.lease(1, ROWS, 0, now=now + LOST_SECONDS + 1)) == 1


def test_all_lost_explorers_are_waited_for(store, explorers):
    a, _ = explorers
    store.mark_finished("b")
    seen(store, "a", 0.0)
    a.admit("a", ROWS, 0, STRICT)
    assert store.lease(1, ROWS, 0) is None, "an explorer that comes back must not find its steps trained without it"


def test_a_rewind_forgets_steps_begun_and_waits(store, explorers):
    a, b = explorers
    a.admit("a", ROWS, 0, STRICT)
    a.put("a", 1, {}, make_rows(1, ROWS), 0)
    store.lease(1, ROWS, 0)
    a.admit("a", ROWS, 1, STRICT)
    b.admit("b", ROWS, 1, STRICT)
    assert store.stats().explorers["b"].waiting == 2
    store.rewind(0)
    assert store.stats().explorers["b"].waiting is None
    with pytest.raises(LineageChanged):
        b.admit("b", ROWS, 1, STRICT)
    b.position("b")
    assert b.admit("b", ROWS, 0, STRICT)[0] == 1, "the rows of a are back in the queue"


def test_a_wait_is_recorded_once(store, explorers):
    """Explorers that wait beside each other poll the store, so none may change it for nothing."""
    a, b = explorers
    a.admit("a", ROWS, 0, STRICT)
    b.admit("b", ROWS, 0, STRICT)
    with a.watching() as changes:
        before = changes()
        assert b.admit("b", ROWS, 0, STRICT)[0] == 1
        assert changes() == before
