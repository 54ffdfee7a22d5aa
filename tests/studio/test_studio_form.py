"""The configuration page without a browser: fields, problems, plan, files, and YAML that keeps its comments."""

from __future__ import annotations

from pathlib import Path

import pytest

from studio.config_draft import ConfigDraft, by_field, changed, checked, yaml_files
from studio.form import BEGINNER, form_fields, in_sections, matching
from studio.recipes import recipe_of, recipes
from studio.texts import hanging
from trinity_core.config import config_from_text
from trinity_core.config.findings import value_at
from trinity_core.config.source import parse

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
    assert "synchronizer.sync_method" in exploring and "synchronizer.sync_method" not in keys("ppo", "bench", expert)
    assert "algorithm.repeat_times" in exploring and not [key for key in exploring if key.startswith("trainer.")]


def test_every_field_has_a_doc_and_numbers_their_unit() -> None:
    fields = {field.key: field for field in form_fields("grpo", "both", expert=True)}
    assert [key for key, field in fields.items() if not field.setting.doc] == []
    units = {field.setting.unit for field in fields.values()}
    assert {"tokens", "steps"} < units and fields["buffer.total_steps"].label == "total_steps (steps)"
    assert "math_reward" in fields["buffer.explorer_input.taskset.default_reward_fn_type"].choices
    assert "grpo" in fields["algorithm.algorithm_type"].choices and "bench" in fields["mode"].choices


def test_problems_stand_beside_their_fields() -> None:
    problems = checked(changed(TEXT, "buffer.batch_size", -1) + "nmae: 3\n").problems
    by_key = by_field(problems)
    assert by_key["buffer.batch_size"][0].value == -1 and "nmae" in by_key


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


def test_what_is_fine_has_a_plan_and_a_flow() -> None:
    text = changed(changed(TEXT, "model.model_path", "org/model"), "buffer.explorer_input.taskset.path", "org/data")
    text = changed(changed(text, "model.max_response_tokens", 16), "model.max_prompt_tokens", 16)
    draft = checked(changed(text, "buffer.train_batch_size", 32))
    assert draft.problems == [] and draft.config is not None
    assert "4 tasks, 32 rollouts" in draft.plan and "org/model" in draft.plan


def test_a_broken_line_of_the_plan_hangs_by_its_last_column() -> None:
    lines = {"demo/mine: grpo": 0, "  explore  4 tasks": 11, "     820 MiB    process": 16, "           ?  disk": 14}
    for line, indent in lines.items():
        assert f"padding-left: {indent}ch; text-indent: -{indent}ch" in hanging(line)
    assert "&lt;b&gt; &amp;" in hanging("<b> &") and hanging("one\ntwo").count("<div style") == 2


def test_fields_are_found_by_words_of_key_or_doc() -> None:
    fields = form_fields("grpo", "both", expert=True)
    matches = matching(fields, "optimizer LR")
    assert "algorithm.optimizer.lr" in [field.key for field in matches]
    assert all("optimizer" in f"{field.key} {field.setting.doc}".lower() for field in matches)
    assert [*in_sections(fields)][:3] == ["run", "algorithm", "model"]


def test_a_change_is_written_into_what_the_file_has_by_then(tmp_path: Path) -> None:
    draft = ConfigDraft(tmp_path / "new/my.yaml")
    assert draft.tree() == {} and draft.text == ""
    draft.write(TEXT)
    draft.file.write_text(TEXT.replace("batch_size: 4", "batch_size: 2"))
    draft.change("algorithm.repeat_times", 16)
    assert (draft.value("algorithm.repeat_times"), draft.value("buffer.batch_size")) == (16, 2)
    assert "# rollouts of a task" in draft.file.read_text()


def test_places_in_lists_are_keys() -> None:
    text = "stages:\n  - stage_name: sft  # first\n  - stage_name: rft\n"
    assert changed(text, "stages.1.mode", "both") == text + "    mode: both\n"
    assert changed("", "a.0.path", "x") == "a:\n- path: x\n"
    assert changed(text, "stages.2.mode", None) == text
    assert value_at({"a": [{"b": 1}]}, "a.0.b") == 1 and value_at({"a": [{"b": 1}]}, "a.1.b") is None
    with pytest.raises(ValueError, match="'stages' holds no keys"):
        changed(text, "stages.mode", "both")


def test_recipes_say_what_they_need() -> None:
    by_title = {recipe.title: recipe for recipe in recipes()}
    assert [*by_title][:2] == ["quickstart", "gsm8k"] and by_title["quickstart"].needs.startswith("sft → rft · model ")
    assert by_title["quickstart"].needs.endswith("no GPU") and by_title["gsm8k"].needs.endswith("2 GPUs")
    assert {"sft", "gsm8k/sft"} < {*by_title} and len(by_title) == len(recipes()), "each has a name of its own"
    assert not [title for title, recipe in by_title.items() if "$schema" in recipe.text or not recipe.needs]
    untold = [title for title, recipe in by_title.items() if not recipe.about.endswith(".") or "\\" in recipe.about]
    assert untold == [], "each begins with a paragraph about it; commands come after that"


def test_a_recipe_names_the_run_after_its_file_but_parts_of_one_run_keep_its_name(tmp_path: Path) -> None:
    names = {
        recipe.title: config_from_text(recipe.text_for(tmp_path / "mine.yaml", tmp_path)).name for recipe in recipes()
    }
    assert names["quickstart"] == names["gsm8k"] == "mine"
    assert names["gsm8k/trainer"] == names["gsm8k/explorer"] == "gsm8k-async"


def test_files_that_are_no_recipes_are_left_out(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Half-written ones too: a user repairs them in Studio."""
    files = ["name: a\n", "stages:\n-\n", "stages: 3\n", "stages: [a]\n", "a:\tb: [", '"', "- a\n", "name: \xe9\n"]
    (tmp_path / "configs/mine").mkdir(parents=True)
    for number, text in enumerate(files):
        (tmp_path / f"configs/mine/{number}.yaml").write_bytes(text.encode("latin-1"))
    monkeypatch.setattr("studio.recipes.project_files", lambda: tmp_path)
    assert [recipe.file.stem for recipe in recipes()][:1] == ["0"] and len(recipes()) <= 4


def test_plugins_beside_a_file_are_found_from_its_copy(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    games, lake, new = tmp_path / "configs/games", tmp_path / "configs/lake/lake.yaml", tmp_path / "new/my.yaml"
    for folder in (games, lake.parent):
        folder.mkdir(parents=True)
    lake.write_text(f"plugin_dir: ../games  # three\n{TEXT}")
    copied = recipe_of(lake)
    assert copied is not None and "plugin_dir: ../configs/games # three\n" in copied.text_for(new, tmp_path)
    for recipe in recipes():
        if "plugin_dir" in recipe.text:
            text = recipe.text_for(new, tmp_path)
            folder = config_from_text(text, name=str(new)).plugin_dir
            assert Path(str(folder)).samefile(recipe.file.parent / str(parse(recipe.text).tree["plugin_dir"]))


def test_configurations_are_listed_and_the_rest_is_not(tmp_path: Path) -> None:
    for name in ("b.yaml", "a.yml", "configs/c.yaml", "prefect.yaml", ".ci/d.yaml", "checkpoints/p/e.yaml", "f.txt"):
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).touch()
    assert [str(path) for path in yaml_files(tmp_path)] == ["a.yml", "b.yaml", "configs/c.yaml"]
