"""Pages of groups: what the filters take, that pages add up, that a large store is not sorted for them."""

from __future__ import annotations

import itertools
import re
from pathlib import Path

import numpy as np
import pytest

from trinity_core.data.experience import Experience
from trinity_core.exchange.store.ledger import DrawnTask
from trinity_core.exchange.store.schema import State
from trinity_core.exchange.store.store import ExperienceStore
from trinity_core.view.app import GroupFilter, find_groups

ROOT = Path(__file__).parent.parent.parent


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
    names = []
    while True:
        with store._database.read() as connection:
            groups, next_before = find_groups(connection, store._tables, wanted, limit)
        assert len(groups) <= limit
        names += [group["group"] for group in groups]
        if next_before is None:
            return names
        assert wanted.before is None or next_before < wanted.before, "a page begins where the last one ended"
        wanted = wanted.model_copy(update={"before": next_before})


def test_filters_take_what_they_say(store) -> None:
    everything = found(store, GroupFilter())
    assert len(everything) == len(set(everything)) == 4 * 35 and everything[0] == "late/15/3"
    assert found(store, GroupFilter(step=15)) == [
        *(f"late/15/{task}" for task in (3, 2, 1, 0)),
        *(f"early/15/{task}" for task in (3, 2, 1, 0)),
    ]
    assert found(store, GroupFilter(version=2)) == ["early/3/2", "early/3/1", "early/3/0"]
    assert {name[-1] for name in found(store, GroupFilter(task="set1/"))} == {"1"}
    assert found(store, GroupFilter(task="set2/20")) == ["late/15/2", "early/20/2"]
    assert found(store, GroupFilter(task="early/7/")) == [f"early/7/{task}" for task in (3, 2, 1, 0)]
    assert found(store, GroupFilter(task="%")) == []
    assert {name[-1] for name in found(store, GroupFilter(state="failed"))} == {"3"}
    assert found(store, GroupFilter(step=4, task="set0", version=3)) == ["early/4/0"]


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


def test_a_group_names_its_batches(store) -> None:
    assert store.lease(1, 4, newest_version=0) is not None
    with store._database.read() as connection:
        groups, _ = find_groups(connection, store._tables, GroupFilter(), limit=1000)
    by_id = {group["id"]: (group["train_steps"], group["state"]) for group in groups}
    assert (by_id[1], by_id[30]) == (([1], "leased"), ([], "ready"))


def test_states_have_the_same_words_in_store_page_and_glossary() -> None:
    page, glossary = ((ROOT / path).read_text() for path in ("trinity_core/view/static/index.html", "docs/glossary.md"))
    names = [state.name.lower() for state in State]
    choice = page.partition('<select name="state">')[2].partition("</select>")[0]
    assert re.findall(r"<option>(\w+)</option>", choice) == names
    [meaning] = re.findall(r"^\| state of a group \| (.*) \|$", glossary, re.MULTILINE)
    assert {*re.findall(r"(\w+) \(", meaning)} == {*names}
