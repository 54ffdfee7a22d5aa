"""Pages of groups: what the filters take, that pages add up, that a large store is not sorted for them."""

from __future__ import annotations

import itertools

import numpy as np
import pytest
from sqlalchemy import event, insert, text

from trinity_core.data.experience import Experience
from trinity_core.exchange.store.ledger import DrawnTask
from trinity_core.exchange.store.store import ExperienceStore
from trinity_core.view.app import GroupFilter, find_groups, group_row, groups_query


def rows_of(group: str, rewards: list[float | None], version: int) -> list[Experience]:
    return [
        Experience(np.arange(6), 2, np.ones(4, bool), None, np.full(4, version), reward, group=group, run=run)
        for run, reward in enumerate(rewards)
    ]


@pytest.fixture(params=["sqlite", "postgresql"])
def store(request, tmp_path):
    """20 steps of two explorers, in turn: the second began later. Task 3 of each step failed."""
    url = request.getfixturevalue("postgresql_url") if request.param == "postgresql" else f"sqlite:///{tmp_path}/s.db"
    with ExperienceStore.open(url, str(tmp_path)) as opened:
        for step, (explorer, lag) in itertools.product(range(1, 21), (("early", 0), ("late", 5))):
            if step <= lag:
                continue
            experiences, drawn = [], []
            for task in range(3):
                name = f"{explorer}/{step - lag}/{task}"
                experiences += rows_of(name, [float(task), step / 100], version=step - 1)
                drawn.append(DrawnTask(name, f"set{task}/{step}", 2))
            drawn.append(DrawnTask(f"{explorer}/{step - lag}/3", f"set3/{step}", 0, failure="it broke"))
            opened.put(explorer, step - lag, {}, experiences, step - 1, drawn=drawn)
        yield opened


def found(store, wanted: GroupFilter, limit: int = 100) -> list[str]:
    """The names on all pages, in order."""
    names, before = [], None
    while True:
        with store._database.read() as connection:
            page = find_groups(connection, store._tables, wanted, before, limit)
        assert len(page.groups) <= limit
        names += [group["group"] for group in page.groups]
        if page.before is None:
            return names
        assert before is None or page.before < before, "a page goes on where the last one ended"
        before = page.before


def test_filters_take_what_they_say(store) -> None:
    everything = found(store, GroupFilter())
    assert len(everything) == len(set(everything)) == 4 * 35 and everything[0] == "late/15/3"
    assert found(store, GroupFilter(step=15)) == [
        *(f"late/15/{task}" for task in (3, 2, 1, 0)),
        *(f"early/15/{task}" for task in (3, 2, 1, 0)),
    ]
    assert found(store, GroupFilter(version=2)) == ["early/3/2", "early/3/1", "early/3/0"]
    assert {name[-1] for name in found(store, GroupFilter(group="set1/"))} == {"1"}
    assert found(store, GroupFilter(group="set2/20")) == ["late/15/2", "early/20/2"]
    assert found(store, GroupFilter(group="early/7/")) == [f"early/7/{task}" for task in (3, 2, 1, 0)]
    assert found(store, GroupFilter(group="%")) == []
    assert {name[-1] for name in found(store, GroupFilter(state="failed"))} == {"3"}
    assert found(store, GroupFilter(step=4, group="set0", version=3)) == ["early/4/0"]


@pytest.mark.parametrize("wanted", [GroupFilter(), GroupFilter(step=9), GroupFilter(state="failed")])
@pytest.mark.parametrize("limit", [1, 3, 7])
def test_pages_add_up(store, wanted, limit) -> None:
    assert found(store, wanted, limit) == found(store, wanted)


def test_a_step_is_found_after_a_rewind(store) -> None:
    """Its explore steps are undone and numbered again; their groups get ids that no group had."""
    assert store.lease(1, 2, newest_version=0) is not None
    store.commit(1)
    store.rewind(1)
    for explorer in ("early", "late"):
        at = store.position(explorer).step
        store.put(explorer, at + 1, {}, rows_of(f"again {explorer}", [1.0], 1), 1)
        assert f"again {explorer}" in found(store, GroupFilter(step=at + 1))


def test_a_page_of_a_large_store_takes_few_statements_and_no_sorting(tmp_path) -> None:
    """200,000 groups: the database goes through them by primary key until a page is full."""
    with ExperienceStore.open(f"sqlite:///{tmp_path}/s.db") as store:
        store.put("explorer", 1, {}, rows_of("first", [1.0], 0), 0)
        t = store._tables
        with store._database.write() as connection:
            row = {"explorer": "explorer", "size": 0, "newest": 0, "oldest": 0, "state": 4, "produced": 0, "tries": 1}
            many = [row | {"id": i, "name": f"g{i}", "step": i // 100, "task": f"s/{i}"} for i in range(100, 200_000)]
            connection.execute(insert(t.groups), many)
        with store._database.read() as connection:
            asked: list[str] = []
            event.listen(connection, "before_cursor_execute", lambda *arguments: asked.append(arguments[2]))
            page = find_groups(connection, t, GroupFilter(), limit=30)
            assert [group["id"] for group in page.groups] == list(range(199_999, 199_969, -1))
            page = find_groups(connection, t, GroupFilter(step=700), limit=30)
            assert page.groups[0]["group"] == "g70099" and page.before == 70_070
            assert len(asked) == 6
            query = groups_query(t, GroupFilter(version=3, group="x", state="trained"), before=9)
            statement = query.compile(connection, compile_kwargs={"literal_binds": True})
            plan = " ".join(str(row) for row in connection.execute(text(f"EXPLAIN QUERY PLAN {statement}")))
            assert "USING INTEGER PRIMARY KEY (rowid<?)" in plan and "TEMP B-TREE" not in plan


def test_a_group_names_its_batches(store) -> None:
    assert store.lease(1, 4, newest_version=0) is not None
    with store._database.read() as connection:
        trained = group_row(connection, store._tables, 1)
        waiting = group_row(connection, store._tables, 30)
        assert group_row(connection, store._tables, 10**6) is None
    assert (trained["train_steps"], trained["state"]) == ([1], "leased")
    assert (waiting["train_steps"], waiting["state"]) == ([], "ready")
