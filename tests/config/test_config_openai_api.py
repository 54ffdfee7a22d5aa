"""The parsers of the OpenAI API that a configuration may name are those of the pinned vLLM."""

from __future__ import annotations

import ast
from importlib.util import find_spec
from pathlib import Path

import pytest

from trinity_core.config import ConfigError, config_from_dict
from trinity_core.config.openai_api import REASONING_PARSERS, TOOL_CALL_PARSERS


def registered(package: str, table: str) -> list[str]:
    """The keys of a table in vLLM's source, which takes 20 s to import."""
    source = Path(find_spec("vllm").origin).parent / package / "__init__.py"
    for node in ast.walk(ast.parse(source.read_text())):
        targets = node.targets if isinstance(node, ast.Assign) else [getattr(node, "target", None)]
        if any(isinstance(target, ast.Name) and target.id == table for target in targets):
            return sorted(key.value for key in node.value.keys)
    raise AssertionError(f"{source} has no {table}")


def command(tmp_path, explorer):
    return config_from_dict({
        "mode": "bench", "checkpoint_root_dir": str(tmp_path), "explorer": explorer,
        "model": {"model_path": "m", "max_model_len": 64, "max_response_tokens": 8},
        "buffer": {"explorer_input": {"eval_tasksets": [
            {"path": "d", "default_workflow_type": "command_workflow", "workflow_args": {"command": "true"}}
        ]}},
    })  # fmt: skip


def test_a_command_needs_the_api_or_an_endpoint(tmp_path):
    command(tmp_path, {"rollout_model": {"enable_openai_api": True}})
    command(tmp_path, {"external_model": {"base_url": "http://127.0.0.1:1/v1", "model_name": "m"}})
    with pytest.raises(ConfigError, match="gives its command the API's address"):
        command(tmp_path, {})


@pytest.mark.parametrize(
    ("package", "table", "known"),
    [
        ("tool_parsers", "_TOOL_PARSERS_TO_REGISTER", TOOL_CALL_PARSERS),
        ("reasoning", "_REASONING_PARSERS_TO_REGISTER", REASONING_PARSERS),
    ],
)
def test_the_parsers_are_vllms(package, table, known):
    assert list(known) == registered(package, table)
