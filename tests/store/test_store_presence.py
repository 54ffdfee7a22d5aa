"""Who takes part in a run, and when the trainer has finished."""

import itertools
import time

import pytest
from sqlalchemy import delete, insert
from store_helpers import make_rows

from trinity_core.base.errors import TransientFault, TrinityError
from trinity_core.config.sync_schedule import StalenessBound
from trinity_core.exchange.store import database
from trinity_core.exchange.store.members import Contribution, explorers
from trinity_core.exchange.store.presence import all_is_dropped, describe_explorers
from trinity_core.exchange.store.schema import EXPLORER
from trinity_core.exchange.store.store import ExperienceStore
from trinity_core.training.sources import wait_lease


def train(store, *steps):
    for step in steps:
        store.lease(step, 2, step - 1, final=True)
        store.commit(step)


def test_trainer_has_finished_with_its_last_checkpoint(store):
    assert not store.trainer().finished and store.trainer().describe(0.0) == "no trainer has been seen yet"
    store.begin("trainer", 2)
    train(store, 1)
    state = store.trainer()
    assert not state.finished and (state.committed, state.total) == (1, 2)
    assert state.describe(state.seen + 12) == "trainer with a checkpoint of step 1 of 2, last seen 12 s ago"
    train(store, 2)
    assert store.trainer().finished


def test_a_trainer_that_ends_early_has_finished(store):
    store.begin("trainer", 20)
    store.join("e", 4)
    train(store, 1)
    store.mark_ended("trainer")
    state = store.trainer()
    assert state.finished and (state.ended, state.committed, state.total) == (True, 1, 20)
    assert store.join("late", 4)
    store.expect_trainer()
    assert not store.trainer().finished and not store.join("late", 4)
    store.expect_trainer(False)
    assert store.trainer().finished, "it could not start"
    store.begin("trainer", 20)
    assert not store.trainer().finished and not store.trainer().ended


def test_nobody_trains_for_an_explorer_that_joins_late(store):
    store.begin("trainer", 1)
    assert not store.join("e", 5)
    train(store, 1)
    assert store.join("e", 5), "restarted"
    assert store.join("late", 5), "a further one"
    assert not store.join("e", 9) and not store.join("e", 9), "it has more steps than before, also after a crash"
    store.expect_trainer()
    assert not store.join("e", 5), "a trainer is started beside it"


def test_longer_trainer_waits_for_finished_explorers(store):
    store.begin("trainer", 1)
    store.position("e")
    store.mark_finished("e")
    train(store, 1)
    store.begin("trainer", 1)
    assert store.exhausted()
    store.expect_trainer()
    store.begin("trainer", 1)
    assert store.exhausted()
    store.expect_trainer()
    store.begin("trainer", 2)
    assert not store.exhausted()


def test_an_explorer_that_has_left_is_not_waited_for(store):
    for name in ("a", "b"):
        store.join(name, 9)
        store.put(name, 1, {}, [], 0)
    store.mark_finished("a")
    assert not store.exhausted() and store.lease(1, 2, 0) is None
    store.leave("b")
    assert store.exhausted() and store.lease(1, 2, 0) == []
    store.join("b", 9)
    assert not store.exhausted() and store.lease(2, 2, 1) is None, "it is back"
    for name in ("a", "b"):
        store.leave(name)
    assert not store.exhausted() and store.lease(2, 2, 1) is None, "one of them must come back"
    assert describe_explorers(store.stats().explorers, 0.0).endswith("steps, left)")


def test_each_explorer_has_its_share_of_the_batches(store):
    store.put("a", 1, {}, make_rows(1, 2, tag="a"), 0)
    store.put("b", 1, {}, make_rows(1, 2, tag="b"), 0)
    store.put("b", 2, {}, make_rows(2, 2, version=1, tag="c"), 1)
    train(store, 1)
    assert store.contributions(1) == {"a": Contribution(2, 0.0)}
    train(store, 2, 3)
    assert store.contributions(2) == {"b": Contribution(2, 1.0)} and store.contributions(4) == {}
    assert store.contributions() == {"a": Contribution(2, 0.0), "b": Contribution(4, 1.0)}


def test_a_row_is_as_stale_as_its_oldest_token(store):
    """It was sampled while the weights changed (`sync_in_flight`)."""
    (row,) = make_rows(1, 1)
    row.versions[:] = (1, 1, 3, 3)
    train(store, 1, 2, 3, 4)
    store.put("a", 1, {}, [row], 3)
    train(store, 5)
    assert store.contributions(5) == {"a": Contribution(1, 4 - 1)}


