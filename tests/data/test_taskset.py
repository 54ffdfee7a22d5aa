import json
import logging
from pathlib import Path

import pytest
from raising import raising

from trinity_core.base.errors import DataError
from trinity_core.config.schema.buffer import FormatConfig, RolloutArgs, TasksetConfig
from trinity_core.data.files import RejectedRow, RowLocation
from trinity_core.data.rejected import RejectedRows
from trinity_core.data.task import Task
from trinity_core.data.taskset import PromptCheck, Taskset
from trinity_core.workflows import WORKFLOWS
from trinity_core.workflows.builtin import THINK_PROMPT


def written(tmp_path, rows, **config):
    path = tmp_path / "train.jsonl"
    path.write_text("".join(json.dumps(row) + "\n" if isinstance(row, dict) else f"{row}\n" for row in rows))
    form = FormatConfig(prompt_key="question", response_key="answer")
    return TasksetConfig(name="gsm8k", path=str(tmp_path), format=form, **config)


def test_task_carries_what_its_workflow_needs(tmp_path):
    config = written(
        tmp_path,
        [{"question": "1+1?", "answer": "#### 2"}],
        repeat_times=8,
        default_workflow_type="math_workflow",
        default_reward_fn_type="math_reward",
        rollout_args=RolloutArgs(temperature=0.5, top_k=3),
        workflow_args={"a": 1},
        reward_fn_args={"format_weight": 0.1},
    )
    task = Taskset.open(config, seed=3)[0]
    assert task.messages == [{"role": "user", "content": "1+1?"}] and task.truth == "#### 2" and task.tools is None
    assert task.sampling == {"temperature": 0.5, "top_k": 3}
    assert (task.workflow, task.reward_fn, task.repeat_times) == ("math_workflow", "math_reward", 8)
    assert (task.workflow_args, task.reward_fn_args) == ({"a": 1}, {"format_weight": 0.1})


def test_bad_rows_are_rejected_and_listed(tmp_path, caplog):
    rows = [
        {"question": "a", "answer": "1"},
        "{",
        {"question": ""},
        {"question": "b", "answer": None},
        {"question": "c", "answer": 0},
        {"question": "d"},
        {"question": "e", "answer": " \n"},
        {"question": "f", "answer": float("nan")},
        {"question": "g", "answer": float("-inf")},
        {"question": "h", "answer": 1e16},
    ]
    with caplog.at_level(logging.WARNING):
        taskset = Taskset.open(written(tmp_path, rows), seed=0)
    assert [task.raw["question"] for task in taskset.tasks()] == ["a", "c", "h"]
    assert sorted(row.location.line for row in taskset.rejected) == [2, 3, 4, 6, 7, 8, 9]
    assert "'gsm8k'" in caplog.text and f"{tmp_path}/train.jsonl:3: " in caplog.text
    assert all("format.response_key" in row.reason for row in taskset.rejected[2:])


def test_final_assistant_message_is_the_reference(tmp_path):
    asked, answered = {"role": "user", "content": "q"}, {"role": "assistant", "content": "a"}
    rows = [{"messages": [asked], "answer": "1"}, {"messages": [asked, answered]}, {"messages": [asked]}]
    form = FormatConfig(prompt_type="messages", response_key="answer")
    config = written(tmp_path, rows).with_values({"format": form})
    taskset = Taskset.open(config, seed=0)
    assert [task.truth for task in taskset.tasks()] == ["1", "a"] and [
        row.location.line for row in taskset.rejected
    ] == [3]


