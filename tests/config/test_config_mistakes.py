"""Mistakes that once ended in tracebacks."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import yaml

from trinity_core.config import ConfigError, config_from_dict, config_from_text, stages
from trinity_core.config.foreign.names import TRL_SETTINGS
from trinity_core.run.configuration import load_checked

GOOD = (Path(__file__).parent / "documents/quick_start.yaml").read_text()


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Where the mistakes are written."""
    monkeypatch.chdir(tmp_path)
    return tmp_path


@pytest.mark.parametrize(
    ("lines", "key", "code"),
    [
        ("stages: text", "stages", "wrong-type"),
        ("stages: {a: {}}", "stages", "wrong-type"),
        ("stages: [text]", "stages[0]", "wrong-type"),
        *(
            (f"stages: [{stage}]\ngroup: ${{oc.env:HOME}}", "stages[0]", "wrong-type")
            for stage in ("'${name}'", "[[{stage_name: a}]]", "true")
        ),
        ("stages: [{stage_name: a}, 3]\ngroup: ${oc.env:HOME}", "stages[1]", "wrong-type"),
        ("stages: [{stage_name: a, model: text}]", "stages[0].model", "wrong-type"),
        ("service: ${trainer.trainer_config.actor_rollout_ref.actr}", "service", "unresolved"),
        (f"seed: {'9' * 5000}", "", "unreadable"),
        ("seed: !!int x", "", "unreadable"),
        ("plugin_dir: /nope", "plugin_dir", "invalid"),
        ("plugin_dir: ~nobody/x", "plugin_dir", "invalid"),
    ],
)
def test_mistakes_that_once_ended_in_tracebacks(lines: str, key: str, code: str, folder: Path) -> None:
    own = lines.partition(":")[0]
    text = "".join(line for line in GOOD.splitlines(keepends=True) if not line.startswith(f"{own}:"))
    (folder / "run.yaml").write_text(f"{text}\n{lines}\n")
    with pytest.raises(ConfigError) as caught:
        load_checked(folder / "run.yaml")
    assert (key, code) in [(problem.key, problem.code) for problem in caught.value.problems]


@pytest.mark.parametrize(
    ("overrides", "key"),
    [
        (["algorithm.algorithm_type=b"], "algorithm.algorithm_type"),
        (
            ["mode=train", "buffer.trainer_input.experience_buffer.path=x", "algorithm.algorithm_type=[]"],
            "algorithm.algorithm_type",
        ),
    ],
)
def test_checks_of_names_go_on_after_other_problems(overrides: list[str], key: str, folder: Path) -> None:
    (folder / "run.yaml").write_text(GOOD)
    with pytest.raises(ConfigError) as caught:
        load_checked(folder / "run.yaml", overrides)
    assert key in [problem.key for problem in caught.value.problems]


@pytest.mark.parametrize(
    "args", ["{config_path: {}}", "{config_path: none.yaml}", "{operators: [{text_length_filter: 3}]}"]
)
def test_data_juicer_arguments_of_a_wrong_kind(args: str, folder: Path) -> None:
    lines = f"data_processor: {{experience_pipeline: {{operators: [{{name: data_juicer, args: {args}}}]}}}}"
    (folder / "run.yaml").write_text(f"{GOOD}\n{lines}\n")
    with pytest.raises(ConfigError) as caught:
        load_checked(folder / "run.yaml")
    assert {problem.key.partition("]")[0] for problem in caught.value.problems} == {
        "data_processor.experience_pipeline.operators[0"
    }


@pytest.mark.parametrize(
    ("mistake", "key", "code"),
    [
        ({None: 1}, "null", "unknown-key"),
        ({"name": b"x"}, "name", "wrong-type"),
        ({"seed": float("nan")}, "seed", "wrong-type"),
        ({"stages": [{None: 1}]}, "stages[0].null", "unknown-key"),
    ],
)
def test_mistakes_in_a_mapping_are_reported(mistake: dict[Any, Any], key: str, code: str) -> None:
    with pytest.raises(ConfigError) as caught:
        config_from_dict({**yaml.safe_load(GOOD), **mistake})
    assert (key, code) in [(problem.key, problem.code) for problem in caught.value.problems]


@pytest.mark.parametrize("key", ["learning_rate", "trainer.bf16"])
def test_names_of_trl_are_told_with_ours(key: str) -> None:
    with pytest.raises(ConfigError) as caught:
        config_from_text(GOOD, [f"{key}=1"])
    [problem] = caught.value.problems
    assert (problem.key, problem.code) == (key, "unknown-key")
    assert TRL_SETTINGS[key.rpartition(".")[2]] in problem.message


def test_null_stages_are_none() -> None:
    config = config_from_text(f"{GOOD}\nstages: null\n")
    assert stages(config) == [config]


def test_home_of_an_unknown_user_is_a_folder_of_that_name() -> None:
    config = config_from_text(GOOD, ["checkpoint_root_dir=~nobody_here/x"])
    assert config.checkpoint_root_dir == str(Path("~nobody_here/x").absolute())
