import json
from collections import Counter

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from raising import raising

from trinity_core.base.errors import DataError
from trinity_core.config.schema.buffer import TaskSelectorConfig, TasksetConfig
from trinity_core.data.files import RowLocation
from trinity_core.data.schedule import TaskSchedule
from trinity_core.data.selectors import SELECTORS
from trinity_core.data.taskset import Taskset

COLUMNS = {"priority": ["p"], "offline_easy2hard": ["p", "q"], "difficulty_based": ["p", "q"]}
"""Columns that each selector reads."""
sizes = st.lists(st.integers(1, 12), min_size=1, max_size=3)
static = st.sampled_from(["sequential", "shuffle", "random"])
selectors = st.lists(st.sampled_from(sorted(SELECTORS)), min_size=3, max_size=3)
weights = st.one_of(st.none(), st.lists(st.integers(1, 5), min_size=3, max_size=3))
rounds = st.lists(st.lists(st.integers(1, 5), min_size=1, max_size=3), min_size=1, max_size=6)
"""Tasks drawn in each round of each step: the first for the step, the others to replace tasks that left nothing."""


def taskset(size, selector="shuffle", name="t", seed=None, weight=None, **kwargs):
    chosen = TaskSelectorConfig(
        selector_type=selector, seed=seed, feature_keys=COLUMNS.get(selector, ()), kwargs=kwargs
    )
    config = TasksetConfig(name=name, path=name, task_selector=chosen, weight=weight)
    rows = [{"prompt": f"{name}{i}", "p": (i * 7 % 5) / 8, "q": 0.5 + (i * 3 % 5) / 10} for i in range(size)]
    return Taskset(config, rows, [RowLocation(name, i) for i in range(size)])


def schedule(counts, selector, batch_size, seed):
    return TaskSchedule([taskset(size, selector, f"t{i}") for i, size in enumerate(counts)], batch_size, seed)


def tasks(order, step, count=None):
    order.begin(step)
    return order.draw(count or order.batch_size)


def names(drawn):
    return [(task.taskset, task.index, task.group) for task in drawn]


def score(task, step):
    """Like a model that learns: a function of the task and the step."""
    return [float((task.index + run + step) % 4 == 0) for run in range(3)] if (task.index + step) % 5 else []


def steps_of(order, plan, first=1):
    """The tasks of each step, and the positions after it, as a run stores them."""
    drawn, positions = [], []
    for step, counts in enumerate(plan, first):
        order.begin(step)
        indices = []
        for count in counts:
            further = order.draw(count)
            indices += further
            for task in further:
                order.observe(task, score(task, step))
        drawn.append(names(indices))
        positions.append(json.loads(json.dumps(order.finish_step())))
    return drawn, positions


@settings(max_examples=60, deadline=None)
@given(sizes, selectors, weights, st.integers(0, 5), rounds, st.data())
def test_a_killed_run_draws_the_same_tasks_again(counts, names_, weighed, seed, plan, data):
    """Killed anywhere, even within a step and its refills; resumed once or more, or sent back by a checkpoint."""

    def make():
        weighed_ = weighed or [None] * 3
        sets = [
            taskset(size, name, f"t{i}", weight=weighed_[i])
            for i, (size, name) in enumerate(zip(counts, names_, strict=False))
        ]
        return TaskSchedule(sets, 4, seed)

    expected, positions = steps_of(make(), plan)
    stop = data.draw(st.integers(0, len(plan)))
    resumed = make() if data.draw(st.booleans()) else steps_ahead(make(), plan)
    resumed.resume(positions[stop - 1] if stop else None, lambda: positions[:stop])
    if stop < len(plan) and data.draw(st.booleans()):  # killed within a step that nobody hears of again
        resumed.begin(stop + 1)
        for task in resumed.draw(plan[stop][0]):
            resumed.observe(task, score(task, stop + 1))
        resumed.resume(positions[stop - 1] if stop else None, lambda: positions)
    assert steps_of(resumed, plan[stop:], stop + 1) == (expected[stop:], positions[stop:])


