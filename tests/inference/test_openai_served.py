"""What an explorer serves follows from its configuration."""

from __future__ import annotations

import json

from trinity_core.config import config_from_dict
from trinity_core.config.paths import api_address_file
from trinity_core.rollout.inference.pool import EnginePool
from trinity_core.rollout.openai_api import api_settings


def config(tmp_path, rollout_model=None, mode="explore", **explorer):
    return config_from_dict({
        "mode": mode,
        "project": "p",
        "name": "n",
        "checkpoint_root_dir": str(tmp_path),
        "model": {"model_path": "m", "max_model_len": 99, "max_response_tokens": 9, "temperature": 0.7},
        "explorer": {"rollout_model": rollout_model or {}, **explorer},
        "algorithm": {"algorithm_type": "grpo"},
        "buffer": {"explorer_input": {"taskset": {"path": "t"}, "eval_tasksets": [{"name": "e", "path": "d"}]}},
    })  # fmt: skip


def test_nothing_is_served_unless_asked_for(tmp_path):
    settings = config(tmp_path)
    assert (
        not api_settings.is_served(settings)
        and api_settings.workflow_models(settings, None, EnginePool([], "m")) is None
    )


def test_policy_and_auxiliary_models_are_served(tmp_path):
    parsing = {"enable_openai_api": True, "tool_call_parser": "hermes", "enable_auto_tool_choice": True}
    judge = {"model_path": "j", "name": "judge", "enable_openai_api": True, "reasoning_parser": "qwen3"}
    settings = config(tmp_path, parsing, auxiliary_models=[judge, {"model_path": "hidden"}], api_port=1)
    pools = [EnginePool([], name) for name in "mjh"]
    server = api_settings.api_server(settings, (pools[0], (7,)), [(pools[1], (8,)), (pools[2], (9,))])
    assert (server.host, server.port) == ("127.0.0.1", 1)
    policy, other = server.models
    assert policy.names == ("policy", "m") and policy.pool is pools[0] and policy.stop_token_ids == (7,)
    assert dict(policy.sampling)["temperature"] == 0.7 and policy.max_model_len == 99
    assert policy.tool_call_parser == "hermes" and policy.enable_auto_tool_choice
    assert other.names == ("judge",) and other.recorded is False
    assert other.reasoning_parser == "qwen3" and other.path == "j"


def test_each_server_has_a_key_of_its_own_for_its_owner(tmp_path):
    settings = config(tmp_path, {"enable_openai_api": True})
    first, second = (api_settings.api_server(settings, (EnginePool([], "m"), ()), []) for _ in range(2))
    assert first.key != second.key and first.key not in repr(first)
    api_settings.write_address(settings, first)
    path = api_address_file(settings)
    assert path.stat().st_mode & 0o777 == 0o600
    assert json.loads(path.read_text()) == {"base_url": first.base_url(), "api_key": first.key}


def test_an_evaluation_leaves_address_and_port_to_its_run(tmp_path):
    """The evaluation has the run's folder and explorer name, and the run may be serving."""
    asked = {"enable_openai_api": True}
    assert api_settings.is_told(config(tmp_path, asked)) and not api_settings.is_told(
        config(tmp_path, asked, mode="bench")
    )
    settings = config(tmp_path, asked, mode="bench", listen_address="0.0.0.0", api_port=1)
    server = api_settings.api_server(settings, (EnginePool([], "m"), ()), [])
    assert (server.host, server.port) == ("127.0.0.1", 0)
