"""A configuration as flat parameters, without its secrets."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from trinity_core.config.public import without_secrets


def flatten(config: Mapping[str, Any]) -> dict[str, str]:
    """`{"a": {"b": 1}}` -> `{"a.b": "1"}`, secrets masked. Empty values and None are left out."""
    return dict(_pairs(without_secrets(dict(config)), ""))


def _pairs(value: Any, prefix: str) -> Iterator[tuple[str, str]]:
    if isinstance(value, Mapping):
        for name, part in value.items():
            yield from _pairs(part, f"{prefix}.{name}" if prefix else str(name))
    elif isinstance(value, list) and any(isinstance(part, Mapping) for part in value):
        for position, part in enumerate(value):
            yield from _pairs(part, f"{prefix}.{position}")
    elif value is not None and value not in ("", [], {}):
        yield prefix, str(value)
