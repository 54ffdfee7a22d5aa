"""What is written loads to an equal configuration, whatever was set."""

from __future__ import annotations

import pickle
from pathlib import Path
from typing import Any

import yaml
from hypothesis import given, settings
from hypothesis import strategies as st

from trinity_core.config import Config, ConfigError, config_from_dict, config_from_text, resolve, to_yaml
from trinity_core.config.algorithm_types import PARTS
from trinity_core.config.fields import Setting
from trinity_core.config.fields import settings as settings_of
from trinity_core.config.source import merge

GOOD: dict[str, Any] = yaml.safe_load((Path(__file__).parent / "documents/quick_start.yaml").read_text())
TEXT = st.text(st.characters(blacklist_categories=("Cs", "Cc"), blacklist_characters="$?/"), min_size=1, max_size=12)
PLAIN = st.none() | st.booleans() | st.integers(-9, 9) | st.floats(allow_nan=False, allow_infinity=False) | TEXT
ARGS = st.dictionaries(TEXT, PLAIN | st.lists(PLAIN, max_size=2), max_size=3)


def values(setting: Setting) -> st.SearchStrategy[Any]:
    """Values that fit one setting."""
    strategy: st.SearchStrategy[Any]
    low = setting.bounds.low if setting.bounds and setting.bounds.low is not None else None
    high = setting.bounds.high if setting.bounds and setting.bounds.high is not None else None
    if setting.section is not None:
        entry = trees(setting.section)
        strategy = entry if setting.kind == "object" else st.lists(entry, max_size=2)
        strategy = st.dictionaries(TEXT, entry, max_size=2) if setting.default == {} else strategy
    elif setting.choices or setting.names:
        one = st.sampled_from(setting.choices or setting.names)
        strategy = st.lists(one, max_size=2) if setting.kind == "array" else one
    elif setting.kind == "integer":
        strategy = st.integers(0 if low is None else int(low), int(high or 10_000))
    elif setting.kind == "number":
        above, below = (setting.bounds.above, setting.bounds.below) if setting.bounds else (False, False)
        strategy = st.floats(low, high or 1e6, exclude_min=above, exclude_max=below)
    elif setting.kind == "boolean":
        strategy = st.booleans()
    elif setting.kind == "string":
        strategy = TEXT
    elif setting.kind == "array":
        strategy = st.just(setting.default) if setting.default else st.lists(TEXT, max_size=2)
    else:
        strategy = ARGS
    return st.none() | strategy if setting.optional or setting.derived else strategy


def trees(cls: type) -> st.SearchStrategy[dict[str, Any]]:
    """Some keys of a section, with values that fit; no arguments of parts, as each part takes its own."""
    left_out = {"stages", *(f"{part}_args" for part in PARTS)}
    optional = {setting.name: values(setting) for setting in settings_of(cls) if setting.name not in left_out}
    return st.fixed_dictionaries({}, optional=optional)


def strip(node: Any) -> Any:
    """Without a file of trainer settings, which is not there."""
    node.get("trainer", {}).pop("trainer_config_path", None)
    return node


@settings(max_examples=15)
@given(trees(Config).map(strip))
def test_yaml_round_trip(tree: dict[str, Any]) -> None:
    """Whatever fits the types either loads, and then survives YAML and pickle, or is refused with reasons."""
    try:
        config = config_from_dict(merge(GOOD, tree))
    except ConfigError as error:
        assert error.problems and all(problem.message for problem in error.problems)
        return
    assert config_from_text(to_yaml(config)) == config
    assert pickle.loads(pickle.dumps(config)) == config
    assert resolve(config) == config


@settings(max_examples=30)
@given(
    st.dictionaries(st.sampled_from([setting.name for setting in settings_of(Config)]), PLAIN | ARGS | st.lists(PLAIN))
)
def test_no_value_ends_in_a_traceback(tree: dict[str, Any]) -> None:
    try:
        config_from_dict(tree)
    except ConfigError as error:
        assert str(error)


@settings(max_examples=40)
@given(st.text(st.sampled_from("\\${}a:. "), min_size=1))
def test_text_that_looks_like_interpolation_survives(text: str) -> None:
    config = config_from_dict(GOOD).with_values({"model.custom_chat_template": text})
    assert config_from_text(to_yaml(config)).model.custom_chat_template == text
