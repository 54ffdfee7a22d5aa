"""Pass rates and rewrites by a model whose answers are given, judged by the real reward functions."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from pathlib import Path

import pytest
from raising import raising

from trinity_core.base.errors import InputError
from trinity_core.base.plugins import load_plugins
from trinity_core.config import OperatorConfig
from trinity_core.pipelines.tasks import TaskPipeline, curate
from trinity_core.pipelines.tasks.asking import REWRITE
from trinity_core.pipelines.tasks.curation import made_operator
from trinity_core.pipelines.tasks.models import AskedModel, NoAnswer, Question

ROWS = [{"question": name, "answer": "#### 7"} for name in ("always", "half", "never", "silent")]
Answer = str | NoAnswer


class Solver:
    """Answers by the question and the number of the sample."""

    def __init__(self, answer: Callable[[Question], Answer]) -> None:
        self.answer, self.asked = answer, []

    def ask(self, model: AskedModel, questions: Sequence[Question]) -> list[Answer]:
        self.asked += questions
        return [self.answer(question) for question in questions]


def solves(question: Question) -> Answer:
    right = {"always": True, "half": question.seed % 2 == 0, "never": False}.get(question.text)
    return NoAnswer("late") if right is None else f"So it is #### {7 if right else 8}"


def made(tmp_path: Path, solver: Solver, name: str, **args: object) -> tuple[list[dict], list[dict]]:
    """The rows of the output, and those that were rejected."""
    path = tmp_path / "in.jsonl"
    path.write_text("".join(json.dumps(row) + "\n" for row in ROWS))
    usual = {"api_or_hf_model": "qwen", "base_url": "http://there/v1"}
    dataset = curate(
        TaskPipeline([str(path)], [OperatorConfig(name=name, args=usual | args)]), tmp_path / "out", solver
    )
    read = lambda file: [json.loads(line) for line in (dataset.folder / file).read_text().splitlines()]  # noqa: E731
    return read("train.jsonl"), read("rejected.jsonl")


def test_pass_rates_are_shares_of_right_answers(tmp_path: Path) -> None:
    solver = Solver(solves)
    rows, aside = made(tmp_path, solver, "pass_rate_filter", samples=4)
    assert {row["question"]: row["pass_rate"] for row in rows} == {"always": 1.0, "half": 0.5, "never": 0.0}
    assert [line["reason"] for line in aside] == ["1 pass_rate_filter: no answer could be judged: late"]
    assert len(solver.asked) == 16 and {question.temperature for question in solver.asked} == {1.0}


def test_bounds_leave_what_can_be_learned_from(tmp_path: Path) -> None:
    rows, _ = made(tmp_path, Solver(solves), "pass_rate_filter", samples=4, min_rate=0.1, max_rate=0.9)
    assert [row["question"] for row in rows] == ["half"]


def test_rewrites_keep_the_answer_or_are_left_out(tmp_path: Path) -> None:
    def says(question: Question) -> Answer:
        if question.system == REWRITE:
            return {"always": "in other words", "half": "another story", "never": "never"}.get(
                question.text, NoAnswer("late")
            )
        return {"in other words": "#### 7", "another story": "#### 8"}[question.text]

    solver = Solver(says)
    rows, aside = made(tmp_path, solver, "rewrite_mapper", checks=2)
    assert [(row["question"], row["rewritten"]) for row in rows] == [
        ("always", False), ("in other words", True), ("half", False), ("never", False), ("silent", False),
    ]  # fmt: skip
    assert rows[1]["answer"] == "#### 7" and not aside
    assert len(solver.asked) == 4 + 2 * 2, "a rewrite that says the same is not checked"


@pytest.mark.parametrize(
    ("name", "args", "key"),
    [
        ("pass_rate_filter", {"reward_fn": "llm_judge"}, "reward_fn"),
        ("pass_rate_filter", {"reward_fn": "math_rewrad"}, "math_rewrad"),
        ("pass_rate_filter", {"min_rate": 0.9, "max_rate": 0.1}, "max_rate"),
        ("rewrite_mapper", {"api_or_hf_model": ""}, "api_or_hf_model"),
    ],
)
def test_arguments_that_cannot_work_are_refused(name: str, args: dict[str, object], key: str) -> None:
    all_args = {"api_or_hf_model": "qwen", "base_url": "http://there/v1"} | args
    with raising(InputError, key=key):
        made_operator(OperatorConfig(name=name, args=all_args))


def test_a_reference_that_cannot_be_read_costs_its_row_and_asks_nothing_twice(tmp_path: Path) -> None:
    path = tmp_path / "in.jsonl"
    rows = [{"question": name, "answer": "" if name == "half" else "#### 7"} for name in ("always", "half", "never")]
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    args = {"api_or_hf_model": "qwen", "base_url": "http://there/v1", "samples": 4}
    operators = [OperatorConfig(name="pass_rate_filter", args=args)]
    dataset = curate(TaskPipeline([str(path)], operators), tmp_path / "out", solver := Solver(solves))
    assert (dataset.rows, dataset.rejected, len(solver.asked)) == (2, 1, 12)


def test_reward_functions_of_plugins_judge_and_count(tmp_path: Path) -> None:
    """Workers import the plugin folder; an edited function is another data set."""
    plugin = tmp_path / "plugins" / "mine_for_rates.py"
    plugin.parent.mkdir()
    plugin.write_text(
        "from trinity_core.workflows import REWARD_FNS\n\n\n"
        "@REWARD_FNS.register('always_right')\ndef always_right(**_):\n    return 1.0\n"
    )
    load_plugins(plugin.parent)
    path = tmp_path / "in.jsonl"
    path.write_text("".join(json.dumps(row) + "\n" for row in ROWS[:3]))
    args = {"api_or_hf_model": "qwen", "base_url": "http://there/v1", "samples": 2, "reward_fn": "always_right"}
    pipeline = TaskPipeline([str(path)], [OperatorConfig(name="pass_rate_filter", args=args)])
    first = curate(pipeline, tmp_path / "out", Solver(solves), plugin_dir=str(plugin.parent))
    rows = [json.loads(line) for line in (first.folder / "train.jsonl").read_text().splitlines()]
    assert [row["pass_rate"] for row in rows] == [1.0, 1.0, 1.0]
    plugin.write_text(plugin.read_text().replace("1.0", "0.5"))
    again = curate(pipeline, tmp_path / "out", Solver(solves), plugin_dir=str(plugin.parent))
    assert again.folder != first.folder
