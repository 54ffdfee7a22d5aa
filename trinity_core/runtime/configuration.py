"""Loading a configuration with the user's plugins, checking every name in it and the store; another model's start."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from trinity_core.config import Config, load_config, store_url
from trinity_core.config.problems import Report
from trinity_core.pipelines.checks import check_names, typed_arguments
from trinity_core.store.database import fault_of
from trinity_core.workflows import load_plugins

STORE = "buffer.trainer_input.experience_buffer.path"


def load_checked(path: Path | str, overrides: Sequence[str] = ()) -> Config:
    """`load_config` with the user's modules loaded, so that the names they bring are known and all others refused.

    Refused is also an experience store that does not work on this machine.
    """
    return typed_arguments(load_config(path, overrides, load_plugins, _check))


def start_from(config: Config, model_path: str) -> Config:
    """The configuration of a stage that begins with the model of the stage before."""
    return config.with_values({"model.model_path": model_path, "model.critic_model_path": model_path})


def _check(config: Config, report: Report) -> None:
    check_names(config, report)
    uses_store = config.mode != "bench" and config.algorithm_type.uses_rollouts and not report.touched([STORE])
    if uses_store and (fault := fault_of(store_url(config))):
        report.add(STORE, config.buffer.trainer_input.experience_buffer.path, fault)
