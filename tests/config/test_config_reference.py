"""The schema describes itself: docs, the reference page, JSON Schema."""

from __future__ import annotations

import operator
import pickle
from collections.abc import Iterator
from pathlib import Path

import pytest
from pydantic import ValidationError

from trinity_core.algorithms import ALGORITHMS
from trinity_core.base.errors import TrinityError
from trinity_core.config import Config, config_from_dict, load_config, public_dict, to_yaml
from trinity_core.config.fields import settings
from trinity_core.config.json_schema import json_schema
from trinity_core.config.reference import PAGE, listing, page

RECIPES = Path(__file__).parents[2] / "configs"


def sections(cls: type = Config) -> Iterator[type]:
    yield cls
    for setting in settings(cls):
        if setting.section is not None:
            yield from sections(setting.section)


def test_the_last_part_of_a_key_leads_to_the_whole_ones() -> None:
    with pytest.raises(TrinityError) as error:
        listing("repeat_times")
    assert {"algorithm.repeat_times", "buffer.explorer_input.taskset.repeat_times"} <= set(str(error.value).split("'"))


def test_the_page_is_current() -> None:
    assert PAGE.read_text() == page(), "run: make generated"


def test_the_page_lists_the_parts_with_their_arguments() -> None:
    rows = {
        line.split("|")[1].strip(): line
        for line in page().partition("## Algorithm types")[2].splitlines()
        if "|" in line
    }
    assert {f"`{name}`" for name in ALGORITHMS} <= rows.keys()
    assert "`policy_loss_fn: gspo` (clip_range_low 0.0003, clip_range_high 0.0004)" in page()
    assert rows["`mis`"] == "| `mis` | `cap` 2.0, `level` sequence (or token) |"


@pytest.mark.parametrize("cls", dict.fromkeys(sections()), ids=lambda cls: cls.__name__)
def test_every_setting_says_what_it_is(cls: type) -> None:
    assert cls.__doc__ and not cls.__doc__.startswith(f"{cls.__name__}(")
    for setting in settings(cls):
        assert setting.doc.endswith((".", "`")), f"{cls.__name__}.{setting.name}"
        assert not cls.model_fields[setting.name].is_required(), "a file may be short: rules report what a mode needs"


def test_json_schema() -> None:
    schema = json_schema()
    interpolation = {"$ref": "#/$defs/Interpolation"}
    mode, repeats = schema["properties"]["mode"], schema["$defs"]["AlgorithmConfig"]["properties"]["repeat_times"]
    assert mode["anyOf"] == [{"enum": ["both", "train", "explore", "serve", "bench"], "type": "string"}, interpolation]
    assert repeats["anyOf"] == [{"type": "integer", "minimum": 1}, interpolation, {"type": "null"}]
    assert schema["$defs"]["StageConfig"]["properties"]["stage_name"]["type"] == ["string", "number", "boolean"]
    assert not {"given", "_given"} & schema["properties"].keys()


def test_defaults_fit_their_own_schema() -> None:
    for cls in set(sections()):
        for setting in settings(cls):
            if setting.default is not None:
                assert getattr(cls.model_validate({setting.name: setting.default}), setting.name) is not None


def test_secrets_are_masked() -> None:
    config = load_config(
        RECIPES / "gsm8k/gsm8k.yaml",
        [
            "monitor.monitor_args={api_key: abc, uri: 'https://me:abc@host'}",
            "explorer.env_vars.JUDGE_API_KEY=abc",
            "explorer.env_vars.GITHUB_PAT=abc",
            "buffer.trainer_input.experience_buffer.path=postgresql://me:abc@host/db",
        ],
    )
    shown = public_dict(config)
    assert shown["monitor"]["monitor_args"] == {"api_key": "***", "uri": "https://me:***@host"}
    assert "abc" not in str(shown)
    assert shown["model"]["max_prompt_tokens"] == 1024
    assert config.monitor.monitor_args["api_key"] == "abc"


def test_unknown_settings_raise_in_code() -> None:
    config = config_from_dict({"model": {"model_path": "m", "max_model_len": 8}, "mode": "train"})
    with pytest.raises(AttributeError):
        config.model.max_len  # type: ignore[attr-defined]  # noqa: B018
    for key in ("model.max_len", "modle.max_model_len", "modle"):
        with pytest.raises((ValidationError, AttributeError)):
            config.with_values({key: 3})


def test_a_configuration_is_immutable() -> None:
    config = load_config(RECIPES / "gsm8k/gsm8k.yaml")
    before = to_yaml(config)
    for change in (
        lambda: setattr(config, "name", "other"),
        lambda: setattr(config.buffer.explorer_input.tasksets[0], "repeat_times", 3),
        lambda: delattr(config.model, "model_path"),
        lambda: config.algorithm.policy_loss_fn_args.update(clip_range=0.1),
        lambda: config.explorer.env_vars.setdefault("A", "b"),
        lambda: operator.setitem(config.buffer.explorer_input.tasksets, 0, None),
    ):
        with pytest.raises((ValidationError, TypeError)):
            change()
    assert to_yaml(config) == before


def test_with_values_returns_another_configuration() -> None:
    config = load_config(RECIPES / "gsm8k/gsm8k.yaml")
    other = config.with_values({"name": "other", "synchronizer.sync_method": "nccl", "trainer.worker_num": "2"})
    assert (other.name, other.synchronizer.sync_method, other.trainer.worker_num) == ("other", "nccl", 2)
    assert config.synchronizer.sync_method == "memory" and other.given == config.given
    back = {"name": config.name, "synchronizer": config.synchronizer, "trainer": config.trainer}
    assert other.with_values(back) == config
    with pytest.raises(ValidationError):
        config.with_values({"synchronizer.sync_method": "memroy"})
    again = pickle.loads(pickle.dumps(other))
    assert again == other and again.given == config.given
