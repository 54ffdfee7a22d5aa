"""The champion of a project: the model that passed the gate last. `<checkpoint_root_dir>/<project>/champions.json` has
every promotion and every step back, oldest first; MLflow's alias `champion` follows it.
"""

from __future__ import annotations

import json
import logging
import time
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

from trinity_core.base.errors import DataError, TransientFault, TrinityError
from trinity_core.base.files import from_record, write_json
from trinity_core.base.layout import now_at, run_of
from trinity_core.base.runlock import one_at_a_time
from trinity_core.config import Config
from trinity_core.exchange.tracking.mlflow_facts import registered_name
from trinity_core.exchange.tracking.mlflow_root import default_uri

log = logging.getLogger(__name__)
CHAMPION = "champion"
GATE, BACK = "gate", "back"


@dataclass(frozen=True, slots=True)
class Champion:
    """An entry of the file: the champion from `time` on."""

    model: str
    """Its Hugging Face folder."""
    by: str
    """`gate`, or `back` for a step back to an earlier champion."""
    time: float
    """Unix seconds."""
    evidence: Mapping[str, Any] = field(default_factory=dict)
    """What the gate found."""


def champions_file(project_dir: Path) -> Path:
    return project_dir / "champions.json"


def history(project_dir: Path) -> list[Champion]:
    """Return all entries, oldest first, with the models where they are now. Raises DataError if the file is damaged."""
    path = champions_file(project_dir)
    if not path.exists():
        return []
    try:
        entries = [from_record(Champion, {**entry}, path) for entry in json.loads(path.read_text())["champions"]]
        return [replace(entry, model=now_at(entry.model, project_dir.parent)) for entry in entries]
    except (ValueError, KeyError, TypeError):
        raise DataError(f"{path} is damaged: restore it, or remove it if the project has no champion") from None


def champion_steps(job_dir: Path) -> set[int]:
    """Return the steps of a run whose checkpoints are the project's champion or the one before it."""
    models = [run_of(entry.model) for entry in _line(history(job_dir.parent))[-2:]]
    return {step for folder, step in models if folder is not None and folder.resolve() == job_dir.resolve()}


def _line(entries: Sequence[Champion]) -> list[Champion]:
    """Return the promotions that no step back has undone."""
    line: list[Champion] = []
    for entry in entries:
        line = [*line, entry] if entry.by == GATE else line[:-1]
    return line


def champion(project_dir: Path) -> Champion | None:
    """Return the present champion; None before the first promotion."""
    entries = history(project_dir)
    return entries[-1] if entries else None


def promote(project_dir: Path, model: str, before: str | None, evidence: Mapping[str, Any]) -> Champion:
    """Make `model` the champion in place of `before`. Raises TrinityError if that is no longer the champion."""
    with one_at_a_time(champions_file(project_dir).with_suffix(".lock")):
        entries = history(project_dir)
        present = entries[-1].model if entries else None
        if present != before:
            raise TrinityError(
                f"{present} became the champion of {project_dir.name} while the gate compared with {before or 'none'}: "
                "run the gate again"
            )
        return _append(project_dir, entries, Champion(model, GATE, time.time(), evidence))


def go_back(project_dir: Path) -> Champion:
    """Make the champion before the present one the champion again. Raises TrinityError if there was none."""
    with one_at_a_time(champions_file(project_dir).with_suffix(".lock")):
        entries = history(project_dir)
        if len(line := _line(entries)) < 2:
            raise TrinityError(f"{project_dir.name} has no earlier champion: {len(line)} model(s) passed its gate")
        return _append(project_dir, entries, Champion(line[-2].model, BACK, time.time()))


def _append(project_dir: Path, entries: list[Champion], entry: Champion) -> Champion:
    write_json(champions_file(project_dir), {"champions": [asdict(item) for item in [*entries, entry]]})
    return entry


def point_alias(config: Config, entry: Champion) -> str:
    """Point MLflow's alias at the champion, as a version of the project's registered model; return `model/version`.

    Returns "" with another tracking system, and with a warning if MLflow is away: the file is what counts.
    """
    if config.monitor.monitor_type != "mlflow":
        return ""
    from mlflow.exceptions import MlflowException

    from trinity_core.exchange.tracking.mlflow_writer import open_client

    root, arguments = config.job_dir.parent.parent, config.monitor.monitor_args
    uri = arguments.get("uri") or default_uri(root)
    name, folder = registered_name(config.project), Path(entry.model)
    try:
        client = open_client(uri, arguments.get("username"), arguments.get("password"), root)
        if not client.search_registered_models(f"name = '{name}'"):
            client.create_registered_model(name, tags={"project": config.project})
        source = folder.absolute().as_uri() if folder.exists() else entry.model
        versions = [one for one in client.search_model_versions(f"name = '{name}'") if one.source == source]
        run, step = run_of(folder)
        tags = {"run": run.name, "step": str(step)} if run is not None else {"run": "", "step": ""}
        version = versions[0] if versions else client.create_model_version(name, source, tags=tags)
        client.set_registered_model_alias(name, CHAMPION, version.version)
    except (MlflowException, OSError, TrinityError, TransientFault) as error:
        log.warning("MLflow's alias %r does not follow the champion %s: %s", CHAMPION, entry.model, error)
        return ""
    return f"{name}/{version.version}"
