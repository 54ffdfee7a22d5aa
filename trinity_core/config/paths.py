"""Where a run reads and writes: its experience store, its files, its task pipeline's output, its actors' names."""

from __future__ import annotations

import os
from pathlib import Path, PurePosixPath
from typing import Any
from urllib.parse import quote

from trinity_core.base.errors import TrinityError
from trinity_core.base.files import expanded
from trinity_core.config.schema import Config, ExperienceBufferConfig, TasksetConfig
from trinity_core.config.types import SEVERAL

STORE_BACKENDS: dict[str, str] = {
    "sqlite": "trinity_core.exchange.store.sqlite:SQLite",
    "postgresql": "trinity_core.exchange.store.postgresql:PostgreSQL",
}
"""Scheme (without a driver, as in `postgresql+psycopg`) → `module:class` of its `store.backend.StoreBackend`."""
DEFAULT_DATABASE = "explorer_output.db"
DEFAULT_QUEUE = "tasks.db"
DATABASES = (".db", ".sqlite", ".sqlite3")
BACKUPS = (".json", ".jsonl")
PIPELINE = "data_processor.task_pipeline"
SPLITS = ("train", "test")


def store_url(config: Config) -> str:
    """Return the URL of the run's experience store, never that of a data set. Raises TrinityError if `path` is no
    store's."""
    buffer = config.buffer.trainer_input.experience_buffer
    has_path = buffer.storage_type in ("queue", "sql") and not is_backup(buffer) and not config.is_supervised
    return database_url(buffer.path if has_path else None, config.job_dir / "buffer")


def explored_file(config: Config) -> Path | None:
    """Return the JSON lines file that a standalone explorer writes in addition to the store; None unless `storage_type`
    is `file`.

    `path` names the file, or a folder in which the file is named after the explorer.
    """
    buffer = config.buffer.trainer_input.experience_buffer
    if config.mode != "explore" or buffer.storage_type != "file":
        return None
    return _lines_file(config, buffer.path, "explored")


def operator_input_file(config: Config) -> Path | None:
    """Return the JSON lines file for the input of the experience operators; None unless it is saved."""
    pipeline = config.data_processor.experience_pipeline
    if not config.explores:
        return None
    is_saved = bool(pipeline.input_save_path) if pipeline.save_input is None else pipeline.save_input
    return _lines_file(config, pipeline.input_save_path, "operator-input") if is_saved else None


def api_address_file(config: Config) -> Path:
    """Return the file with the address and key of the explorer's OpenAI API. Only its owner may read it."""
    return config.job_dir / f"openai_api-{config.explorer.name}.json"


def _lines_file(config: Config, configured: str | None, kind: str) -> Path:
    """Return an explorer's file, configured as a path, as a folder, or not at all."""
    name = f"{quote(config.explorer.name, safe='')}.jsonl"
    if not configured:
        return config.job_dir / "buffer" / f"{kind}-{name}"
    path = expanded(configured).absolute()
    return path if path.suffix in BACKUPS else path / name


def database_url(path: str | None, folder: Path) -> str:
    """Return the URL of the store at `path` for a run with this `buffer` folder.

    Raises TrinityError if `path` is no store's. A relative SQLite file is in that folder, so that two runs never share
    a store by accident.
    """
    if not path:
        return f"sqlite:///{folder / DEFAULT_DATABASE}"
    if wrong := no_database(path):
        key = "buffer.trainer_input.experience_buffer.path"
        raise TrinityError(f"{key} {wrong}", key=key)
    if _scheme(path) not in ("", "sqlite"):
        return path
    return f"sqlite:///{folder / expanded(path.removeprefix('sqlite:///') or DEFAULT_DATABASE)}"


def task_queue_path(config: Config, taskset: TasksetConfig) -> Path:
    """Return the SQLite file of a task set with `storage_type: queue`; relative paths start in the run's buffer
    folder."""
    return config.job_dir / "buffer" / expanded(taskset.path.removeprefix("sqlite:///") or DEFAULT_QUEUE)


