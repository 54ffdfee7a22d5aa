"""Loads a configuration with the user's plugins, and checks its names and databases."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path

from trinity_core.config import Config, load_config, store_url
from trinity_core.config.algorithm_types import ALGORITHMS
from trinity_core.config.findings import Finding, Report
from trinity_core.exchange.store import database
from trinity_core.exchange.tracking import mlflow_writer
from trinity_core.pipelines.named_parts import check_names
from trinity_core.workflows import load_plugins

STORE = "buffer.trainer_input.experience_buffer.path"
NAMES_STORE = (STORE, "buffer.trainer_input.experience_buffer.storage_type", "algorithm.algorithm_type", "mode")
"""Keys that decide whether `path` is the path of a store."""
MLFLOW = "monitor.monitor_args.uri"


def load_checked(
    path: Path | str, overrides: Sequence[str] = (), more: Callable[[Config, Report], None] | None = None
) -> Config:
    """Like `load_config`, with the user's modules loaded, so that the names they register are known.

    Experience store and MLflow databases that do not work on this machine are also refused. `more` may report further
    findings about each stage.
    """

    def check(config: Config, report: Report) -> Config:
        typed = check_names(config, report)
        _check_databases(typed, report)
        if more is not None:
            more(typed, report)
        return typed

    return load_config(path, overrides, load_plugins, check)


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
