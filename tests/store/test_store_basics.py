"""Put, lease, positions, short batches, waiting."""

import threading
import time

import numpy as np
import pytest
from store_helpers import ids, make_rows

from trinity_core.base.errors import TransientFault, TrinityError
from trinity_core.exchange.store.database import namespaces
from trinity_core.exchange.store.store import ExperienceStore, LineageChanged
from trinity_core.exchange.store.strategies import Priority
from trinity_core.training.sources import wait_lease


def test_experiences_round_trip_through_the_store(store):
    row = make_rows(1, 1)[0]
    row.metrics = {"accuracy": 0.5}
    row.token_rewards = np.arange(4)
    store.put("e", 1, {"epoch": 0, "offset": 8}, [row], newest_version=0)
    (got,) = store.lease(1, 1, 0)
    for name in ("tokens", "action_mask", "logprobs", "versions", "token_rewards"):
        assert np.array_equal(getattr(got, name), getattr(row, name)), name
    for name in ("prompt_length", "reward", "group", "run", "metrics", "info"):
        assert getattr(got, name) == getattr(row, name), name


def test_explore_steps_are_taken_whole_if_asked(store):
    """As many sequences as an agent's rollouts became, or fewer than were asked for."""
    store.put("e", 1, {}, make_rows(3, 5, tag="a"), 0)
    store.put("e", 2, {}, make_rows(1, 1, tag="b"), 0)
    store.put("e", 3, {}, make_rows(2, 2, tag="c"), 0)
    assert len(store.lease(1, 4, 0, whole_step=True)) == 15
    assert ids(store.lease(2, 4, 1, whole_step=True)) == ["bg0r0"]
    assert len(store.lease(3, 4, 2, whole_step=True)) == 4
    assert store.lease(4, 4, 3, whole_step=True) is None, "the next one is still to come"
    store.put("e", 4, {}, [], 0)
    assert store.lease(4, 4, 3, whole_step=True) is None, "nothing is left of the fourth"
    store.put("e", 5, {}, make_rows(1, 1, tag="d"), 0, 9)
    assert ids(store.lease(4, 4, 3, whole_step=True)) == ["dg0r0"]
    assert store.lease(5, 4, 4, whole_step=True) == [], "the explorer waits for a newer version"


def test_groups_given_interleaved_are_kept_together(store):
    rows = make_rows(2, 2)
    store.put("e", 1, {}, [rows[0], rows[2], rows[1], rows[3]], 0)
    assert ids(store.lease(1, 2, 0)) == ["g0r0", "g0r1"]


def test_a_gap_is_refused(store):
    store.put("e", 1, {}, [], 0)
    with pytest.raises(LineageChanged):
        store.put("e", 3, {}, [], 0)


def test_equal_group_names_of_two_steps_stay_separate(store):
    store.put("a", 1, {}, make_rows(1), 0)
    store.put("b", 1, {}, make_rows(1), 0)
    assert len({row.group for row in store.lease(1, 4, 0)}) == 2


def test_short_batch_when_all_wait_for_the_trainer(store):
    store.put("e", 1, {}, make_rows(1), 0, waits_for=1)
    store.position("late")
    assert store.lease(1, 4, 0) is None
    store.mark_waiting("late", 1)
    assert len(store.lease(1, 4, 0)) == 2
    assert store.lease(2, 4, 1) is None


def test_empty_batch_when_nothing_more_comes(store):
    store.put("e", 1, {}, [], 0)
    store.mark_finished("e")
    assert store.lease(1, 4, 0) == []
    assert store.lease(1, 4, 0) == []
    assert store.exhausted()


def test_final_lease_takes_an_incomplete_batch(store):
    store.put("e", 1, {}, make_rows(1), 0)
    assert len(store.lease(1, 4, 0, final=True)) == 2


def test_rows_of_a_future_version_stop_the_trainer(store):
    store.put("e", 1, {}, make_rows(2, version=7), 7)
    with pytest.raises(TrinityError):
        store.lease(1, 4, 3)


def test_a_committed_step_is_not_leased_again(store):
    store.put("e", 1, {}, make_rows(2), 0)
    store.commit(3)
    with pytest.raises(TrinityError):
        store.lease(2, 4, 1)


def test_wait_lease_wakes_soon(store, open_store):
    def put():
        with open_store() as other:
            other.put("e", 1, {}, make_rows(2), 0)

    threading.Timer(0.2, put).start()
    start = time.monotonic()
    assert len(wait_lease(store, 1, 4, 0, timeout=30)) == 4
    assert time.monotonic() - start < 10


def test_wait_lease_stops_and_times_out(store, caplog):
    assert wait_lease(store, 1, 4, 0, stop=lambda: True) is None
    with pytest.raises(TransientFault):
        wait_lease(store, 1, 4, 0, timeout=0.02)
    store.put("e", 1, {}, make_rows(1), 0)
    assert len(wait_lease(store, 1, 4, 0, timeout=0.02)) == 2
    [record] = caplog.records
    assert record.levelname == "WARNING" and record.args[:3] == (1, 2, 4)


def test_wait_lease_takes_rows_that_may_be_used_again(store):
    replay = Priority(reuse_cooldown_time=0.0)
    store.put("e", 1, {}, make_rows(2), 0)
    assert len(store.lease(1, 4, 0, replay)) == 4
    assert len(wait_lease(store, 2, 8, 1, replay, timeout=0.02)) == 4
    with pytest.raises(TransientFault):
        wait_lease(store, 3, 8, 2, timeout=0.02)


def test_pruning_deletes_old_trained_rows(store):
    for step in (1, 2, 3):
        store.put("e", step, {}, make_rows(2), 0)
        store.lease(step, 4, step - 1)
    store.commit(2)
    assert store.prune(1) == 4
    stats = store.stats()
    assert (stats.trained, stats.leased, stats.ready) == (4, 4, 0)
    assert store.prune(9) == 4, "what no checkpoint holds is not pruned"


def test_runs_sharing_a_database_are_isolated(open_store):
    with open_store("one") as one, open_store("two") as two:
        one.put("e", 1, {}, make_rows(2), 0)
        assert two.stats().ready == 0
        assert two.put("e", 1, {}, [], 0)


def test_big_batches(store):
    store.put("e", 1, {}, make_rows(700, 3), 0)
    assert len(store.lease(1, 2100, 0)) == 2100
    store.rewind(0)
    assert store.stats().ready == 2100


@pytest.mark.parametrize("name", ["better?", "a b#1", "ü"])
def test_store_lies_in_the_folder_of_its_run(tmp_path, name):
    """Also that of a run whose name a URL would cut."""
    file = tmp_path / name / "buffer" / "store.db"
    with ExperienceStore.open(f"sqlite:///{file}") as store:
        store.position("explorer")
    assert file.is_file() and [path.name for path in tmp_path.iterdir()] == [name]
    assert namespaces(f"sqlite:///{file}") == [""]
