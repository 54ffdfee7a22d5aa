"""The parsers of the OpenAI API that a configuration may name are those of the pinned vLLM."""

from __future__ import annotations

import ast
from importlib.util import find_spec
from pathlib import Path

import pytest

from trinity_core.config import load_config
from trinity_core.config.notices import remarks
from trinity_core.config.rules.explorer import REASONING_PARSERS, TOOL_CALL_PARSERS

RECIPE = Path(__file__).parents[2] / "configs/gsm8k/gsm8k.yaml"


def registered(package: str, table: str) -> list[str]:
    """The keys of a table in vLLM's source, which takes 20 s to import."""
    source = Path(find_spec("vllm").origin).parent / package / "__init__.py"
    for node in ast.walk(ast.parse(source.read_text())):
        targets = node.targets if isinstance(node, ast.Assign) else [getattr(node, "target", None)]
        if any(isinstance(target, ast.Name) and target.id == table for target in targets):
            return sorted(key.value for key in node.value.keys)
    raise AssertionError(f"{source} has no {table}")


@pytest.mark.parametrize(
    ("package", "table", "known"),
    [
        ("tool_parsers", "_TOOL_PARSERS_TO_REGISTER", TOOL_CALL_PARSERS),
        ("reasoning", "_REASONING_PARSERS_TO_REGISTER", REASONING_PARSERS),
    ],
)
def test_the_parsers_are_vllms(package, table, known):
    assert list(known) == registered(package, table)


def test_what_only_the_api_reads_is_noticed_without_it() -> None:
    model = "explorer.rollout_model"
    read = (
        f"{model}.enable_auto_tool_choice=true",
        f"{model}.tool_call_parser=hermes",
        f"{model}.reasoning_parser=qwen3",
    )
    address = "explorer.api_port=8123", "explorer.listen_address=0.0.0.0"
    judge = "explorer.auxiliary_models=[{model_path: judge, tool_call_parser: hermes}]"
    off = load_config(RECIPE, ["cluster.gpu_per_node=0", *read, *address, judge, f"{model}.enable_log_requests=true"])
    keys = "enable_auto_tool_choice", "enable_log_requests"
    unread = [f"{model}.{key}" for key in keys]
    unread += ["explorer.auxiliary_models[0].tool_call_parser", "explorer.listen_address", "explorer.api_port"]
    assert [(notice.key, notice.code) for notice in remarks(off)] == [(key, "no-effect") for key in unread]
    assert remarks(load_config(RECIPE, [*read, *address, f"{model}.enable_openai_api=true"])) == []
    assert [notice.key for notice in remarks(load_config(RECIPE, [read[-1]]))] == [f"{model}.reasoning_parser"]
