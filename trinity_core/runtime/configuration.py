"""Loading a configuration with the user's plugins and checking every name in it."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from trinity_core.config import Config, load_config
from trinity_core.pipelines.checks import check_names, typed_arguments
from trinity_core.workflows import load_plugins


def load_checked(path: Path | str, overrides: Sequence[str] = ()) -> Config:
    """`load_config` with the user's modules loaded, so that the names they bring are known and all others refused."""
    return typed_arguments(load_config(path, overrides, load_plugins, check_names))
