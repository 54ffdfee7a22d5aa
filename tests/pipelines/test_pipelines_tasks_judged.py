"""Task operators that ask a model, on verdicts that are given to them."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path

import pytest
from raising import raising

from trinity_core.base.errors import EndpointError, InputError, ModelError, TransientFault
from trinity_core.config import OperatorConfig
from trinity_core.pipelines.tasks import TaskPipeline, curate
from trinity_core.pipelines.tasks.asking import score_of
from trinity_core.pipelines.tasks.curation import made_operator
from trinity_core.pipelines.tasks.models import AskedModel, NoAnswer, Question

ASPECTS = ("reasoning", "knowledge", "steps", "ambiguity")


class Told:
    """Answers by the question's text."""

    def __init__(self, **answers: str | NoAnswer) -> None:
        self.answers, self.asked, self.refusals = answers, [], 0
        self.fault: Exception | None = None

    def ask(self, model: AskedModel, questions: Sequence[Question]) -> list[str | NoAnswer]:
        if self.fault is not None:
            self.refusals += 1
            raise self.fault
        self.asked += questions
        return [self.answers[question.text.split("\n")[1]] for question in questions]


def rated(*numbers: float) -> str:
    return "I think so. " + json.dumps(dict(zip(ASPECTS, numbers, strict=True)))


def difficulty(**args: object) -> OperatorConfig:
    all_args = {"api_or_hf_model": "qwen", "base_url": "http://judge/v1", "input_keys": ["question"]}
    return OperatorConfig(name="llm_difficulty_score_filter", args={**all_args, **args})


def written(folder: Path, *questions: str) -> str:
    path = folder / "in.jsonl"
    path.write_text("".join(json.dumps({"question": question}) + "\n" for question in questions))
    return str(path)


def test_scores_are_means_of_aspects(tmp_path: Path) -> None:
    judge = Told(
        easy=rated(1, 1, 1, 1), medium=rated(3, 2, 4, 1), hard=rated(5, 5, 5, 5), odd="no idea", away=NoAnswer("late")
    )
    path = written(tmp_path, *judge.answers)
    dataset = curate(TaskPipeline([path], [difficulty(min_score=0.5)]), tmp_path / "out", judge)
    rows = [json.loads(line) for line in (dataset.folder / "train.jsonl").read_text().splitlines()]
    assert rows == [
        {"question": "medium", "llm_difficulty_score": 0.5},  # (3 + 2 + 4 + 1) / 4 / 5
        {"question": "hard", "llm_difficulty_score": 1.0},
    ]
    assert dataset.dropped == {"1 llm_difficulty_score_filter": 1} and dataset.rejected == 2
    reasons = [json.loads(line)["reason"] for line in (dataset.folder / "rejected.jsonl").read_text().splitlines()]
    assert all("llm_difficulty_score_filter" in reason for reason in reasons)
    assert "no idea" in reasons[0] and "late" in reasons[1]
    assert len(judge.asked) == 5, "a row without a verdict is not asked about again"


@pytest.mark.parametrize("fault", [TransientFault("away"), EndpointError("no such model"), ModelError("no key")])
def test_a_model_that_cannot_be_asked_loses_nothing(fault: Exception, tmp_path: Path) -> None:
    judge = Told(easy=rated(1, 1, 1, 1), hard=rated(5, 5, 5, 5))
    pipeline = TaskPipeline([written(tmp_path, "easy", "hard")], [difficulty(min_score=0.0)])
    judge.fault = fault
    with pytest.raises(type(fault)):
        curate(pipeline, tmp_path / "out", judge)
    assert judge.refusals == 1, "rows are not at fault, and not tried one by one"
    judge.fault = None
    dataset = curate(pipeline, tmp_path / "out", judge)
    assert (dataset.rows, dataset.rejected) == (2, 0)


def test_rows_are_shown_by_field(tmp_path: Path) -> None:
    asks = Told(a=rated(3, 3, 3, 3))
    row = {"question": "a", "answer": "b"}
    operator = made_operator(difficulty(input_keys=["question", "answer"], field_names=["Question", "Answer"]), 1, asks)
    [kept] = operator.rows([row], None)
    assert kept == [{**row, "llm_difficulty_score": 0.6}] and "llm_difficulty_score" not in row
    [question] = asks.asked
    assert question.text == "<Question>\na\n</Question>\n\n<Answer>\nb\n</Answer>"
    assert all(f'"{aspect}"' in question.system for aspect in ASPECTS) and question.temperature == 0


@pytest.mark.parametrize(
    "answer",
    [
        "", "4", '{"reasoning": 4}', rated(0, 3, 3, 3), rated(6, 3, 3, 3), rated(3, 3, 3, 3).replace("3", "true"),
        rated(3, 3, 3, 3).replace("3", '"3"'), rated(3, 3, 3, 3).replace("3", "NaN"), rated(3, 3, 3, 3)[:-1],
    ],
)  # fmt: skip
def test_what_is_no_verdict_is_no_score(answer: str) -> None:
    assert score_of(answer, ASPECTS) is None


def test_the_last_verdict_counts() -> None:
    assert score_of(f"{rated(1, 1, 1, 1)} On second thoughts: {rated(5, 5, 5, 5)}.", ASPECTS) == 1.0


@pytest.mark.parametrize(
    ("args", "key"),
    [
        ({"field_names": ["A", "B"]}, "field_names"),
        ({"min_score": 0.9, "max_score": 0.5}, "max_score"),
        ({"input_keys": []}, "input_keys"),
        ({"api_or_hf_model": ""}, "api_or_hf_model"),
    ],
)
def test_arguments_that_do_not_suit_each_other(args: dict[str, object], key: str) -> None:
    with raising(InputError, key=key):
        made_operator(difficulty(**args))
