"""Several data sets in one batch: by their shares, in their own orders, the same for the same step."""

from __future__ import annotations

import json
from collections import Counter
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from trinity_core.config.schema.buffer import ExperienceBufferConfig, FormatConfig
from trinity_core.data.supervised import SupervisedMixture, SupervisedSet, apportioned
from trinity_core.exchange.store.expert import START, ExpertMixture

shares = st.lists(st.floats(0.01, 100.0), min_size=1, max_size=4)


@given(st.integers(0, 2000), shares)
def test_apportioned_rows_add_up_and_never_shrink(count: int, weights: list[float]) -> None:
    now, then = apportioned(count, weights), apportioned(count + 1, weights)
    assert sum(now) == count and all(0 <= a <= b for a, b in zip(now, then, strict=True))
    for drawn, weight in zip(now, weights, strict=True):
        assert abs(drawn - count * weight / sum(weights)) <= len(weights)


@pytest.fixture(scope="module")
def sets(encoder: Any, tmp_path_factory: pytest.TempPathFactory) -> list[SupervisedSet]:
    folder, form = tmp_path_factory.mktemp("sets"), FormatConfig(prompt_key="q", response_key="a")
    opened = []
    for name, count in (("many", 12), ("few", 3)):
        rows = "".join(json.dumps({"q": f"{name} {n}", "a": str(n)}) + "\n" for n in range(count))
        (folder / f"{name}.jsonl").write_text(rows)
        buffer = ExperienceBufferConfig(name=name, path=str(folder / f"{name}.jsonl"), format=form)
        opened.append(SupervisedSet.open(buffer, encoder, seed=1))
    return opened


def named(rows: Any) -> list[tuple[str, int]]:
    return [(row.group.split("/")[0], row.task_index) for row in rows]


def test_batches_have_each_set_by_its_share(sets: list[SupervisedSet]) -> None:
    mixture = SupervisedMixture(sets, [3.0, 1.0])
    batches = [mixture.batch(step, 8) for step in (1, 2, 3)]
    assert [Counter(name for name, _ in named(batch)) for batch in batches] == [{"many": 6, "few": 2}] * 3
    of_many = [row for batch in batches[:2] for name, row in named(batch) if name == "many"]
    assert sorted(of_many) == list(range(12)), "an epoch has each row once"
    assert [named(mixture.batch(2, 8))] == [named(batches[1])], "a step is computed on its own"
    assert len({row.group for batch in batches for row in batch}) == 24
    assert mixture.steps(1, 8) == 2 and mixture.steps(2, 8) == 4 and mixture.steps(1, 7) == 3


def test_expert_rows_of_several_sets_go_on_where_they_were(sets: list[SupervisedSet]) -> None:
    expert = ExpertMixture(SupervisedMixture(sets, [1.0, 1.0]))
    whole, _ = expert.take(7)
    first, position = expert.take(3, START)
    rest, after = expert.take(4, position)
    assert Counter(named(first + rest)) == Counter(named(whole)) and after["offset"] == 7
    assert all(row.is_expert for row in whole)
