"""Parameters: flat, and without secrets."""

from __future__ import annotations

from trinity_core.config.public import MASK, without_secrets
from trinity_core.tracking.params import flatten


def test_flat_names() -> None:
    config = {"a": {"b": 1, "c": None, "d": []}, "betas": [0.9, 0.99], "sets": [{"name": "x"}], "on": False}
    assert flatten(config) == {"a.b": "1", "betas": "[0.9, 0.99]", "sets.0.name": "x", "on": "False"}


def test_secrets_are_masked_but_token_limits_are_not() -> None:
    config = {
        "monitor_args": {"api_key": "k", "password": "p", "username": "u", "credentials": {"id": "i"}},
        "explorer": {"env_vars": {"PGPASSWORD": "p", "OPENAI_KEY": "k", "GITHUB_PAT": "t", "DB_PWD": "p", "EMPTY": ""}},
        "max_response_tokens": 16,
        "max_token_len_per_gpu": 3,
        "path": "postgresql://me:hid/den@host/db",
    }
    assert without_secrets(config) == {
        "monitor_args": {"api_key": MASK, "password": MASK, "username": "u", "credentials": MASK},
        "explorer": {
            "env_vars": {**dict.fromkeys(["PGPASSWORD", "OPENAI_KEY", "GITHUB_PAT", "DB_PWD"], MASK), "EMPTY": ""}
        },
        "max_response_tokens": 16,
        "max_token_len_per_gpu": 3,
        "path": f"postgresql://me:{MASK}@host/db",
    }
