"""Rows by their language."""

from __future__ import annotations

import json

import pytest
from raising import raising

from trinity_core.base.errors import InputError
from trinity_core.config import OperatorConfig
from trinity_core.pipelines.tasks import TaskPipeline, curate

QUESTIONS = {
    "en": "Natalia sold clips to 48 of her friends in April. How many clips did she sell in May?",
    "de": "Im April hat Natalia ihren Freunden 48 Haarspangen verkauft. Wie viele waren es im Mai?",
    "fr": "Combien de pommes reste-t-il si Marie en mange trois et que son frère en mange deux ?",
    "zh": "小明有三个苹果，他又买了两个。请问他现在一共有多少个苹果？",
    "none": "2 + 2 = ?",
    "formula": r"Solve $\int_0^1 x^2 dx$",
}


def kept(tmp_path, **args):
    path = tmp_path / "in.jsonl"
    path.write_text("".join(json.dumps({"question": text, "is": name}) + "\n" for name, text in QUESTIONS.items()))
    operator = OperatorConfig(name="language_id_score_filter", args={"input_keys": ["question"], **args})
    dataset = curate(TaskPipeline([str(path)], [operator]), tmp_path / "out")
    return [json.loads(line)["is"] for line in (dataset.folder / "train.jsonl").read_text().splitlines()]


@pytest.mark.parametrize(
    ("args", "left"),
    [
        ({"lang": "en"}, ["en", "none", "formula"]),
        ({"lang": ["de", "fr"]}, ["de", "fr", "none", "formula"]),
        ({"lang": "zh"}, ["zh", "none", "formula"]),
        ({"lang": "en", "min_score": 0.5}, ["en"]),
    ],
)
def test_rows_in_a_language_are_kept(tmp_path, args, left):
    assert kept(tmp_path, **args) == left


@pytest.mark.parametrize("lang", ["english", []])
def test_a_language_that_is_none_is_refused(tmp_path, lang):
    with raising(InputError, key="lang"):
        kept(tmp_path, lang=lang)
