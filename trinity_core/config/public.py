"""A configuration as it may be shown, logged and tracked: without passwords and keys."""

from __future__ import annotations

import re
from typing import Any

from trinity_core.config.load import to_dict
from trinity_core.config.schema import Config

MASK = "***"
_SECRET_KEY = re.compile(r"(^|_)(api_?key|password|passwd|secret|token|credentials?)$", re.IGNORECASE)
_URL_PASSWORD = re.compile(r"(?<=://)([^/@:\s]*):[^/@\s]+(?=@)")


def public_dict(config: Config) -> dict[str, Any]:
    """`to_dict` with every value of a key that names a secret, and every password in a URL, masked."""
    return _masked(to_dict(config))


def _masked(node: Any) -> Any:
    if isinstance(node, dict):
        return {name: MASK if value and _SECRET_KEY.search(name) else _masked(value) for name, value in node.items()}
    if isinstance(node, list):
        return [_masked(item) for item in node]
    return _URL_PASSWORD.sub(rf"\1:{MASK}", node) if isinstance(node, str) else node