def test_a_row_may_name_its_workflow_and_reward(tmp_path):
    rows = [
        {"question": "a", "kind": "math_boxed_workflow", "how": {"reward": "countdown_reward"}},
        {"question": "b", "kind": "", "how": None},
        {"question": "c", "kind": "package.module.Mine"},
        {"question": "d", "kind": "math_wokflow"},
        {"question": "e", "kind": 3},
        {"question": "f", "how": {"reward": "no_reward"}},
    ]
    form = FormatConfig(prompt_key="question", workflow_key="kind", reward_fn_key="how.reward")
    defaults = {"default_workflow_type": "simple_workflow", "default_reward_fn_type": "math_reward"}
    taskset = Taskset.open(written(tmp_path, rows, **defaults).with_values({"format": form}), seed=0)
    assert [(task.workflow, task.reward_fn) for task in taskset.tasks()] == [
        ("math_boxed_workflow", "countdown_reward"),
        ("simple_workflow", "math_reward"),
        ("package.module.Mine", "math_reward"),
    ]
    assert [row.location.line for row in taskset.rejected] == [4, 5, 6]
    assert all("kind" in row.reason for row in taskset.rejected[:2]) and "how.reward" in taskset.rejected[2].reason


def test_no_usable_row_is_an_error_that_names_the_columns(tmp_path):
    config = written(tmp_path, [{"prompt": "a"}] * 7)
    with raising(DataError, key="gsm8k"):
        Taskset.open(config, seed=0)
    with raising(DataError, key="gsm8k"):
        Taskset.open(written(tmp_path, []), seed=0)


def test_long_prompts_are_rejected_at_the_start(tmp_path, encoder):
    rows = [{"question": "a"}, {"question": "b " * 50}, {"question": "c"}]
    config = written(tmp_path, rows)
    taskset = Taskset.open(config, seed=0, prompts=PromptCheck(encoder, 30))
    assert [task.raw["question"] for task in taskset.tasks()] == ["a", "c"]
    assert [str(row.location).split(":")[-1] for row in taskset.rejected] == ["2"]
    assert [task.location for task in taskset.tasks()] == [f"{tmp_path}/train.jsonl:{line}" for line in (1, 3)]
    assert not Taskset.open(config, seed=0, prompts=PromptCheck(encoder)).rejected  # where prompts are cut
    with raising(DataError, key="gsm8k"):
        Taskset.open(config, seed=0, prompts=PromptCheck(encoder, 3))


def test_the_system_prompt_of_a_workflow_counts(tmp_path, encoder):
    """As engines are given it. A task set's own comes first."""
    thinks = {"default_workflow_type": "math_workflow", "workflow_args": {"with_think": True}}
    config = written(tmp_path, [{"question": "a"}, {"question": "b"}]).with_values(thinks)
    with raising(DataError, key="gsm8k"):
        Taskset.open(config, seed=0, prompts=PromptCheck(encoder, 30))
    system, user = Taskset.open(config, seed=0, prompts=PromptCheck(encoder, 900))[0].messages
    assert system == {"role": "system", "content": THINK_PROMPT} and user["content"] == "a"
    own = config.with_values({"format": config.format.with_values({"system_prompt": "s"})})
    assert [one["content"] for one in Taskset.open(own, 0, prompts=PromptCheck(encoder, 30))[1].messages] == ["s", "b"]


def test_prompts_are_checked_with_the_template_of_their_set(tmp_path, encoder):
    config = written(tmp_path, [{"question": "a"}, {"question": "no"}])
    refuses = (
        "{% if messages[0].content == 'no' %}{{ raise_exception('not this') }}{% endif %}{{ messages[0].content }}"
    )
    form = config.format.with_values({"chat_template": refuses})
    taskset = Taskset.open(config.with_values({"format": form}), seed=0, prompts=PromptCheck(encoder, 1))
    assert [task.raw["question"] for task in taskset.tasks()] == ["a"]
    assert "not this" in taskset.rejected[0].reason


def test_seed_depends_on_run_task_group_repeat_and_turn():
    def seeds(**fields):
        task = Task(
            **({"index": 1, "raw": {}, "taskset": "t", "workflow": "w", "repeat_times": 4, "group": "e/1/0"} | fields)
        )
        return task.rollout_seeds() + task.rollout_seeds(turn=1)

    streams = [seeds(), seeds(seed=1), seeds(index=2), seeds(taskset="u"), seeds(group="e/2/0")]
    every = [seed for stream in streams for seed in stream]
    assert len(set(every)) == len(every) == 40
    assert all(0 <= seed < 2**31 for seed in every)
    assert seeds() == seeds()


