"""Rules of `explorer.external_model`, and the key that it names."""

from __future__ import annotations

import os
import re
from collections.abc import Iterator
from urllib.parse import urlsplit

from trinity_core.config.problems import Finding
from trinity_core.config.schema import Config
from trinity_core.errors import TrinityError

EXTERNAL = "explorer.external_model"
_VARIABLE = re.compile(r"[A-Za-z_][A-Za-z0-9_]*")


def external_rules(config: Config) -> Iterator[Finding]:
    """The address, the model's name, and a variable's name where a key must not stand."""
    external = config.explorer.external_model
    if external is None:
        return
    if wrong := _no_address(external.base_url):
        yield Finding(f"{EXTERNAL}.base_url", None, wrong)
    if not external.model_name:
        yield Finding(f"{EXTERNAL}.model_name", None, "must be given: the model's name at the endpoint.")
    if external.api_key_env is not None and not _VARIABLE.fullmatch(external.api_key_env):
        message = "must be the name of an environment variable, such as OPENAI_API_KEY, and not the key itself."
        yield Finding(f"{EXTERNAL}.api_key_env", None, message)
    for index, model in enumerate(config.explorer.auxiliary_models if config.external_model else ()):
        if model.max_model_len is None:
            message = "must be given, as model.max_model_len is not, which an endpoint does not need."
            yield Finding(f"explorer.auxiliary_models[{index}].max_model_len", None, message)


def key_of_endpoint(config: Config) -> str:
    """The key of the external model, "" if it needs none. Raises TrinityError if its variable is not set."""
    external = config.explorer.external_model
    return key_in(config, external.api_key_env if external else None, f"{EXTERNAL}.api_key_env")


def key_in(config: Config, name: str | None, where: str) -> str:
    """The key in the variable that `where` names, "" without a name. Raises TrinityError if it is not set."""
    if not name:
        return ""
    key = config.explorer.env_vars.get(name) or os.environ.get(name, "")
    if not key.strip():
        raise TrinityError(f"The environment variable {name}, which {where} names, is not set.")
    return key.strip()


def is_http(url: str) -> bool:
    """Whether a text is the URL of an HTTP server."""
    try:
        parts = urlsplit(url)
        return parts.scheme in ("http", "https") and bool(parts.hostname) and (parts.port or 1) > 0
    except ValueError:
        return False


def _no_address(url: str) -> str:
    """Why a URL is not the address of an API, or an empty string. The URL is not shown: it may hold a password."""
    if not is_http(url):
        return "must be the address of an OpenAI-compatible API, such as https://api.openai.com/v1."
    parts = urlsplit(url)
    if parts.username or parts.password or parts.query or parts.fragment:
        return "must hold no credentials and nothing after the path; name the key's variable in api_key_env."
    return ""