def steps_ahead(order, plan):
    """An explorer that was ahead of the checkpoint to which its trainer goes back."""
    steps_of(order, plan)
    return order


@given(sizes, st.sampled_from(["sequential", "shuffle", "priority", "offline_easy2hard"]), st.integers(0, 5))
def test_an_epoch_takes_every_row_once(counts, selector, seed):
    order = schedule(counts, selector, sum(counts), seed)
    for step in (1, 2, 3):
        taken = sorted((task.taskset, task.index) for task in tasks(order, step))
        assert taken == [(f"t{source}", row) for source, size in enumerate(counts) for row in range(size)]


@given(sizes, static, st.integers(1, 40), st.integers(1, 40))
def test_rows_do_not_depend_on_batch_boundaries(counts, selector, first, second):
    apart, whole = schedule(counts, selector, 1, 1), schedule(counts, selector, 1, 1)
    rows = [(task.taskset, task.index) for task in tasks(apart, 1, first) + tasks(apart, 2, second)]
    assert rows == [(task.taskset, task.index) for task in tasks(whole, 1, first + second)]


def test_sequential_is_file_order_and_flows_over_the_end():
    order = schedule([5], "sequential", 3, 0)
    assert [[task.index for task in tasks(order, step)] for step in (1, 2, 3)] == [[0, 1, 2], [3, 4, 0], [1, 2, 3]]


def test_the_shuffled_order_follows_from_seed_and_epoch():
    """A run continues in this order after an update of the project."""
    order = TaskSchedule([taskset(4, name="a"), taskset(3, name="b")], 7, 3)
    mixed = np.random.default_rng([3, 2, 0]).permutation([0, 0, 0, 0, 1, 1, 1])
    rows = [iter(np.random.default_rng([3, source, 0]).permutation(size)) for source, size in ((0, 4), (1, 3))]
    assert [(t.taskset, t.index) for t in tasks(order, 1)] == [("ab"[source], next(rows[source])) for source in mixed]


def test_random_draws_with_replacement():
    rows = [task.index for task in tasks(schedule([50], "random", 50, 1), 1)]
    assert len(set(rows)) < 50


def test_tasksets_are_mixed_in_proportion():
    order = schedule([300, 100], "shuffle", 20, 3)
    taken = Counter(task.taskset for step in range(1, 11) for task in tasks(order, step))
    assert 120 < taken["t0"] < 180 and taken["t0"] + taken["t1"] == 200


def test_weights_say_how_many_tasks_each_set_gives():
    sets = [taskset(10, name="a", weight=3), taskset(500, name="b", weight=1), taskset(5, name="c", weight=0)]
    order = TaskSchedule(sets, 8, 0)
    assert [Counter(task.taskset for task in tasks(order, step)) for step in (1, 2, 3)] == [{"a": 6, "b": 2}] * 3
    a, b = taskset(10, name="a", weight=1), taskset(10, name="b", weight=2)
    uneven = TaskSchedule([a, b], 4, 0)
    counts = [Counter(task.taskset for task in tasks(uneven, step))["b"] for step in range(1, 601)]
    assert set(counts) == {2, 3} and 1570 < sum(counts) < 1630, "of 2400 tasks 1600 in expectation"


def test_weights_change_linearly_from_step_to_step():
    sets = [taskset(9, name="a"), taskset(9, name="b")]
    for one, by_step in zip(sets, ({"2": 1, "6": 0}, {"2": 0, "6": 1}), strict=True):
        one.config = one.config.with_values({"weight_by_step": by_step})
    order = TaskSchedule(sets, 8, 0)
    counts = [Counter(task.taskset for task in tasks(order, step))["b"] for step in range(1, 9)]
    assert counts == [0, 0, 2, 4, 6, 8, 8, 8]