def test_a_wait_names_who_is_missing_and_what_drops_all(store):
    with pytest.raises(TransientFault):
        wait_lease(store, 1, 2, 0, timeout=0.0)
    for name in ("e", "dead", "gone"):
        store.join(name, 9)
        store.put(name, 1, {}, [], 0)
    store.leave("gone")
    before = {"e": 1, "dead": 1, "gone": 1}
    with pytest.raises(TransientFault):
        wait_lease(store, 1, 2, 0, timeout=0.0)
    for step, name in ((2, "e"), (2, "gone")):
        store.put(name, step, {}, [], 0)
    known, now = store.stats().explorers, time.time()
    assert not all_is_dropped(known, before, now), "that explorer may be in the middle of a long step"
    assert not all_is_dropped(known, before, now + 99), "all are lost"
    store.mark_finished("dead")
    assert all_is_dropped(store.stats().explorers, before, now)


def test_rows_of_a_long_evaluation_or_step_are_waited_for(store):
    """While the explorer says that it is at work; the limit is for one that has gone."""
    store.join("e", 9)
    store.position("e")
    waits = itertools.count()

    def comes_late():
        if next(waits) == 0:
            began.append(time.monotonic())
        elif time.monotonic() > began[0] + 0.3 and not store.explorer_steps().get("e"):
            store.put("e", 1, {}, make_rows(1), 0)
        return False

    began: list[float] = []
    assert wait_lease(store, 1, 2, 0, timeout=0.2, stop=comes_late)
    store.leave("e")
    with pytest.raises(TransientFault):
        wait_lease(store, 2, 2, 1, timeout=0.2)


def test_a_wait_ends_for_good_if_operators_drop_everything(store):
    store.join("e", 9)
    steps = itertools.count(1)

    def explores():
        store.put("e", next(steps), {}, [], 0)
        return False

    with pytest.raises(TrinityError):
        wait_lease(store, 1, 2, 0, timeout=0.02, stop=explores)


def test_an_explorer_whose_clock_is_behind_is_not_lost(postgresql_url, tmp_path, monkeypatch):
    """Its step in progress counts for the others' bound on staleness, and the trainer waits for it."""
    bound = StalenessBound(max_staleness=0, batch_rows=4)
    with ExperienceStore.open(postgresql_url, str(tmp_path)) as store:
        for explorer in ("behind", "other"):
            store.position(explorer)
            store.join(explorer, 10)
        with monkeypatch.context() as machine:
            real = time.time
            machine.setattr(time, "time", lambda: real() - 90)
            store.mark_seen(EXPLORER, "behind")
            assert store.admit("behind", 4, 0, bound.awaited)[0] is None
        assert store.admit("other", 4, 0, bound.awaited)[0] == 1
        stats = store.stats()
        assert abs(stats.explorers["behind"].seen - stats.now) < 30


def test_a_clock_that_is_set_loses_nobody(open_store, monkeypatch, tmp_path):
    """The machine's clock: a server's is its own."""
    real, since_boot = time.time, time.monotonic
    with open_store() as store:
        store.position("e")
        store.join("e", 4)
        jumps = itertools.cycle((3600.0, -3600.0))
        monkeypatch.setattr(time, "time", lambda: real() + next(jumps))
        with open_store() as another:
            for one in (store, another) * 2:
                stats = one.stats()
                assert stats.explorers["e"].is_at_work(stats.now)
    (tmp_path / "boot").write_text("another boot\n")
    monkeypatch.setattr(database, "BOOT_ID", tmp_path / "boot")
    monkeypatch.setattr(time, "time", lambda: real() + 90.0)
    monkeypatch.setattr(time, "monotonic", lambda: since_boot() - since_boot() + 5.0)
    with open_store() as store:
        stats = store.stats()
        assert abs(stats.now - time.time()) < 30 or not store._database._backend.one_machine


def test_a_look_at_explorers_reads_no_history(tmp_path):
    """The trainer looks every second while it waits, also after 100,000 explore steps."""
    with ExperienceStore.open(tmp_path / "store.db") as store:

        def instructions(steps):
            """SQLite operations of a look, in hundreds, with that number of steps; the last two have no row."""
            t, count = store._tables, itertools.count()
            record = {"explorer": "a", "version": 0, "position": "{}", "tasks": 1}
            with store._database.write() as connection:
                connection.execute(delete(t.steps))
                rows = [record | {"step": step, "rows": int(step < steps - 1)} for step in range(1, steps + 1)]
                connection.execute(insert(t.steps), rows)
            with store._database.read() as connection:
                driver = connection.connection.driver_connection
                driver.set_progress_handler(lambda: next(count) < 0, 100)
                known = explorers(connection, t)["a"]
                driver.set_progress_handler(None, 100)
            assert (known.step, known.empty_steps) == (steps, 2)
            return next(count)

        store.position("a")
        assert instructions(5000) <= instructions(50) + 5
