"""Loads a configuration with the user's plugins, and checks its names and databases."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

from trinity_core.base.errors import InputError
from trinity_core.config import Config, config_from_dict, load_config, store_url
from trinity_core.config.algorithm_types import ALGORITHMS
from trinity_core.config.findings import Finding, Report
from trinity_core.config.load import escaped
from trinity_core.config.types import Section
from trinity_core.exchange.store import database
from trinity_core.exchange.tracking import mlflow_writer
from trinity_core.pipelines.named_parts import check_names
from trinity_core.workflows import load_plugins

STORE = "buffer.trainer_input.experience_buffer.path"
NAMES_STORE = (STORE, "buffer.trainer_input.experience_buffer.storage_type", "algorithm.algorithm_type", "mode")
"""Keys that decide whether `path` is the path of a store."""
OF_THE_RUN = {"project", "name", "mode", "checkpoint_root_dir", "continue_from_checkpoint"}
"""Settings that decide which run it is."""
MLFLOW = "monitor.monitor_args.uri"


def load_checked(
    path: Path | str, overrides: Sequence[str] = (), more: Callable[[Config, Report], None] | None = None
) -> Config:
    """Like `load_config`, with the user's modules loaded, so that the names they register are known.

    Experience store and MLflow databases that do not work on this machine are also refused. `more` may report further
    findings about each stage.
    """

    def check(config: Config, report: Report) -> Config:
        typed = _checked(config, report)
        if more is not None:
            more(typed, report)
        return typed

    return load_config(path, overrides, load_plugins, check)


def with_settings(config: Config, overrides: Sequence[str]) -> Config:
    """Return the configuration of one stage with other settings, checked as when it is loaded.

    What its start has assigned, such as the previous stage's model, stays. Raises ConfigError with every problem, and
    InputError for a setting that names another run.
    """
    if not overrides:
        return config
    tree = escaped(config.given)
    before, after = (config_from_dict(tree, part, load_plugins, _checked) for part in ((), overrides))
    changed = dict(_differing(before, after))
    if fixed := sorted(changed.keys() & OF_THE_RUN):
        raise InputError(f"{', '.join(fixed)} cannot be changed: it would be another run", key=fixed[0])
    return config.with_values(changed)


def _differing(before: Section, after: Section, above: str = "") -> Iterator[tuple[str, Any]]:
    """Yield dotted key and new value of each setting whose value differs."""
    for name, value in after:
        old, key = getattr(before, name), f"{above}{name}"
        if isinstance(value, Section) and isinstance(old, Section):
            yield from _differing(old, value, f"{key}.")
        elif value != old:
            yield key, value


def start_from(config: Config, model_path: str) -> Config:
    """Return the configuration of a stage that starts from `model_path`; a critic with its own model keeps it.

    An initial adapter configured for all stages is dropped, because it is already merged into that model; a stage's own
    adapter stays.
    """
    model = config.model
    if model.lora is not None and not config.written_by_stage("model.lora_configs"):
        config = config.with_values({"model.lora_configs": (model.lora.with_values({"path": None}),)})
    critic = model_path if model.critic_model_path == model.model_path else model.critic_model_path
    return config.with_values({"model.model_path": model_path, "model.critic_model_path": critic})


def _checked(config: Config, report: Report) -> Config:
    typed = check_names(config, report)
    _check_databases(typed, report)
    return typed


def _check_databases(config: Config, report: Report) -> None:
    algorithm_type = ALGORITHMS.get(config.algorithm.algorithm_type)
    uses_store = config.mode != "bench" and algorithm_type is not None and algorithm_type.uses_rollouts
    if uses_store and not report.touched(NAMES_STORE):
        _check_store(config, report)
    uri = config.monitor.monitor_args.get("uri")
    if config.monitor.monitor_type == "mlflow" and (fault := mlflow_writer.fault_of(uri, config.checkpoint_root_dir)):
        report.add(Finding(MLFLOW, uri, "unavailable", fault))


def _check_store(config: Config, report: Report) -> None:
    path, url = config.buffer.trainer_input.experience_buffer.path, store_url(config)
    if fault := database.fault_of(url):
        report.add(Finding(STORE, path, "unavailable", fault))
    elif config.cluster.node_num > 1 and database.is_of_one_machine(url):
        message = "must be a database server's on several nodes: write postgresql://user:password@host/database."
        report.add(Finding(STORE, path, "conflict", message, ("cluster.node_num",)))
