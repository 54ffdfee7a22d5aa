"""MLflow's default store, which stands in a checkpoint root and follows it when it is moved."""

from __future__ import annotations

import os
import re
import sqlite3
from contextlib import closing
from pathlib import Path
from urllib.parse import quote, unquote, urlencode

from trinity_core.base.addresses import page_address
from trinity_core.base.files import private_file, read_json

LOCK, LOCK_SECONDS = ".mlflow.lock", 180.0
"""File in a checkpoint root with which one process at a time opens the store, and how long others wait."""
WAIT_SECONDS = 60.0
"""Time for another process to finish writing to the store."""
ADDRESSES = {
    "experiments": ("artifact_location",),
    "runs": ("artifact_uri",),
    "logged_models": ("artifact_location",),
    "logged_model_params": ("param_value",),
    "model_versions": ("source", "storage_location"),
    "trace_tags": ("value",),
    "tags": ("value",),
}
"""Tables of MLflow's store and their columns with addresses and paths, all of them absolute."""


def follow_moved_root(root: Path) -> None:
    """Make the default store of a checkpoint root that was moved or copied name the folders in its new place.

    A root that stands where it did, and has no database of its own, uses this store by its `monitor_args.uri`.
    """
    with closing(sqlite3.connect(root / "mlflow.db", timeout=WAIT_SECONDS)) as database, database:
        locations = [location for (location,) in database.execute("SELECT artifact_location FROM experiments")]
        found = {match[1] for location in locations if (match := re.match(r"file://(.+)/mlflow_artifacts\b", location))}
        for quoted in found - {root.as_uri().removeprefix("file://")}:
            old = Path(unquote(quoted))
            # A root that is closed to this user, such as the original of a copy, is no root of theirs.
            if os.access(artifact_folder(old), os.F_OK) and not os.access(old / "mlflow.db", os.F_OK):
                continue
            for old_prefix, new_prefix in ((f"file://{quoted}/", f"{root.as_uri()}/"), (f"{old}/", f"{root}/")):
                for table, columns in ADDRESSES.items():
                    for column in columns:
                        database.execute(
                            f"UPDATE {table} SET {column} = :after || substr({column}, :length + 1) "  # noqa: S608
                            f"WHERE substr({column}, 1, :length) = :before",
                            {"before": old_prefix, "after": new_prefix, "length": len(old_prefix)},
                        )


def make_database(file: Path) -> None:
    """Create a SQLite store with MLflow's tables, unless there is one. Only one process may do so at a time.

    It is created under another name: MLflow could never open a store whose process ended within its many migrations.
    """
    if file.exists() and file.stat().st_size:
        return
    from mlflow.store.db.utils import _initialize_tables, create_sqlalchemy_engine

    new = file.with_name(f".{file.name}.new")
    new.unlink(missing_ok=True)
    private_file(new)
    engine = create_sqlalchemy_engine(f"sqlite:///{new}")
    _initialize_tables(engine)
    engine.dispose()
    new.replace(file)


def default_uri(checkpoint_root_dir: Path | str) -> str:
    return f"sqlite:///{Path(checkpoint_root_dir).absolute()}/mlflow.db"


def mlflow_address(checkpoint_root_dir: Path, uri: str) -> str:
    """Return the address where `trinity up`, which serves the default store, serves the store `uri`, or ""."""
    return page_address(checkpoint_root_dir, "mlflow") if uri == default_uri(checkpoint_root_dir) else ""


def artifact_folder(checkpoint_root_dir: Path) -> Path:
    return checkpoint_root_dir.absolute() / "mlflow_artifacts"


def newest_charts(checkpoint_root_dir: Path) -> str:
    """Return the path of MLflow's page with the charts of the newest run's experiment, or with the list of experiments
    before the first run.

    Sorted by `attributes.start_time`, as by default, MLflow's page hides a pipeline's stages; sorted by another name of
    the same attribute it shows them.
    """
    notes = sorted(checkpoint_root_dir.glob("*/*/monitor/mlflow.json"), key=lambda note: note.stat().st_mtime)
    ids = (read_json(note).get("experiment_id") for note in reversed(notes) if os.access(note, os.R_OK))
    newest = next(filter(None, ids), None)
    query = {"workflowType": "machine_learning"}
    if newest:
        query |= {"compareRunsMode": "CHART", "orderByKey": "attributes.`Created`", "orderByAsc": "false"}
    return f"/#/experiments{f'/{quote(newest)}/runs' if newest else ''}?{urlencode(query)}"
