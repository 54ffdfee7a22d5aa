"""`trinity data check`: its report on data sets matches what a run would do with them."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from trinity_core.cli import app
from trinity_core.config import Config, ConfigError, config_from_dict
from trinity_core.data.inspection import guessed_format, inspect
from trinity_core.data.messages import ROLES
from trinity_core.data.reports import LOSS, PLAIN, report_text
from trinity_core.data.tiny import write_jsonl

FORM = {"prompt_key": "question", "response_key": "answer"}
ROWS = [
    {"question": "1+1?", "answer": "2"},
    {"question": "b " * 60, "answer": "3"},
    {"question": "5+1?", "answer": "6"},
    {"question": "1+1?", "answer": "2"},
    {"question": "4+1?"},
]


@pytest.fixture(scope="module")
def model(tokenizer: Any, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("model")
    tokenizer.save_pretrained(folder)
    return folder


@pytest.fixture
def given(model: Path, tmp_path: Path) -> dict[str, Any]:
    """A configuration that explores `ROWS` and evaluates on the third of them."""
    write_jsonl(tmp_path / "train.jsonl", ROWS)
    write_jsonl(tmp_path / "test.jsonl", ROWS[2:3])
    return {
        "checkpoint_root_dir": str(tmp_path),
        "algorithm": {"algorithm_type": "grpo", "repeat_times": 2},
        "model": {"model_path": str(model), "max_prompt_tokens": 30, "max_response_tokens": 34},
        "cluster": {"gpu_per_node": 0},
        "buffer": {
            "batch_size": 1,
            "explorer_input": {
                "taskset": {"name": "sums", "path": str(tmp_path), "format": FORM},
                "eval_tasksets": [{"name": "test", "path": str(tmp_path), "split": "test", "format": FORM}],
            },
        },
    }


def supervised(given: dict[str, Any], algorithm: str, path: Path, form: dict[str, Any] = FORM) -> Config:
    buffer = {"experience_buffer": {"name": "rows", "path": str(path), "format": form}}
    changed = {"mode": "train", "algorithm": {"algorithm_type": algorithm}}
    return config_from_dict(given | changed | {"buffer": {"train_batch_size": 2, "trainer_input": buffer}})


def test_long_prompts_are_counted_as_the_run_treats_them(given: dict[str, Any], tmp_path: Path) -> None:
    tasks, test = inspect(config_from_dict(given))
    assert (tasks.rows, test.rows, tasks.problem) == (4, 1, "")
    assert [row.location.line for row in tasks.rejected] == [5]
    [lengths] = tasks.lengths
    assert lengths.over == 1 and lengths.limit == 30 and "cut" in lengths.beyond and len(lengths.values) == 4
    given["model"]["enable_prompt_truncation"] = False
    tasks, _ = inspect(config_from_dict(given))
    assert tasks.rows == 3 and [row.location.line for row in tasks.rejected] == [5, 2]
    assert tasks.lengths[0].over == 1 and "rejected" in tasks.lengths[0].beyond
    assert "more than the 30 allowed" in tasks.rejected[1].reason


TALK = [{"role": "user", "content": "1+1?"}, {"role": "assistant", "content": "2"}]


@pytest.mark.parametrize(
    ("row", "use", "expected"),
    [
        ({"prompt": "1+1?", "response": "2"}, "tasks", {}),
        ({"question": "1+1?", "answer": "2"}, "tasks", {"prompt_key": "question", "response_key": "answer"}),
        ({"problem": "1+1?"}, "evaluation", {"prompt_key": "problem"}),
        (
            {"prompt": TALK[:1], "reward_model": {"ground_truth": "2"}},
            "tasks",
            {"prompt_type": "messages", "messages_key": "prompt", "response_key": "reward_model.ground_truth"},
        ),
        ({"messages": TALK, "tools": None}, "demonstrations", {"prompt_type": "messages"}),
        (
            {"conversations": [{"from": "human", "value": "1+1?"}, {"from": "gpt", "value": "2"}], "system": "Add."},
            "demonstrations",
            {"prompt_type": "messages", "messages_key": "conversations", "system_prompt_key": "system"},
        ),
        (
            {"instruction": "Add.", "input": "1+1", "output": "2"},
            "demonstrations",
            {"prompt_key": "instruction", "response_key": "output"},
        ),
        ({"question": "1+1?", "chosen": "2", "rejected": "3"}, "preferences", {"prompt_key": "question"}),
        ({"chosen": TALK, "rejected": [TALK[0], TALK[0] | TALK[1] | {"content": "3"}]}, "preferences",
         {"prompt_type": "messages"}),
        ({"x": 1, "y": 2}, "tasks", {}),
    ],
)  # fmt: skip
def test_a_format_is_guessed_by_the_columns(row: dict[str, Any], use: str, expected: dict[str, str]) -> None:
    assert guessed_format([row, row], use) == expected


@pytest.mark.parametrize("answer", [0, False, 0.0])
def test_an_answer_of_zero_is_an_answer(answer: Any) -> None:
    rows = [{"question": "1-1?", "answer": answer}, {"question": "2-2?", "answer": None}]
    for order in (rows, rows[::-1]):
        assert guessed_format(order, "tasks") == {"prompt_key": "question", "response_key": "answer"}


@pytest.mark.parametrize("place", [0, 19])
def test_a_bad_row_does_not_hide_the_format(place: int) -> None:
    rows: list[dict[str, Any]] = [{"question": "1+1?", "answer": "2"}] * 20
    for bad in ({"question": None, "answer": None}, {"x": 1}, {"question": 3, "answer": [3]}):
        mixed_rows = [*rows[:place], bad, *rows[place + 1 :]]
        assert guessed_format(mixed_rows, "demonstrations") == {"prompt_key": "question", "response_key": "answer"}
    assert guessed_format([*rows[:9], *[{"x": 1}] * 9], "tasks") == {}


def test_a_format_that_is_not_given_is_guessed(given: dict[str, Any], tmp_path: Path) -> None:
    tasksets = given["buffer"]["explorer_input"]
    del tasksets["taskset"]["format"]
    tasks, test = inspect(config_from_dict(given))
    assert tasks.problem and not test.guess
    assert tasks.guess == FORM and "format: {prompt_key: question, response_key: answer}" in report_text(tasks, False)
    tasksets["taskset"]["format"] = tasks.guess
    tasks, _ = inspect(config_from_dict(given))
    assert tasks.rows == 4 and not tasks.guess


def test_columns_that_nothing_reads_are_named(given: dict[str, Any], tmp_path: Path) -> None:
    write_jsonl(tmp_path / "answers.jsonl", [{"question": "1+1?", "answer": "2", "id": 7, "source": "x"}] * 2)
    [answers] = inspect(supervised(given, "sft", tmp_path / "answers.jsonl"))
    assert answers.spare == ["id", "source"] and "not read: id, source" in report_text(answers, False)


@pytest.mark.parametrize("every_turn", [False, True])
def test_earlier_answers_without_a_loss_are_told(given: dict[str, Any], tmp_path: Path, every_turn: bool) -> None:
    turns = [{"role": role, "content": "1+1?"} for role in ("user", "assistant", "user", "assistant")]
    write_jsonl(tmp_path / "talks.jsonl", [{"messages": turns}])
    form = {"prompt_type": "messages", "enable_concatenated_multi_turn": every_turn}
    [answers] = inspect(supervised(given, "sft", tmp_path / "talks.jsonl", form))
    assert answers.unlearned is not every_turn and answers.rows == 1
    assert ("enable_concatenated_multi_turn" in report_text(answers, False)) is not every_turn


def test_rows_may_lack_a_prompt_that_the_workflow_makes(given: dict[str, Any], tmp_path: Path) -> None:
    write_jsonl(tmp_path / "train.jsonl", [{"level": 1, "goal": "out"}, {"level": 2, "goal": "in"}])
    given["buffer"]["explorer_input"]["taskset"] |= {
        "default_workflow_type": "command_workflow", "workflow_args": {"command": "play"}, "format": {},
    }  # fmt: skip
    given["explorer"] = {"rollout_model": {"enable_openai_api": True}}
    tasks, _ = inspect(config_from_dict(given))
    assert (tasks.rows, tasks.problem, tasks.rejected, tasks.guess) == (2, "", [], {})


@pytest.mark.parametrize("workflow", ["math_workflow", "math_boxed_workflow"])
def test_duplicates_and_shared_prompts_are_found(given: dict[str, Any], workflow: str) -> None:
    """Also if the workflow of one of the sets adds a system prompt."""
    given["model"] |= {"max_prompt_tokens": 900, "max_model_len": 1000}
    given["buffer"]["explorer_input"]["eval_tasksets"][0]["default_workflow_type"] = workflow
    tasks, test = inspect(config_from_dict(given))
    assert [(row.line, first.line) for row, first in tasks.duplicates] == [(4, 1)] and not test.duplicates
    assert tasks.shared == {"test": 1} and test.shared == {"sums": 1}


def test_rows_of_tool_n1_need_no_format(given: dict[str, Any], tmp_path: Path) -> None:
    """As its script writes ToolACE: tools and answers as JSON text; one conversation continues after a call."""
    call = {"name": "news", "arguments": {"country": "Fiji"}}
    row = {
        "tools": json.dumps([{"name": "news", "parameters": {"type": "dict", "properties": {}}}]),
        "conversations": [{"from": "user", "value": "News of Fiji?"}],
        "answer": json.dumps([call]),
        "raw_system": "You are an expert in composing functions.",
    }
    turns = [*row["conversations"], {"from": "function_call", "value": json.dumps([call])}]
    longer = row | {"conversations": [*turns, {"from": "tool", "value": "none"}, {"from": "user", "value": "Really?"}]}
    unread = [row | {"conversations": [{"from": "bot", "value": "?"}]}, row | {"answer": ""}]
    (tmp_path / "calls.json").write_text(json.dumps([row, longer, *unread]))
    given["model"] |= {"max_prompt_tokens": 900}
    given["explorer"] = {"rollout_model": {"tool_call_parser": "hermes"}}
    tasks = {"name": "calls", "path": str(tmp_path / "calls.json"), "default_workflow_type": "toolcall_workflow"}
    given["buffer"]["explorer_input"] = {"taskset": tasks}
    [report] = inspect(config_from_dict(given))
    assert report.rows == 2 and not report.problem
    assert [row.reason.split(" (")[0] for row in report.rejected] == [
        f"column 'conversations' has a turn from 'bot', not one of {', '.join(ROLES)}",
        "column 'answer'",
    ]
    first, second = ("".join(text for text, _ in shown.spans) for shown in report.examples)
    for one in (first, second):
        assert row["raw_system"] in one and '"type": "function", "function": {"name": "news"' in one
    assert second.count("<tool_call>") == first.count("<tool_call>") + 1
    assert '<tool_call>\n{"name": "news", "arguments": {"country": "Fiji"}}' in second and "Really?" in second


def test_answers_are_shown_with_their_loss(given: dict[str, Any], tmp_path: Path) -> None:
    [report] = inspect(supervised(given, "sft", tmp_path / "train.jsonl"), examples=1)
    assert report.rows == 3 and sorted(row.location.line for row in report.rejected) == [2, 5]
    [shown] = report.examples
    assert shown.spans[1] == ("2<|im_end|>", True) and [inside for _, inside in shown.spans] == [False, True, False]
    assert sum(shown.mask) == 2 and len(shown.mask) == len(shown.tokens) == len(shown.pieces)
    assert "│ «2<|im_end|>»\n" in report_text(report, colour=False)
    assert f"│ {LOSS}2<|im_end|>{PLAIN}\n" in report_text(report, colour=True)


HOSTILE = "\x1b[2J\x1b]0;owned\x07 a\rb\x9b1m\x00\u202e"


def test_control_characters_of_rows_are_escaped(given: dict[str, Any], tmp_path: Path) -> None:
    """They could clear the screen, or hide part of a row."""
    write_jsonl(tmp_path / "train.jsonl", [{"question": HOSTILE, "answer": "2"}, {"question": "1\n2", HOSTILE: 1}])
    given["model"]["max_prompt_tokens"] = 500
    report, _ = inspect(config_from_dict(given), examples=2)
    text = report_text(report, colour=False)
    assert not [letter for letter in text if letter != "\n" and not letter.isprintable()]
    assert r"\x1b[2J\x1b]0;owned\x07 a\rb\x9b1m\x00\u202e" in text
    assert text.count("\x1b") == 0 and report_text(report, colour=True).replace(LOSS, "").count("\x1b[2J") == 0


def test_a_set_that_cannot_be_read_is_reported(given: dict[str, Any], tmp_path: Path) -> None:
    given["buffer"]["explorer_input"]["taskset"]["path"] = str(tmp_path / "gone.jsonl")
    given["buffer"]["max_rejected_share"] = 0.1
    broken, fine = inspect(config_from_dict(given))
    assert "there is no file or folder" in broken.problem and not fine.problem
    assert "unusable: there is no file" in report_text(broken, colour=False)


def test_the_command_exits_with_1_if_a_run_would_refuse(given: dict[str, Any], tmp_path: Path) -> None:
    (tmp_path / "run.yaml").write_text(json.dumps(given))
    arguments = ["data", "check", "--config", str(tmp_path / "run.yaml"), "--examples", "1", "--json"]
    accepted = CliRunner().invoke(app, arguments)
    assert accepted.exit_code == 0
    [tasks, _] = json.loads(accepted.output)["run"]
    assert tasks["lengths"]["prompt"]["over_limit"] == 1 and tasks["rejected"][0]["line"] == 5
    assert tasks["duplicates"] == [[f"{tmp_path}/train.jsonl:4", f"{tmp_path}/train.jsonl:1"]]
    refused = CliRunner().invoke(app, [*arguments, "buffer.max_rejected_share=0.1"])
    assert refused.exit_code == 1
    assert "1 of 5 rows cannot be used" in json.loads(refused.output)["run"][0]["problem"]


def test_the_command_names_a_model_that_is_not_there(given: dict[str, Any], tmp_path: Path) -> None:
    (tmp_path / "run.yaml").write_text(json.dumps(given))
    missing = ["data", "check", "--config", str(tmp_path / "run.yaml"), "model.model_path=runs/no/model"]
    with pytest.raises(ConfigError) as error:
        CliRunner().invoke(app, missing, catch_exceptions=False)
    assert [problem.key for problem in error.value.problems] == ["model.model_path"]


def test_a_set_of_several_stages_is_described_once(given: dict[str, Any], tmp_path: Path) -> None:
    stages = [{"stage_name": name, "mode": "explore"} for name in ("a", "b")]
    (tmp_path / "run.yaml").write_text(json.dumps(given | {"stages": stages}))
    output = CliRunner().invoke(app, ["data", "check", "--config", str(tmp_path / "run.yaml")]).output
    assert (output.count("usable"), output.count("as in run_a")) == (2, 2), "a task set and an evaluation set"


@pytest.mark.parametrize("reward", ["math_reward", None])
def test_references_that_are_no_mathematics_are_listed(
    given: dict[str, Any], tmp_path: Path, reward: str | None
) -> None:
    answers = ["18 dollars", "\\frac{1}{2}", "B", "BAC", "12:00", "See the solution above.", "it depends", 5.0]
    write_jsonl(tmp_path / "train.jsonl", [{"question": f"{n}?", "answer": answer} for n, answer in enumerate(answers)])
    given["buffer"]["explorer_input"]["default_reward_fn_type"] = reward
    tasks, _ = inspect(config_from_dict(given))
    assert [row.line for row in tasks.worded] == [6, 7]
    assert len(tasks.to_dict()["worded_references"]) == 2
    given["buffer"]["explorer_input"]["default_reward_fn_type"] = "countdown_reward"
    assert inspect(config_from_dict(given))[0].worded == []


@pytest.mark.parametrize(
    ("thinking", "content", "count"), [(None, "2", 1), (False, "2", 0), (None, "<think>\n1+1\n</think>\n\n2", 0)]
)
def test_empty_thoughts_that_carry_loss_are_counted(
    given: dict[str, Any], tmp_path: Path, thinking: bool | None, content: str, count: int
) -> None:
    """As Qwen3's template writes them; with `enable_thinking: false` they end the prompt."""
    template = (
        "{% for m in messages %}<|im_start|>{{ m.role }}\n{% if m.role == 'assistant' and '<think>' not in m.content %}"
        "<think>\n\n</think>\n\n{% endif %}{{ m.content }}<|im_end|>\n{% endfor %}{% if add_generation_prompt %}"
        "<|im_start|>assistant\n{% if enable_thinking is false %}<think>\n\n</think>\n\n{% endif %}{% endif %}"
    )
    given["model"] |= {"custom_chat_template": template, "enable_thinking": thinking, "max_model_len": 200}
    write_jsonl(tmp_path / "talk.jsonl", [{"messages": [TALK[0], TALK[1] | {"content": content}]}])
    config = supervised(given, "sft", tmp_path / "talk.jsonl", {"prompt_type": "messages"})
    [report] = inspect(config)
    assert (report.rows, report.thoughtless) == (1, count)
