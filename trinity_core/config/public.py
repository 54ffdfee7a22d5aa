"""A configuration without passwords and keys, for display, logs and tracking."""

from __future__ import annotations

import re
from typing import Any

from trinity_core.config.load import to_dict
from trinity_core.config.schema import Config

MASK = "***"
_SECRET_KEY = re.compile(
    r"(^|_)(api_?key|password|passwd|secret|credentials?|auth|(access|auth|bearer|hf|api)_?token)($|_)|(^|_)token$",
    re.IGNORECASE,
)
_URL_PASSWORD = re.compile(r"(?<=://)([^/@:\s]*):\S+(?=@)")
_ENVIRONMENT = "env_vars"
"""Its names are the user's own, and say nothing of what is secret: every value of it is."""


def public_dict(config: Config) -> dict[str, Any]:
    """`to_dict` without its secrets."""
    return without_secrets(to_dict(config))


def without_secrets(value: Any, key: str = "") -> Any:
    """The same value, with all of `env_vars`, what a key calls a secret, and passwords in URLs masked."""
    if value and _SECRET_KEY.search(key):
        return MASK
    if isinstance(value, dict):
        hidden = key == _ENVIRONMENT
        return {name: MASK if hidden and part else without_secrets(part, str(name)) for name, part in value.items()}
    if isinstance(value, list | tuple):
        return [without_secrets(part) for part in value]
    return without_password(value) if isinstance(value, str) else value


def without_password(text: str) -> str:
    """The same text with the password of each URL masked."""
    return _URL_PASSWORD.sub(rf"\1:{MASK}", text)
