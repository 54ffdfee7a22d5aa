"""Task sets that grow during a run: the table, reading it, and the order of draws."""

import json
import sqlite3

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from raising import raising

from trinity_core.base.errors import DataError
from trinity_core.config import config_from_dict
from trinity_core.config.schema.buffer import TaskSelectorConfig, TasksetConfig
from trinity_core.data.files import RowLocation
from trinity_core.data.rejected import RejectedRows
from trinity_core.data.schedule import TaskSchedule
from trinity_core.data.task_queue import QueueTaskset, TaskQueue
from trinity_core.data.taskset import PromptCheck, Taskset

TABLE = '"of ""users"""'
INSERT = f"INSERT INTO {TABLE} (task) VALUES (?)"


@pytest.fixture
def queue(tmp_path):
    new_queue = TaskQueue(tmp_path / "new" / "tasks.db", 'of "users"')
    new_queue.create()
    return new_queue


def opened(queue, **settings):
    config = TasksetConfig(name="q", storage_type="queue", **settings)
    taskset = QueueTaskset(config, [], [], queue=queue)
    taskset.grow()
    return taskset


def test_tasks_come_in_order_whoever_adds_them(queue):
    assert queue.add([{"prompt": "a"}, {"prompt": "b"}]) == 2
    with sqlite3.connect(queue.path) as anyone:
        anyone.execute(INSERT, ('{"prompt": "ü"}',))
    taskset = opened(queue)
    queue.add([{"prompt": "d"}])
    assert [row["prompt"] for row in taskset.rows] == ["a", "b", "ü"] and not taskset.ended
    taskset.grow()
    assert taskset[3].messages[-1]["content"] == "d" and queue.count() == (4, False)


def test_a_queue_ends_once(queue):
    queue.add([{"prompt": "a"}])
    queue.end()
    taskset = opened(queue)
    assert taskset.ended and len(taskset) == 1 and queue.count() == (1, True)
    with raising(DataError, key=queue.name):
        queue.add([{"prompt": "b"}])
    with sqlite3.connect(queue.path) as anyone:
        anyone.execute(INSERT, ('{"prompt": "late"}',))
    taskset.grow()
    assert len(taskset) == len(opened(queue)) == 1, "what comes after the end is not read"


def test_bad_tasks_are_set_aside_with_their_number(queue, caplog):
    with sqlite3.connect(queue.path) as anyone:
        for text in ('{"prompt": "a"}', "{", "[1]", '{"question": "b"}', '{"prompt": "c"}'):
            anyone.execute(INSERT, (text,))
    taskset = opened(queue)
    assert [row["prompt"] for row in taskset.rows] == ["a", "c"]
    assert [row.location.line for row in taskset.rejected] == [2, 3, 4]
    assert len(caplog.records) == 3


def test_if_the_first_task_has_an_answer_each_needs_one(queue):
    queue.add([{"prompt": "a", "response": "1"}])
    taskset = opened(queue)
    queue.add([{"prompt": "b"}, {"prompt": "c", "response": "2"}])
    taskset.grow()
    assert [row["prompt"] for row in taskset.rows] == ["a", "c"]


@settings(max_examples=15)
@given(st.lists(st.integers(0, 4), min_size=1, max_size=8), st.integers(1, 3), st.data())
def test_arrivals_and_resumes_never_change_the_order(tmp_path_factory, arrivals, batch_size, data):
    """Whatever arrives when, and wherever the run is killed: each task once, in the order of arrival."""
    queue = TaskQueue(tmp_path_factory.mktemp("queue") / "tasks.db", "q")
    queue.create()
    order = TaskSchedule([opened(queue)], batch_size, 0)
    drawn, added, position = [], 0, None
    for count in [*arrivals, None]:
        if count is None:
            queue.end()
        else:
            queue.add([{"prompt": str(added + i)} for i in range(count)])
            added += count
        if data.draw(st.booleans()):
            order = TaskSchedule([opened(queue)], batch_size, 0)
            order.resume(position)
        while not order.missing(order.step + 1) and not order.is_exhausted:
            order.begin(order.step + 1)
            tasks = order.draw(batch_size)
            if data.draw(st.booleans()):  # killed before the step was stored
                order = TaskSchedule([opened(queue)], batch_size, 0)
                order.resume(position)
                continue
            drawn += [task.index for task in tasks]
            assert len(tasks) == batch_size or order.is_exhausted
            position = order.finish_step()
    assert drawn == list(range(added)) and order.is_exhausted


