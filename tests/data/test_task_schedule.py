import json
import re
from collections import Counter

import pytest
from hypothesis import given
from hypothesis import strategies as st

from trinity_core.config.schema.buffer import TaskSelectorConfig, TasksetConfig
from trinity_core.data.schedule import SELECTORS, RowOrder, TaskSchedule
from trinity_core.data.taskset import Taskset
from trinity_core.errors import DataError

sizes = st.lists(st.integers(1, 12), min_size=1, max_size=3)
selectors = st.sampled_from(sorted(SELECTORS))


def taskset(size, selector="shuffle", name="t", seed=None):
    config = TasksetConfig(name=name, path=name, task_selector=TaskSelectorConfig(selector_type=selector, seed=seed))
    return Taskset(config, [{"prompt": f"{name}{i}"} for i in range(size)], [])


def schedule(counts, selector, batch_size, seed):
    sets = [taskset(size, selector, f"t{number}") for number, size in enumerate(counts)]
    return TaskSchedule(sets, batch_size, seed)


def names(tasks):
    return [(task.taskset, task.index, task.group) for task in tasks]


@given(sizes, selectors, st.integers(1, 9), st.integers(0, 5), st.integers(1, 12), st.integers(1, 12))
def test_resume_at_any_step_gives_the_same_order(counts, selector, batch_size, seed, total, stop):
    whole = schedule(counts, selector, batch_size, seed)
    expected = [names(whole.tasks(step)) for step in range(1, total + 1)]
    stop = min(stop, total)
    position = json.loads(json.dumps(whole.position(stop)))
    resumed = schedule(counts, selector, batch_size, seed)
    resumed.check(position)
    assert [names(resumed.tasks(step)) for step in range(position["step"] + 1, total + 1)] == expected[stop:]


@given(sizes, st.sampled_from(["sequential", "shuffle"]), st.integers(0, 5), st.integers(0, 3))
def test_an_epoch_takes_every_row_once(counts, selector, seed, epoch):
    order = RowOrder(tuple(counts), (selector,) * len(counts), (seed,) * len(counts))
    taken = order.take(epoch * order.epoch_length, order.epoch_length)
    assert sorted(taken) == [(source, row) for source, size in enumerate(counts) for row in range(size)]


@given(sizes, selectors, st.integers(0, 40), st.integers(0, 40), st.integers(0, 40))
def test_rows_do_not_depend_on_batch_boundaries(counts, selector, start, first, second):
    order = RowOrder(tuple(counts), (selector,) * len(counts), (1,) * len(counts))
    assert order.take(start, first) + order.take(start + first, second) == order.take(start, first + second)


def test_sequential_is_file_order_and_flows_over_the_end():
    assert [[task.index for task in schedule([5], "sequential", 3, 0).tasks(step)] for step in (1, 2, 3)] == [
        [0, 1, 2],
        [3, 4, 0],
        [1, 2, 3],
    ]


def test_shuffle_differs_by_epoch_and_seed():
    def epochs(seed):
        return [[task.index for task in schedule([50], "shuffle", 50, seed).tasks(step)] for step in (1, 2)]

    first, second = epochs(1)
    assert first != second and epochs(2)[0] != first and sorted(first) == list(range(50))


def test_random_draws_with_replacement():
    rows = [task.index for task in schedule([50], "random", 50, 1).tasks(1)]
    assert len(set(rows)) < 50


def test_tasksets_are_mixed_in_proportion():
    taken = Counter(
        task.taskset for step in range(1, 11) for task in schedule([300, 100], "shuffle", 20, 3).tasks(step)
    )
    assert 120 < taken["t0"] < 180 and taken["t0"] + taken["t1"] == 200


def test_a_selector_may_have_its_own_seed():
    own = TaskSchedule([taskset(20, seed=7)], 20, seed=1)
    other = TaskSchedule([taskset(20, seed=7)], 20, seed=2)
    assert [task.index for task in own.tasks(1)] == [task.index for task in other.tasks(1)]


def test_groups_are_unique_and_name_the_explorer():
    tasks = TaskSchedule([taskset(2)], 4, 0, explorer="explorer_new").tasks(3)
    assert [task.group for task in tasks] == [f"explorer_new/3/{slot}" for slot in range(4)]


def test_steps_of_gsm8k_in_the_quick_start():
    assert TaskSchedule([taskset(7473)], 128, 0).steps(1) == 58
    assert TaskSchedule([taskset(3)], 128, 0).steps(1) == 1


def test_a_position_of_other_data_is_refused():
    position = schedule([5], "shuffle", 3, 0).position(2)
    with pytest.raises(DataError, match=r"tasksets was \{'t0': 5\}, is \{'t0': 6\}"):
        schedule([6], "shuffle", 3, 0).check(position)
    with pytest.raises(DataError, match="batch_size was 3, is 4"):
        schedule([5], "shuffle", 4, 0).check(position)


@pytest.mark.parametrize(
    "sets, message",
    [
        ([taskset(5, "sequential")], "task_selector.selector_type was {'t': 'shuffle'}, is {'t': 'sequential'}"),
        ([taskset(5, seed=2)], "task_selector.seed was {'t': 1}, is {'t': 2}"),
        ([taskset(5, seed=1)], None),
        ([taskset(5)], "task_selector.seed was {'t': 1}, is {'t': 0}"),
    ],
)
def test_a_position_of_another_selector_is_refused(sets, message):
    position = json.loads(json.dumps(TaskSchedule([taskset(5, seed=1)], 3, 0).position(2) | {"evaluated": 4}))
    changed = TaskSchedule(sets, 3, 0)
    if message is None:
        changed.check(position)
        return
    with pytest.raises(DataError, match=re.escape(message)):
        changed.check(position)
    del position["task_selector.selector_type"], position["task_selector.seed"]  # as an older run has recorded it
    changed.check(position)


def test_reordered_tasksets_are_refused():
    first, second = taskset(5, name="a"), taskset(5, name="b")
    with pytest.raises(DataError, match=r"tasksets was \{'a': 5, 'b': 5\}, is \{'b': 5, 'a': 5\}"):
        TaskSchedule([second, first], 3, 0).check(TaskSchedule([first, second], 3, 0).position(2))


def test_nothing_to_schedule():
    with pytest.raises(DataError, match="no task set to explore"):
        TaskSchedule([], 1, 0)
    with pytest.raises(DataError, match="no task selector 'best'; there are random, sequential, shuffle"):
        RowOrder((1,), ("best",), (0,))


def test_a_new_selector_is_found_by_name(monkeypatch):
    monkeypatch.setitem(SELECTORS, "backwards", lambda count, random: __import__("numpy").arange(count)[::-1])
    assert RowOrder((3,), ("backwards",), (0,)).take(0, 3) == [(0, 2), (0, 1), (0, 0)]