def test_rollouts_of_a_step_are_known_beforehand():
    twice, thrice = taskset(6, name="a"), taskset(6, name="b")
    twice.config, thrice.config = (one.config.with_values({"repeat_times": n}) for one, n in ((twice, 2), (thrice, 3)))
    order = TaskSchedule([twice, thrice], 5, 0)
    for step in range(1, 6):
        expected = order.rollouts(step)
        assert expected == sum(task.repeat_times for task in tasks(order, step))


def test_a_position_of_other_data_is_refused():
    order = schedule([5], "shuffle", 3, 0)
    tasks(order, 1)
    position = order.finish_step()
    with raising(DataError, key="tasksets"):
        schedule([6], "shuffle", 3, 0).resume(position)
    with raising(DataError, key="batch_size"):
        schedule([5], "shuffle", 4, 0).resume(position)


@pytest.mark.parametrize(
    "now, key",
    [
        (taskset(5, "sequential"), "task_selector.selector_type"),
        (taskset(5, "difficulty_based", seed=2), "task_selector.seed"),
        (taskset(5, "difficulty_based", seed=1, m=8), "task_selector.kwargs"),
        (taskset(5, "difficulty_based", seed=1, m=4, lamb=0.2), "task_selector.kwargs"),
        (taskset(5, "difficulty_based", seed=1, lamb=0.3, m=4), None),
    ],
)
def test_a_position_of_another_selector_is_refused(now, key):
    order = TaskSchedule([taskset(5, "difficulty_based", seed=1, m=4, lamb=0.3)], 3, 0)
    ((_,), (position,)) = steps_of(order, [[3]])
    changed = TaskSchedule([now], 3, 0)
    if key is None:
        changed.resume(position | {"evaluated": 4}, lambda: [position])
        return
    with raising(DataError, key=key):
        changed.resume(position, lambda: [position])


def test_rate_of_rewards_of_both_signs_is_the_share_that_is_right():
    order = TaskSchedule([taskset(5, "difficulty_based")], 3, 0)
    for task in tasks(order, 1):
        order.observe(task, [1.0, -1.0, -1.0, 2.0])
    assert order.finish_step()["observed"]["t"]["rates"] == [0.5] * 3


def test_changed_features_and_a_lost_history_are_refused():
    order = TaskSchedule([taskset(5, "difficulty_based")], 3, 0)
    _, positions = steps_of(order, [[3], [3]])
    other = taskset(5, "difficulty_based")
    other.rows[2]["q"] = 0.99
    with pytest.raises(DataError):
        TaskSchedule([other], 3, 0).resume(positions[-1], lambda: positions)
    with raising(DataError, key="task_selector"):
        TaskSchedule([taskset(5, "difficulty_based")], 3, 0).resume(positions[-1], lambda: positions[1:])


@pytest.mark.parametrize("selector", ["sequential", "shuffle"])
@pytest.mark.parametrize("change", ["reversed", "other rows", "other answer"])
def test_changed_rows_are_refused(selector, change):
    """Half of an epoch is drawn, then the file is changed, but not its number of rows."""
    order = TaskSchedule([taskset(8, selector)], 4, 0)
    tasks(order, 1)
    position = json.loads(json.dumps(order.finish_step()))
    changed = taskset(8, selector, name="other" if change == "other rows" else "t")
    changed.config = order.tasksets[0].config
    if change == "reversed":
        changed.rows.reverse()
    if change == "other answer":
        changed.rows[7]["answer"] = "4"
    with raising(DataError, key="fingerprint of the usable rows"):
        TaskSchedule([changed], 4, 0).resume(position)
    TaskSchedule([taskset(8, selector)], 4, 0).resume(position)
    del position["fingerprint of the usable rows"]  # as a release before the fingerprint stored it
    TaskSchedule([changed], 4, 0).resume(position)
