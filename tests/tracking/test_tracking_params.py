"""Parameters: flat, and without secrets."""

from __future__ import annotations

from trinity_core.tracking.params import MASK, flatten, mask


def test_flat_names() -> None:
    config = {"a": {"b": 1, "c": None, "d": []}, "betas": [0.9, 0.99], "sets": [{"name": "x"}], "on": False}
    assert flatten(config) == {"a.b": "1", "betas": "[0.9, 0.99]", "sets.0.name": "x", "on": "False"}


def test_secrets_are_masked_and_limits_of_tokens_are_not() -> None:
    config = {
        "monitor_args": {"api_key": "k", "password": "p", "username": "u"},
        "env_vars": {"HF_TOKEN": "t", "OPENAI_API_KEY": "k"},
        "max_response_tokens": 16,
        "max_token_len_per_gpu": 3,
        "path": "postgresql://me:hidden@host/db",
    }
    assert mask(config) == {
        "monitor_args": {"api_key": MASK, "password": MASK, "username": "u"},
        "env_vars": {"HF_TOKEN": MASK, "OPENAI_API_KEY": MASK},
        "max_response_tokens": 16,
        "max_token_len_per_gpu": 3,
        "path": f"postgresql://me:{MASK}@host/db",
    }
