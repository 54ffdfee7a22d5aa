"""`multi_turn_workflow` and `toolcall_workflow`, with prepared turns."""

from __future__ import annotations

import json

import numpy as np
import pytest
from workflows.chatting import Turns
from workflows.workflow_helpers import make_task, run

from trinity_core.base.errors import DataError
from trinity_core.config.resolve import tool_call_rows
from trinity_core.config.schema.buffer import FormatConfig
from trinity_core.workflows import TOOLS, WORKFLOWS, Reward, RewardPool
from trinity_core.workflows.base import RolloutsFailed
from trinity_core.workflows.trajectory import returns

WRONG, RIGHT = "#### 3", "#### 2"


@pytest.fixture(scope="module")
def rewards():
    pool = RewardPool()
    yield pool
    pool.close()


def task_of(workflow: str, row: dict | None = None, **args):
    fields = {} if row is None else {"raw": row, "format": tool_call_rows(FormatConfig(), workflow, args)}
    return make_task(workflow, repeat_times=1, workflow_args=args, **fields)


def text_of(model, one) -> str:
    return model.tokenizer.decode(one.tokens.tolist())


def test_an_answer_that_is_wrong_is_tried_again(rewards):
    model = Turns(WRONG, WRONG, RIGHT, RIGHT)
    [one] = run(task_of("multi_turn_workflow", feedback="no", max_turns=5), model, rewards)
    assert text_of(model, one) == "<u1+1?><a#### 3><uno><a#### 3><uno><a#### 2>"
    assert one.reward == 1.0 and one.metrics["turns"] == 3 and one.metrics["accuracy"] == 1
    assert int(one.action_mask.sum()) == 3 * 7
    assert [how["seeds"] for _, how in model.asked] == [
        [task_of("").rollout_seed(0, turn, "trajectory 0")] for turn in range(3)
    ]
    assert model.asked[0][1]["temperature"] == 0.7


class Shown:
    """Rewards that keep what a judge would be shown."""

    def __init__(self):
        self.items = []

    async def score(self, name, items):
        self.items += items
        return [Reward(parts={"accuracy": 0.0}) for _ in items]


def test_judges_are_shown_the_conversation_before_each_answer():
    shown = Shown()
    run(task_of("multi_turn_workflow", feedback="no", max_turns=2), Turns(WRONG, RIGHT), shown)
    first, second = shown.items
    assert [message["role"] for message in first.messages] == ["user"]
    assert [(message["role"], message["content"]) for message in second.messages[1:]] == [
        ("assistant", first.response),
        ("user", "no"),
    ]
    assert second.messages[0] == first.messages[0] and second.prompt == first.prompt


def test_a_task_without_a_reference_answer_has_none():
    task = make_task("multi_turn_workflow", repeat_times=1, raw={"question": "1+1?"}, workflow_args={"max_turns": 2})
    [one] = run(task, Turns(WRONG, RIGHT), Shown())
    assert one.info["truth"] is None


def test_a_conversation_that_fills_the_context_keeps_its_reward(rewards):
    model = Turns(WRONG, RIGHT, max_model_len=30)
    [one] = run(task_of("multi_turn_workflow", feedback="n" * 30), model, rewards)
    assert one.reward == 0.0 and one.truncated and text_of(model, one) == "<u1+1?><a#### 3>"


@pytest.mark.parametrize(("discount", "expected"), [(None, [1.0, 1.0, 1.0]), (0.5, [0.25, 0.5, 1.0])])
def test_steps_get_what_came_of_them(rewards, discount, expected):
    model = Turns(WRONG, WRONG, RIGHT)
    rows = run(task_of("multi_turn_workflow", step_wise=True, discount=discount), model, rewards)
    assert [(row.run, row.turn) for row in rows] == [(0, 0), (0, 1), (0, 2)]
    assert [row.reward for row in rows] == expected
    assert all(row.action_mask.all() for row in rows)


def test_returns_reach_back():
    assert returns([1.0, None, Reward({"a": 1.0, "b": 3.0})], 0.5) == [1.0 + 0.25 * 4.0, 2.0, 4.0]
    assert returns([1.0, None], 0.5) == [None, None]
    broken = Reward(error="timeout")
    assert returns([1.0, broken, 2.0], 0.5) == [broken] * 3
    assert returns([], 1.0) == []


def add(a: int, b: int) -> int:
    return a + b


