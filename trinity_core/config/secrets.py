"""A configuration without passwords and keys, for display, logs and tracking."""

from __future__ import annotations

import re
from typing import Any

from trinity_core.config.load import to_dict
from trinity_core.config.schema import Config

MASK = "***"
_SECRET_KEY = re.compile(
    r"(^|_)(api_?keys?|(private|access|secret|openai)_keys?|passwords?|passwd|secrets?|credentials?|auth|authorization"
    r"|bearer|(access|auth|bearer|hf|api)_?tokens?)($|_)|(^|_)token$|^keys?$|headers$"
)
"""Matches keys of secrets, in lower case with `_` between words."""
_WORD = re.compile(r"(?<=[a-z0-9])(?=[A-Z])|-")
"""Matches word boundaries in `apiKey` and `X-Api-Key`."""
_URL_QUERY = re.compile(r"(?<=[?&])([\w-]*(?:key|token|secret|password)=)[^&#\s]+", re.IGNORECASE)
_URL_PASSWORD = re.compile(r"(?<=://)([^/@:\s]*):\S+(?=@)")
_VARIABLE = re.compile(r"[A-Z_][A-Z0-9_]*")
"""Matches the name of a variable, as in `api_key_env`. Other text may be a key given by mistake."""
_ENVIRONMENT, _ARGUMENTS = "env_vars", "workflow_args"
"""Sections with environment variables. Their names do not show what is secret, so all values are masked."""


def public_dict(config: Config) -> dict[str, Any]:
    """Return `to_dict` with secrets masked."""
    return without_secrets(to_dict(config))


def without_secrets(value: Any, key: str = "") -> Any:
    """Return the value with secrets masked: all of `env_vars` and `workflow_args.env`, values of secret keys, HTTP
    headers, and secrets in URLs."""
    if key == _ARGUMENTS and isinstance(value, dict):
        secrets = value.get("secrets")  # names of variables, for `command_workflow`
        names = {"secrets": list(secrets)} if isinstance(secrets, list | tuple) else {}
        environment = {"env": without_secrets(value["env"], _ENVIRONMENT)} if "env" in value else {}
        return _without_secrets(value) | names | environment
    if value and _SECRET_KEY.search(_WORD.sub("_", key).lower()):
        return value if key.endswith("_env") and _VARIABLE.fullmatch(str(value)) else MASK
    if isinstance(value, dict):
        return {name: part and MASK for name, part in value.items()} if key == _ENVIRONMENT else _without_secrets(value)
    if isinstance(value, list | tuple):
        return [without_secrets(part) for part in value]
    return without_password(value) if isinstance(value, str) else value


def _without_secrets(section: dict[str, Any]) -> dict[str, Any]:
    return {name: without_secrets(part, str(name)) for name, part in section.items()}


def without_password(text: str) -> str:
    """Mask passwords in URLs, and keys in their queries."""
    return _URL_QUERY.sub(rf"\1{MASK}", _URL_PASSWORD.sub(rf"\1:{MASK}", text))
