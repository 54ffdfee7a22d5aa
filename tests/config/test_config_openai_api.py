"""The parsers of the OpenAI API that a configuration may name are those of the pinned vLLM."""

from __future__ import annotations

import ast
from importlib.util import find_spec
from pathlib import Path

import pytest

from trinity_core.config.rules.explorer import REASONING_PARSERS, TOOL_CALL_PARSERS


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