@pytest.fixture
def tools(monkeypatch):
    monkeypatch.setitem(TOOLS, "add", add)


def test_calls_are_carried_out_until_there_is_an_answer(rewards, tools):
    model = Turns('add {"a": 1, "b": 1}', 'sub {"a": 1}', "#### 2")
    [one] = run(task_of("toolcall_workflow", tools=["add"]), model, rewards)
    said = "<t2><a", "<terror: there is no tool 'sub'; there are add><a"
    assert text_of(model, one) == f'[1]<u1+1?><aadd {{"a": 1, "b": 1}}>{said[0]}sub {{"a": 1}}>{said[1]}#### 2>'
    assert one.reward == 1.0 and one.metrics["turns"] == 3
    assert one.metrics["tool_calls"] == 2 and one.metrics["tool_errors/unknown"] == 1
    context = model.tokenizer.decode(one.tokens[one.prompt_length :][~one.action_mask].tolist())
    assert context == "".join(said)


def test_turns_with_tools_are_limited(rewards, tools):
    call = 'add {"a": 1, "b": 1}'
    [one] = run(task_of("toolcall_workflow", tools=["add"], max_turns=2), Turns(call, call, call), rewards)
    assert one.reward == 0.0 and one.metrics["turns"] == 2 and one.metrics["tool_calls"] == 1


def test_a_tool_that_does_not_exist_is_refused_at_once(tools):
    arguments = WORKFLOWS["toolcall_workflow"].arguments
    assert arguments(tools=["add", "some.module.function"]).tools == ("add", "some.module.function")
    with pytest.raises(ValueError):
        arguments(tools=["addd"])


ROW = {
    "raw_system": "Call.",
    "conversations": [{"from": "human", "value": "1+1?"}],
    "tools": json.dumps([{"name": "add", "parameters": {"type": "object"}}]),
    "answer": json.dumps([{"name": "add", "arguments": {"b": 1, "a": 1}}]),
}


@pytest.mark.parametrize(
    ("said", "reward"), [('add {"a": 1, "b": 1}', 1.0), ('add {"a": 1, "b": 2}', 0.0), ("It is 2.", 0.0)]
)
def test_calls_are_compared_with_those_of_the_row(rewards, said, reward):
    model = Turns(said)
    [one] = run(task_of("toolcall_workflow", ROW), model, rewards)
    assert text_of(model, one) == f"[1]<sCall.><u1+1?><a{said}>"
    assert one.reward == reward and one.metrics["accuracy"] == reward
    assert one.info["prompt"] == "1+1?"


@pytest.mark.parametrize(("column", "value"), [("tools", "[{"), ("tools", '["add"]'), ("conversations", ["1+1?"])])
def test_a_row_that_cannot_be_read_is_refused(rewards, column, value):
    with pytest.raises(DataError):
        run(task_of("toolcall_workflow", {**ROW, column: value}), Turns("It is 2."), rewards)


def test_no_call_may_be_the_right_answer(rewards):
    [one] = run(task_of("toolcall_workflow", {**ROW, "answer": "[]"}), Turns("hello"), rewards)
    assert one.reward == 1.0


def test_a_reference_that_cannot_be_read_is_no_wrong_answer(rewards):
    [one] = run(task_of("toolcall_workflow", {**ROW, "answer": "add!"}), Turns("hello"), rewards)
    assert one.reward is None and one.metrics["verifier_errors"] == 1


def test_a_rollout_that_raises_leaves_the_others(rewards):
    task = make_task("multi_turn_workflow", repeat_times=3)
    with pytest.raises(IndexError):
        run(task, Turns(WRONG), rewards)
    with pytest.raises(RolloutsFailed) as failed:
        run(task, Turns(RIGHT), rewards)
    [experience] = failed.value.experiences
    assert (experience.reward, experience.group) == (1.0, task.group)
    assert {experience.run, *failed.value.errors} == {0, 1, 2}


def test_async_math_workflow_is_math_workflow(rewards):
    class Answers(Turns):
        async def chat(self, messages, n=1, *rest, seeds=None, **how):
            return [(await super(Answers, self).chat(messages, 1, seeds=[seed]))[0] for seed in seeds]

    rows = run(make_task("async_math_workflow"), Answers(RIGHT, WRONG, RIGHT), rewards)
    assert [row.reward for row in rows] == [1.0, 0.0, 1.0]
    assert np.concatenate([row.action_mask for row in rows]).all()
