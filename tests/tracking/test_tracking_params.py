"""Parameters: flat, and without secrets."""

from __future__ import annotations

from trinity_core.config.secrets import MASK, without_secrets
from trinity_core.exchange.tracking.writers import flatten


def test_flat_names() -> None:
    config = {"a": {"b": 1, "c": None, "d": []}, "betas": [0.9, 0.99], "sets": [{"name": "x"}], "on": False}
    assert flatten(config) == {"a.b": 1, "betas": [0.9, 0.99], "sets.0.name": "x", "on": False}


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


def test_the_environment_of_a_command_is_masked_and_names_are_not() -> None:
    """Also where a name says nothing; `secrets` holds names of variables, not their values."""
    args = {"command": "agent", "env": {"SEARCH_PAT": "p", "EMPTY": ""}, "secrets": ["SEARCH_KEY"], "api_key": "k"}
    masked = {"command": "agent", "env": {"SEARCH_PAT": MASK, "EMPTY": ""}, "secrets": ["SEARCH_KEY"], "api_key": MASK}
    assert without_secrets({"tasksets": [{"workflow_args": args}]}) == {"tasksets": [{"workflow_args": masked}]}
    assert without_secrets({"workflow_args": {"env": "maze", "secrets": "x"}, "secrets": ["x"]}) == {
        "workflow_args": {"env": "maze", "secrets": MASK},
        "secrets": MASK,
    }


def test_spellings_of_secrets_are_masked() -> None:
    secrets = {
        "extra_headers": {"Authorization": "Bearer sk-abc", "X-Api-Key": "k"},
        **dict.fromkeys(["Authorization", "X-Api-Key", "apiKey", "api_keys", "private_key", "access_key", "key"], "k"),
        "HF_TOKEN": "t",
    }
    assert without_secrets(secrets) == dict.fromkeys(secrets, MASK)
    kept = {"prompt_key": "question", "token_level": "x", "key_bindings": "y", "monkey": "z", "max_tokens": "4"}
    kept["api_key_env"] = "OPENAI_API_KEY"
    assert without_secrets(kept) == kept
    assert without_secrets({"api_key_env": "sk-abc"}) == {"api_key_env": MASK}, "a key where its name should stand"
    url = "https://host/v1?api_key=abc&n=1"
    assert without_secrets({"url": url}) == {"url": url.replace("abc", MASK)}
