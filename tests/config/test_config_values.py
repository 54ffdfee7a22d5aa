"""What YAML text a value is read from: numbers are YAML 1.2's, and text is what was written."""

from __future__ import annotations

from enum import IntEnum, StrEnum
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import yaml
from pydantic import BaseModel, ValidationError

from trinity_core.base.registry import Registry
from trinity_core.config import Config, config_from_dict, config_from_text, load_config, stages, to_yaml
from trinity_core.config.arguments import fitting
from trinity_core.config.findings import Report
from trinity_core.config.source import parse
from trinity_core.config.validation import exact
from trinity_core.config.yaml_text import parse_value

GOOD = (Path(__file__).parent / "documents/quick_start.yaml").read_text()


def made(*overrides: str, more: str = "") -> Config:
    return config_from_text(GOOD + more, overrides)


@pytest.mark.parametrize(
    ("text", "value"),
    [
        ("1e-6", 1e-6), ("-1.5E+3", -1500.0), ("1.", 1.0), (".5", 0.5), ("-.inf", float("-inf")), ("010", 10),
        ("-007", -7), ("0x1F", 31), ("0o17", 15), ("1_000", "1_000"), ("12:30:45", "12:30:45"), ("1:2.5", "1:2.5"),
        ("0b11", "0b11"), ("2024-01-02", "2024-01-02"), ("1e", "1e"), ("true", True), ("off", False), ("~", None),
    ],
)  # fmt: skip
def test_numbers_are_those_of_yaml_1_2(text: str, value: Any) -> None:
    assert parse_value(text) == value and type(parse_value(text)) is type(value)


TEXTS = ("2024_01_02", "1.10", "0123456", "1e5", "true", "0x10")


@pytest.mark.parametrize("text", TEXTS)
def test_text_keeps_its_spelling(text: str) -> None:
    overridden = made(f"name={text}", f"explorer.env_vars={{TOKEN: {text}}}", f"explorer.env_vars.OTHER={text}")
    assert overridden.name == text and overridden.explorer.env_vars == {"TOKEN": text, "OTHER": text}
    head, _, rest = GOOD.partition("\nname:")
    written = config_from_text(f"{head}\nname: {text}\n{rest.partition(chr(10))[2]}")
    assert written.name == text
    assert config_from_text(to_yaml(written)) == written


@pytest.mark.parametrize("text", TEXTS)
def test_text_under_another_systems_key_keeps_its_spelling(text: str, tmp_path: Path) -> None:
    """Trinity-RFT's `monitor.name`: the run's folder must not be called 1.1."""
    lines = [line for line in GOOD.splitlines() if not line.startswith("name:")]
    (tmp_path / "run.yaml").write_text("\n".join([*lines, f"monitor: {{name: {text}}}"]))
    assert load_config(tmp_path / "run.yaml").name == text
    assert load_config(tmp_path / "run.yaml", [f"monitor.name={text}0"]).name == f"{text}0"


def test_text_among_arguments_keeps_its_spelling() -> None:
    class Names(BaseModel):
        one: str
        several: list[str]

    (source := parse("a: {one: 1.10, several: [007, yes]}", section=None)).valid_tree()
    report = Report(source.places)
    assert fitting(Registry("part"), Names, "part", source.tree["a"], "a", report) == {
        "one": "1.10",
        "several": ["007", "yes"],
    }
    assert report.problems == []


def test_interpolated_text_keeps_its_spelling() -> None:
    assert made("name=1.10", "explorer.name=x${name}").explorer.name == "x1.10"


@pytest.mark.parametrize("text", ["runs/my #1", "#1", "a#1 # b"])
def test_an_override_has_no_comment(text: str) -> None:
    """A run would write to another folder than the one that its command names."""
    assert made(f"model.model_path={text}").model.model_path == text


def test_stages_keep_their_text() -> None:
    config = made(more="stages:\n  - stage_name: 2024_01\n    model: {model_path: 1.10}\n")
    (stage,) = stages(config)
    assert stage.name.endswith("_2024_01") and stage.model.model_path == "1.10"


def test_lists_keep_spelling() -> None:
    config = made("explorer.auxiliary_models=[{model_path: 007}]", "cluster.gpu_per_node=8")
    assert config.explorer.auxiliary_models[0].model_path == "007"


