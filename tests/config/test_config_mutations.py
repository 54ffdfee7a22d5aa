"""Recipes with random mistakes load, or are refused with reasons: no mistake ends in a traceback."""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

import pytest
import yaml
from mutating import Mistake, mistake, recipes, surroundings, verdict

from trinity_core.config import ConfigError, config_from_dict, config_from_text, stages
from trinity_core.runtime.configuration import load_checked

GOOD = (Path(__file__).parent / "documents/quick_start.yaml").read_text()
RECIPES = recipes()
COUNT = 7
"""Mistakes in each recipe; `benchmarks/mutations.py` makes 10,000 in all."""


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Where the mistakes are written; what recipes and guides refer to is there."""
    monkeypatch.chdir(tmp_path)
    for name, value in surroundings(tmp_path).items():
        monkeypatch.setenv(name, value)
    return tmp_path


@pytest.mark.filterwarnings("ignore:.*is deprecated.*:UserWarning")
@pytest.mark.parametrize("name", RECIPES)
def test_mistakes_in_recipes_are_reported(name: str, folder: Path) -> None:
    assert verdict(Mistake(RECIPES[name]), folder).problems == (), "without a mistake"
    dice = random.Random(name)
    for _ in range(COUNT):
        made = mistake(RECIPES[name], dice)
        assert not (fault := verdict(made, folder).fault), f"{fault}\n{made.overrides}\n{made.text}"


@pytest.mark.parametrize(
    ("lines", "key", "message"),
    [
        ("stages: text", "stages", "must be a list, not 'text'"),
        ("stages: 3", "stages", "must be a list, not 3"),
        ("stages: {a: {}}", "stages", "must be a list, not a section"),
        ("stages: [text]", "stages[0]", "must be a section with keys, not 'text'"),
        ("stages: [{stage_name: a, model: text}]", "stages[0].model", "must be a section with keys, not 'text'"),
        (
            "service: ${trainer.trainer_config.actor_rollout_ref.actr}",
            "service",
            "refers to 'trainer.trainer_config.actor_rollout_ref.actr', which is not there",
        ),
        (f"seed: {'9' * 5000}", "", "a number of 5000 digits is too long"),
        ("seed: !!timestamp x", "", "could not determine a constructor"),
        ("seed: !!float x", "", "'x' is no float"),
        ("seed: !!float ''", "", "'' is no float"),
        ("seed: !!int x", "", "'x' is no int"),
        ("seed: !!bool x", "", "'x' is no bool"),
        (f"log: {'[' * 300 + ']' * 300}", f"log{'[0]' * 50}", "is nested too deeply, in more than 50 levels"),
        ('name: "\\ud800"', "name", "holds NUL, or bytes that are no UTF-8"),
        ('checkpoint_root_dir: "a\\0"', "checkpoint_root_dir", "holds NUL"),
        ('"\\ud800": 1', "\\ud800", "bytes that are no UTF-8"),
        ("plugin_dir: /nope", "plugin_dir", "the plugin folder /nope does not exist"),
        ("plugin_dir: ~nobody/x", "plugin_dir", "does not exist"),
    ],
)
def test_mistakes_that_once_ended_in_tracebacks(lines: str, key: str, message: str, folder: Path) -> None:
    own = lines.partition(":")[0]
    text = "".join(line for line in GOOD.splitlines(keepends=True) if not line.startswith(f"{own}:"))
    (folder / "run.yaml").write_text(f"{text}\n{lines}\n")
    with pytest.raises(ConfigError) as caught:
        load_checked(folder / "run.yaml")
    found = [problem for problem in caught.value.problems if problem.key == key]
    assert found and message in found[0].message


@pytest.mark.parametrize(
    ("overrides", "key"),
    [
        (["algorithm.algorithm_type=b"], "algorithm.algorithm_type"),
        (
            ["mode=train", "buffer.trainer_input.experience_buffer.path=x", "algorithm.algorithm_type=[]"],
            "algorithm.algorithm_type",
        ),
        (["\udcff=1"], "\\udcff"),
        (["checkpoint_root_dir=~nobody/x", "seed=x"], "seed"),
    ],
)
def test_checks_of_names_go_on_after_other_problems(overrides: list[str], key: str, folder: Path) -> None:
    (folder / "run.yaml").write_text(GOOD)
    with pytest.raises(ConfigError) as caught:
        load_checked(folder / "run.yaml", overrides)
    assert key in [problem.key for problem in caught.value.problems]


@pytest.mark.parametrize(
    ("args", "message"),
    [
        ("{config_path: {}}", "`config_path` must be a path"),
        ("{config_path: none.yaml}", "none.yaml: there is no such file"),
        ("{operators: [{text_length_filter: 3}]}", "must be a list of operators, each `name: arguments`"),
    ],
)
def test_data_juicer_arguments_of_a_wrong_kind(args: str, message: str, folder: Path) -> None:
    lines = f"data_processor: {{experience_pipeline: {{operators: [{{name: data_juicer, args: {args}}}]}}}}"
    (folder / "run.yaml").write_text(f"{GOOD}\n{lines}\n")
    with pytest.raises(ConfigError, match="operators\\[0\\]") as caught:
        load_checked(folder / "run.yaml")
    assert any(message in problem.message for problem in caught.value.problems)


def test_a_message_repeats_the_beginning_of_a_long_value() -> None:
    with pytest.raises(ConfigError) as caught:
        config_from_text(GOOD, [f"algorithm.algorithm_type={'x' * 100_000}", f"{'x' * 100_000}"])
    assert len(str(caught.value)) < 1000
    with pytest.raises(ConfigError) as caught:
        config_from_text(GOOD, [f"algorithm.algorithm_type={'x' * 100_000}"])
    assert len(str(caught.value)) < 1000


@pytest.mark.parametrize(
    ("given", "problem"),
    [
        ({7: 1}, "7: is not a known key"),
        ({None: 1}, "None: is not a known key"),
        ({"name": b"x"}, "name: must be text, a number, true, false or null, not a bytes"),
        ({"seed": float("nan")}, "seed: must be a whole number, not nan"),
        ({"stages": [{None: 1}]}, r"stages\[0\].None: is not a known key"),
    ],
)
def test_mistakes_in_a_mapping_are_reported(given: dict[Any, Any], problem: str) -> None:
    with pytest.raises(ConfigError, match=problem):
        config_from_dict({**yaml.safe_load(GOOD), **given})


def test_null_stages_are_none() -> None:
    config = config_from_text(f"{GOOD}\nstages: null\n")
    assert stages(config) == [config]


def test_home_of_an_unknown_user_is_a_folder_of_that_name() -> None:
    config = config_from_text(GOOD, ["checkpoint_root_dir=~nobody_here/x"])
    assert config.checkpoint_root_dir == str(Path("~nobody_here/x").absolute())
