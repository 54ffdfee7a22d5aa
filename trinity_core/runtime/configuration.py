"""Loading a configuration with the user's plugins and checking every name in it; starting from another model."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from trinity_core.config import Config, load_config
from trinity_core.pipelines.checks import check_names, typed_arguments
from trinity_core.workflows import load_plugins


def load_checked(path: Path | str, overrides: Sequence[str] = ()) -> Config:
    """`load_config` with the user's modules loaded, so that the names they bring are known and all others refused."""
    return typed_arguments(load_config(path, overrides, load_plugins, check_names))


def start_from(config: Config, model_path: str) -> Config:
    """The configuration of a stage that begins with the model of the stage before."""
    return config.with_values({"model.model_path": model_path, "model.critic_model_path": model_path})
