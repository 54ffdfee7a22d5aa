"""The form of the configuration page: which fields, which problems, and YAML that keeps its comments."""

from __future__ import annotations

import pytest

from trinity_core.config.source import parse
from trinity_core.studio.commented_yaml import changed
from trinity_core.studio.form import BEGINNER, by_field, form_fields, problems_of, value_at

TEXT = """\
# My run
name: "mine"  # a name
algorithm:
  algorithm_type: grpo
  repeat_times: 8   # rollouts of a task
buffer:
  batch_size: 4
"""


def keys(algorithm: str, mode: str, expert: bool = False) -> list[str]:
    return [field.key for field in form_fields(algorithm, mode, expert)]


def test_beginners_see_a_choice_of_what_experts_see() -> None:
    assert keys("grpo", "both") == list(BEGINNER)
    assert {*BEGINNER} < {*keys("grpo", "both", expert=True)}


@pytest.mark.parametrize("expert", [False, True])
def test_only_what_matters_is_shown(expert: bool) -> None:
    supervised, exploring = keys("sft", "train", expert), keys("grpo", "explore", expert)
    assert "algorithm.repeat_times" not in supervised and "trainer.save_interval" in supervised
    assert not [key for key in supervised if key.startswith(("explorer.", "synchronizer."))]
    assert "algorithm.repeat_times" in exploring and not [key for key in exploring if key.startswith("trainer.")]


def test_every_field_has_a_doc_and_numbers_their_unit() -> None:
    fields = {field.key: field for field in form_fields("grpo", "both", expert=True)}
    assert [key for key, field in fields.items() if not field.doc] == []
    assert [field.key for field in fields.values() if field.unit and f"Unit: {field.unit}." not in field.help] == []
    assert "grpo" in fields["algorithm.algorithm_type"].choices and "bench" in fields["mode"].choices


def test_problems_stand_beside_their_fields() -> None:
    problems = problems_of(changed(TEXT, "buffer.batch_size", -1) + "nmae: 3\n")
    found = by_field(problems, BEGINNER)
    assert found["buffer.batch_size"][0].value == -1
    assert "nmae" in [problem.key for problem in found[""]]


def test_a_change_keeps_comments_and_quotes() -> None:
    text = changed(TEXT, "algorithm.repeat_times", 16)
    assert text == TEXT.replace("repeat_times: 8 ", "repeat_times: 16")
    assert changed(TEXT, "buffer.batch_size", 4) == TEXT


def test_sections_are_made_and_keys_taken_away() -> None:
    text = changed(TEXT, "trainer.save_interval", 5)
    assert text == f"{TEXT}trainer:\n  save_interval: 5\n"
    assert value_at(parse(changed(text, "trainer.save_interval", None)).tree, "trainer.save_interval") is None
    assert changed(TEXT, "explorer.eval_interval", None) == TEXT
    assert changed("", "name", "first") == "name: first\n"
    with pytest.raises(ValueError, match="'name' holds no keys"):
        changed(TEXT, "name.inner", 1)