def no_database(path: str) -> str:
    """Return why a path cannot be a store's, or "". A password in the path is not shown."""
    scheme, is_url, rest = path.partition("://")
    if _scheme(path) != "sqlite" and _scheme(path) in STORE_BACKENDS:
        return ""
    if scheme == "sqlite" and rest.startswith("/") and rest != "/:memory:":
        return ""
    if not is_url and PurePosixPath(path).suffix in DATABASES:
        return ""
    shown = f"{scheme}://…" if is_url else path
    return (
        f"must be a database, not '{shown}': write postgresql://user:password@host/database, or sqlite:///name.db for "
        "a file (sqlite:////folder/name.db for one outside of the run's buffer folder)."
    )


def _scheme(path: str) -> str:
    """Return the scheme of a database URL without its driver; "" for a plain path."""
    scheme, is_url, _ = path.partition("://")
    return scheme.partition("+")[0] if is_url else ""


def is_backup(buffer: ExperienceBufferConfig) -> bool:
    """True if `path` is a queue's JSON backup, which is not needed because the store is on disk."""
    return buffer.storage_type == "queue" and PurePosixPath(buffer.path or "").suffix in BACKUPS


def engine_name(config: Config, index: int) -> str:
    return f"{actor_prefix(config)}/engine_{index}"


def trainer_name(config: Config, rank: int) -> str:
    return f"{config.name}/{config.trainer.name}_{rank}"


def actor_prefix(config: Config) -> str:
    """Return the explorer's Ray name, the prefix of its engines' names. An evaluation of the run has another one."""
    evaluation = "/evaluation" if config.mode == "bench" else ""
    return f"{config.name}{evaluation}/{config.explorer.name}"


def reads_output(config: Config, taskset: TasksetConfig) -> bool:
    """True if a task set of this configuration reads the output: one without a path, or, if all have one, one with only
    inputs."""
    pipeline = config.data_processor.task_pipeline
    if pipeline is None or taskset.storage_type == "queue":
        return False
    explorer_input = config.buffer.explorer_input
    if any(not other.path and other.storage_type != "queue" for other in explorer_input.all_tasksets):
        return not taskset.path
    return taskset in explorer_input.tasksets and not other_paths(config, taskset)


def other_paths(config: Config, taskset: TasksetConfig) -> list[str]:
    """Return the paths of a task set that are not among the pipeline's inputs."""
    pipeline = config.data_processor.task_pipeline
    inputs = {Path(path) for path in pipeline.inputs} if pipeline else set()
    return [path for path in taskset.path.split(SEVERAL) if Path(path) not in inputs]


def uses_pipeline(config: Config) -> bool:
    """True if a task set of this run reads the output."""
    explorer_input = config.buffer.explorer_input
    explores = config.mode in ("both", "explore")
    asked = explorer_input.all_tasksets if explores else explorer_input.eval_tasksets
    return config.mode != "train" and any(reads_output(config, taskset) for taskset in asked)


def curated_folder(config: Config) -> str | None:
    """Return the folder of the output that the run's task sets read, named by its fingerprint; None if none does."""
    if config.data_processor.task_pipeline is None:
        return None
    root, paths = output_root(config), (taskset.path for taskset in config.buffer.explorer_input.all_tasksets)
    return next((path for path in paths if path and Path(path).parent == root), None)


def output_root(config: Config) -> Path:
    pipeline = config.data_processor.task_pipeline
    assert pipeline is not None, "only a configuration with a task pipeline has its output"
    path = pipeline.output.path
    return expanded(path).absolute() if path else config.job_dir.parent / "curated_tasks"


def normalised(value: Any) -> Any:
    """Make equal numbers (1024 and 1024.0) the same, and existing paths absolute, with links followed."""
    if isinstance(value, dict):
        return {name: normalised(item) for name, item in value.items()}
    if isinstance(value, list | tuple):
        return [normalised(item) for item in value]
    if isinstance(value, str):
        path = expanded(value)
        return os.path.realpath(path) if value and os.path.exists(path) else value  # noqa: PTH110 - raises if too long
    return int(value) if isinstance(value, float) and value.is_integer() else value