def test_evaluation_goes_through_the_file_in_order(tmp_path):
    rows = [{"question": str(number), "answer": "1"} for number in range(5)]
    taskset = Taskset.open(written(tmp_path, rows), seed=0, is_eval=True)
    assert [task.raw["question"] for task in taskset.tasks(3)] == ["0", "1", "2"]
    assert all(task.is_eval for task in taskset.tasks()) and len(taskset) == 5


BAD = [RejectedRow(RowLocation("train.jsonl", line), "the line is not JSON") for line in (2, 7)]


def test_rejected_rows_are_written_with_file_line_and_reason(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    rows, path = RejectedRows(0.5, tmp_path / "explorer"), tmp_path / "explorer/a%2Fb.jsonl"
    rows.settle("a/b", BAD, kept=2)
    lines = [json.loads(line) for line in path.read_text().splitlines()]
    assert lines == [{"source": "train.jsonl", "line": line, "reason": "the line is not JSON"} for line in (2, 7)]
    assert str(path) in caplog.text
    rows.settle("a/b", [], kept=4)
    assert not path.exists(), "the file would list rows that are fine by now"


def test_more_rejected_rows_than_allowed_are_refused(tmp_path: Path) -> None:
    with raising(DataError, key="gsm8k"):
        RejectedRows(0.4, tmp_path).settle("gsm8k", BAD, kept=2)
    assert len((tmp_path / "gsm8k.jsonl").read_text().splitlines()) == 2, "they are listed all the same"
    with raising(DataError, key="gsm8k"):
        RejectedRows(1.0).settle("gsm8k", BAD, kept=0)
    with pytest.raises(DataError) as caught:
        RejectedRows(1.0).settle(
            "gsm8k", [*BAD, RejectedRow(RowLocation("train.jsonl", 9), "its prompt is empty")], kept=0
        )
    message = str(caught.value)
    assert message.count(BAD[0].reason) == 1 and "train.jsonl:2" in message and "train.jsonl:9" in message


def test_rows_whose_reference_is_an_object_or_a_list_are_rejected_by_rewards_that_compare_one_answer(tmp_path):
    truths = ["34", {"ground_truth": "34"}, ["34", "35"], '{"ground_truth": "34"}', "\\{1, 2\\}"]
    rows = [{"question": "?", "answer": truth} for truth in truths]
    for workflow, reward in (("math_workflow", None), ("simple_workflow", "math_reward")):
        opened = Taskset.read(
            written(tmp_path, rows, default_workflow_type=workflow, default_reward_fn_type=reward), seed=1
        )
        assert [task.truth for task in opened.tasks()] == [truths[0], truths[4]]
        assert [row.location.line for row in opened.rejected] == [2, 3, 4]
    other = written(tmp_path, rows, default_workflow_type="simple_workflow", default_reward_fn_type="format_reward")
    assert len(Taskset.read(other, seed=1)) == 5
    own = written(tmp_path, [row | {"judge": "format_reward"} for row in rows], default_reward_fn_type="math_reward")
    assert (
        len(Taskset.read(own.model_copy(update={"format": own.format.with_values({"reward_fn_key": "judge"})}), 1)) == 5
    )


def test_a_reference_is_judged_by_the_rows_own_reward_and_not_where_a_plugin_may_change_it(tmp_path, monkeypatch):
    rows = [{"question": "?", "answer": "4"}, {"question": "?", "answer": ["4", "5"], "judge": "math_reward"}]
    form = written(tmp_path, rows).format.with_values({"response_key": "answer", "reward_fn_key": "judge"})
    own = written(tmp_path, rows, default_workflow_type="simple_workflow", default_reward_fn_type="format_reward")
    assert len(Taskset.read(own.model_copy(update={"format": form}), seed=1)) == 1

    class OfAPlugin(WORKFLOWS["math_workflow"]):
        __module__ = "plugins.mine"

    monkeypatch.setitem(WORKFLOWS, "of_a_plugin", OfAPlugin)
    assert len(Taskset.read(written(tmp_path, rows, default_workflow_type="of_a_plugin"), seed=1)) == 2
