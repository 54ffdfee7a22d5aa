"""Recipes with random mistakes load, or are refused with reasons: no mistake ends in a traceback."""

from __future__ import annotations

import random
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml

from trinity_core.config import (
    ConfigError,
    config_from_dict,
    config_from_text,
    notices,
    public_dict,
    stages,
    store_url,
    to_yaml,
    train_settings,
)

RECIPES = sorted((Path(__file__).parents[2] / "configs").rglob("*.yaml"))
GOOD = (Path(__file__).parent / "documents/quick_start.yaml").read_text()
VALUES: list[Any] = [
    None, True, 0, -1, 2.5, 1e400, 10**400, float("nan"), "", "text", "${", "${name}", "${nope}", "${model}", "???",
    "${trainer.trainer_config.actor_rollout_ref.actr.grad_clip}", "${actor_rollout_ref.actor}", "${stages}",
    "1e-6", "1_000", [], [None], [[]], ["text", 3], {}, {"a": 1}, {"a": {"b": None}}, [{"stage_name": None}], {1: 2},
]  # fmt: skip
KEYS = ["stages", "taskset", "trainer_config", "buffer", "name", "typo", "optim", "actor", 7, None]


def places(node: Any) -> Iterator[tuple[Any, Any]]:
    """Every mapping and list of a tree with each of its keys."""
    for key, value in node.items() if isinstance(node, dict) else enumerate(node):
        yield node, key
        if isinstance(value, dict | list):
            yield from places(value)


def mutated(tree: Any, dice: random.Random) -> Any:
    """The tree with one to three values, keys or entries changed."""
    for _ in range(dice.randint(1, 3)):
        node, key = dice.choice(list(places(tree)) or [(tree, "stages")])
        kind = dice.choice(["value", "value", "value", "key", "remove", "add"])
        if kind == "value":
            node[key] = dice.choice(VALUES)
        elif kind == "remove" or isinstance(node, list):
            del node[key]
        elif kind == "key":
            node[dice.choice([f"{key}s", str(key)[:-1], *KEYS])] = node.pop(key)
        else:
            node[dice.choice(KEYS)] = dice.choice(VALUES)
    return tree


def use(tree: Any) -> None:
    """What commands do with a configuration that has loaded."""
    config = config_from_dict(tree)
    for stage in stages(config):
        notices(stage), store_url(stage), public_dict(stage)
        if stage.mode in ("both", "train"):
            train_settings(stage)
    config_from_text(to_yaml(config))


@pytest.mark.parametrize("recipe", RECIPES, ids=lambda path: path.stem)
def test_mistakes_in_recipes_are_reported(recipe: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("MODEL_PATH", "TRINITY_TASKSET_PATH"):
        monkeypatch.setenv(name, "x")
    dice = random.Random(recipe.stem)
    text = recipe.read_text()
    for _ in range(15):
        tree = mutated(yaml.safe_load(text), dice)
        try:
            use(tree)
        except ConfigError as error:
            assert error.problems and str(error)
        except Exception as error:
            raise AssertionError(f"{type(error).__name__} from {tree}") from error


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
        (f"seed: {'9' * 5000}", "", "is not valid YAML"),
    ],
)
def test_mistakes_that_once_ended_in_tracebacks(lines: str, key: str, message: str) -> None:
    with pytest.raises(ConfigError) as caught:
        config_from_text(f"{GOOD}\n{lines}\n")
    found = [problem for problem in caught.value.problems if problem.key == key]
    assert found and message in found[0].message


def test_null_stages_are_none() -> None:
    config = config_from_text(f"{GOOD}\nstages: null\n")
    assert stages(config) == [config]