def test_a_queue_is_mixed_with_other_tasks_by_weight(queue):
    rows = [{"prompt": str(i)} for i in range(9)]
    config = TasksetConfig(name="file", path="x", weight=1, task_selector=TaskSelectorConfig(selector_type="shuffle"))
    own = Taskset(config, rows, [RowLocation("x", i) for i in range(9)])
    order = TaskSchedule([own, opened(queue, weight=3)], 4, 0)
    assert order.missing(1) == {"q": 3}
    queue.add([{"prompt": "a"}, {"prompt": "b"}])
    assert order.missing(1) == {"q": 1}
    queue.add([{"prompt": "c"}, {"prompt": "d"}])
    assert order.missing(1) == {}
    order.begin(1)
    assert sorted(task.taskset for task in order.draw(4)) == ["file", "q", "q", "q"]
    queue.end()
    assert order.missing(2) == {} and not order.is_exhausted
    order.begin(2)
    tasks = order.draw(4)
    assert sorted(task.taskset for task in tasks) == ["file", "q"] and order.is_exhausted
    assert len({task.group for task in tasks + order.draw(2)}) >= len(tasks)


def test_bad_tasks_are_recorded_once(queue, tmp_path):
    queue.add([{"prompt": "a"}, {"question": "no prompt"}])
    config = config_from_dict({
        "mode": "explore", "checkpoint_root_dir": str(tmp_path), "model": {"model_path": "/m", "max_model_len": 16},
        "buffer": {"total_steps": 9, "explorer_input": {"taskset": {
            "name": "q", "storage_type": "queue", "path": str(queue.path), "subset_name": queue.name,
        }}},
    })  # fmt: skip
    (taskset,) = config.buffer.explorer_input.tasksets
    for _ in range(2):
        opened = QueueTaskset.of(config, taskset, rejected_rows=RejectedRows(folder=tmp_path / "rejected"))
    assert len(opened) == 1
    queue.add([{"question": "no prompt either"}])
    opened.grow()
    lines = [json.loads(line) for line in (tmp_path / "rejected/q.jsonl").read_text().splitlines()]
    assert [line["line"] for line in lines] == [2, 3]


def test_a_queue_that_lost_tasks_is_refused(queue):
    queue.add([{"prompt": "a"}, {"prompt": "b"}])
    tasks = TaskSchedule([opened(queue)], 2, 0)
    tasks.begin(1)
    tasks.draw(2)
    position = tasks.finish_step()
    with sqlite3.connect(queue.path) as anyone:
        anyone.execute(f"DELETE FROM {TABLE}")
    with raising(DataError, key="q"):
        TaskSchedule([opened(queue)], 2, 0).resume(position)


@pytest.mark.parametrize(("before", "now"), [(3, 9), (9, 3), (9, 9), (3, 1)])
def test_task_is_drawn_once_when_usable_tasks_change(queue, before, now):
    """All tasks with at most `before` letters were drawn; then others become usable, and one arrives."""

    class Letters(PromptCheck):
        def problems(self, prompts, template):
            too_long = [len(messages[-1]["content"]) > self.max_tokens for messages, _ in prompts]
            return [DataError("too long") if refused else None for refused in too_long]

    def schedule(longest):
        taskset = QueueTaskset(TasksetConfig(name="q"), [], [], queue=queue, prompts=Letters(None, longest))
        taskset.grow()
        return TaskSchedule([taskset], 3, 0)

    queue.add([{"prompt": "a"}, {"prompt": "long b"}, {"prompt": "cc"}])
    order = schedule(before)
    order.begin(1)
    order.draw(3)
    queue.add([{"prompt": "d"}])
    queue.end()
    resumed = schedule(now)
    resumed.resume(order.finish_step())
    assert not resumed.is_exhausted
    resumed.begin(2)
    assert [task.messages[-1]["content"] for task in resumed.draw(3)] == ["d"] and resumed.is_exhausted
