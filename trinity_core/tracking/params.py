"""A configuration as flat parameters, without its secrets."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

MASK = "***"
_SECRET = re.compile(
    r"(^|_)(api_?key|password|passwd|secret|credentials?|auth|(access|auth|bearer|hf|api)_?token)($|_)", re.I
)
_URL_LOGIN = re.compile(r"(?P<scheme>[a-z][a-z0-9+.-]*://[^:/@\s]*):[^@/\s]+@", re.I)


def flatten(config: Mapping[str, Any]) -> dict[str, str]:
    """`{"a": {"b": 1}}` -> `{"a.b": "1"}`, secrets masked. Empty values and None are left out."""
    return dict(_pairs(mask(config), ""))


def mask(value: Any, key: str = "") -> Any:
    """The same value with each secret replaced: keys that name one, and passwords within URLs."""
    if isinstance(value, Mapping):
        return {name: mask(part, str(name)) for name, part in value.items()}
    if isinstance(value, Sequence) and not isinstance(value, str | bytes):
        return [mask(part, key) for part in value]
    if value is not None and value != "" and _SECRET.search(key):
        return MASK
    return _URL_LOGIN.sub(rf"\g<scheme>:{MASK}@", value) if isinstance(value, str) else value


def _pairs(value: Any, prefix: str) -> Iterator[tuple[str, str]]:
    if isinstance(value, Mapping):
        for name, part in value.items():
            yield from _pairs(part, f"{prefix}.{name}" if prefix else str(name))
    elif isinstance(value, list) and any(isinstance(part, Mapping) for part in value):
        for position, part in enumerate(value):
            yield from _pairs(part, f"{prefix}.{position}")
    elif value is not None and value not in ("", [], {}):
        yield prefix, str(value)