def test_environment_numbers_read_like_file_numbers(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("STEPS", "010")
    path = tmp_path / "run.yaml"
    path.write_text(GOOD)
    assert load_config(path, ["buffer.total_steps=${oc.env:STEPS}"]).buffer.total_steps == 10
    assert load_config(path, ["buffer.total_steps=010"]).buffer.total_steps == 10


def test_yaml_output_quotes_yaml_1_1_numbers() -> None:
    config = made("buffer.explorer_input.taskset.workflow_args={a: '0o17', b: '1_000', c: '1e5', d: '010'}")
    text = to_yaml(config)
    assert config_from_text(text) == config
    (taskset,) = yaml.safe_load(text)["buffer"]["explorer_input"]["tasksets"]
    assert taskset["workflow_args"].items() >= {"a": "0o17", "b": "1_000", "c": "1e5", "d": "010"}.items()


def test_an_override_sets_one_place_of_what_an_alias_uses_twice(tmp_path: Path) -> None:
    path = tmp_path / "run.yaml"
    path.write_text(
        "model: {model_path: m, max_model_len: 64}\n"
        "buffer:\n"
        "  explorer_input:\n"
        "    taskset: {path: x, default_workflow_type: math_workflow, format: &columns {prompt_key: question}}\n"
        "    eval_tasksets: [{name: e, path: x, default_workflow_type: math_workflow, format: *columns}]\n"
    )
    loaded = load_config(path, ["buffer.explorer_input.taskset.format.prompt_key=ask"]).buffer.explorer_input
    assert (loaded.tasksets[0].format.prompt_key, loaded.eval_tasksets[0].format.prompt_key) == ("ask", "question")


def test_kinds_of_numbers_and_texts_count_as_plain_ones() -> None:
    name, repeats = StrEnum("Name", {"A": "mine"}), IntEnum("Repeats", {"A": 3})
    tree = yaml.safe_load(GOOD) | {"name": name.A}
    tree["algorithm"] = {"repeat_times": repeats.A, "optimizer": {"lr": np.float64(1e-5)}}
    tree["explorer"] = {"env_vars": {f"K{number}": "v" for number in range(25_000)}}
    config = config_from_dict(tree)
    assert (config.name, config.algorithm.repeat_times, config.algorithm.optimizer.lr) == ("mine", 3, 1e-5)
    assert {type(value) for value in (config.algorithm.repeat_times, config.algorithm.optimizer.lr)} == {int, float}


def test_a_plugin_folder_is_found_beside_the_file_that_names_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "recipe/parts").mkdir(parents=True)
    (tmp_path / "recipe/run.yaml").write_text(GOOD + "\nplugin_dir: parts\n")
    monkeypatch.chdir(tmp_path)
    assert load_config(tmp_path / "recipe/run.yaml").plugin_dir == str(tmp_path / "recipe/parts")
    (tmp_path / "parts").mkdir()
    assert load_config(tmp_path / "recipe/run.yaml").plugin_dir == str(tmp_path / "parts")


def test_a_repetition_penalty_of_the_model_is_that_of_every_task_set() -> None:
    sets = {"taskset": {"path": "a"}, "eval_tasksets": [{"path": "b", "rollout_args": {"repetition_penalty": 1.3}}]}
    model = {"model_path": "m", "max_model_len": 64}
    for penalty, expected in ((1.1, [1.1, 1.3]), (1.0, [None, 1.3])):
        tree = {"model": {**model, "repetition_penalty": penalty}, "buffer": {"explorer_input": sets, "batch_size": 4}}
        read = config_from_dict(tree).buffer.explorer_input
        assert [data.rollout_args.repetition_penalty for data in (*read.tasksets, *read.eval_tasksets)] == expected


def test_an_argument_that_a_model_of_a_plugin_does_not_know_is_refused():
    """pydantic's own default ignores it."""

    class Sizes(BaseModel):
        size: int = 3

    assert exact(Sizes).model_validate({"size": "4"}).model_dump() == {"size": 4}
    with pytest.raises(ValidationError) as refused:
        exact(Sizes).model_validate({"sise": 4})
    assert [fault["type"] for fault in refused.value.errors()] == ["extra_forbidden"]
