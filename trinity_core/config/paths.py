"""Where a run keeps its experiences, and by which names its engines are found."""

from __future__ import annotations

from pathlib import PurePosixPath

from trinity_core.config.schema import Config

DEFAULT_DATABASE = "explorer_output.db"


def store_url(config: Config) -> str:
    """The URL of the run's experience store.

    A relative SQLite path lies in the run's `buffer` folder. A `path` that is no database (the data set of a supervised
    run, a JSON backup) leaves the default, `explorer_output.db`.
    """
    path = config.buffer.trainer_input.experience_buffer.path or ""
    folder = config.job_dir / "buffer"
    if "://" in path and not path.startswith("sqlite"):
        return path
    name = path.removeprefix("sqlite:///") if path.startswith("sqlite:///") else path
    if not path.startswith("sqlite:///") and PurePosixPath(path).suffix not in (".db", ".sqlite", ".sqlite3"):
        name = DEFAULT_DATABASE
    return f"sqlite:///{folder / (name or DEFAULT_DATABASE)}"


def engine_name(config: Config, index: int) -> str:
    """The name of the policy's engine `index` among the actors of the run."""
    return f"{config.name}/engine_{index}"
