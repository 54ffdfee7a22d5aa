"""Measured paces, kept in the user's cache folder: one file for each machine and each thing that changes the speed."""

from __future__ import annotations

import hashlib
import json
import logging
import os
from dataclasses import asdict
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

from pydantic import TypeAdapter, ValidationError

from trinity_core.config import Config, public_dict
from trinity_core.files import clear_errors, read_json, write_json
from trinity_core.local_paths import expanded
from trinity_core.runtime.calibration.pace import Pace
from trinity_core.runtime.calibration.trial import trial_of
from trinity_core.runtime.gpus import survey

log = logging.getLogger(__name__)

PACKAGES = ("trinity-flows", "torch", "vllm", "deepspeed", "transformers")
NAMES = ("project", "name", "group", "ray_namespace")
"""Settings that change nothing but what a run is called. Those that `trial_of` sets do not count either."""
PACE = TypeAdapter(Pace)


def folder() -> Path:
    """Where paces are kept: `trinity-flows/paces` below $XDG_CACHE_HOME or ~/.cache."""
    base = Path(os.environ.get("XDG_CACHE_HOME") or expanded("~/.cache"))
    return base / "trinity-flows" / "paces"


def make_folder() -> None:
    """Make the folder for paces. Raises TrinityError where that is refused."""
    with clear_errors("making", folder(), "choose another folder with XDG_CACHE_HOME"):
        folder().mkdir(parents=True, exist_ok=True)


def kept_at(config: Config) -> Path:
    """The file of a stage's pace on this machine."""
    settings = public_dict(trial_of(config, Path()))
    facts = {
        "settings": {name: value for name, value in settings.items() if name not in NAMES},
        "model": _shape(Path(config.model.model_path)),
        "machine": machine(),
        "packages": {name: _version(name) for name in PACKAGES},
    }
    digest = hashlib.sha256(json.dumps(facts, sort_keys=True, default=str).encode()).hexdigest()
    return folder() / f"{digest[:16]}.json"


def kept_pace(config: Config) -> Pace | None:
    """The pace of a stage on this machine; None without one, or, with a warning, if it is damaged."""
    path = kept_at(config)
    try:
        found = read_json(path)
        return PACE.validate_python(found) if found else None
    except (OSError, ValidationError) as error:
        log.warning("The pace in %s cannot be read and is taken as not measured: %s", path, error)
        return None


def keep(config: Config, pace: Pace) -> None:
    """Keep a stage's pace. Raises OSError."""
    make_folder()
    write_json(kept_at(config), asdict(pace))


def machine() -> dict[str, object]:
    """What of this machine decides how fast it is."""
    lines = Path("/proc/cpuinfo").read_text(errors="replace").splitlines() if Path("/proc/cpuinfo").exists() else []
    models = sorted({line.partition(":")[2].strip() for line in lines if line.startswith("model name")})
    return {
        "processors": models,
        "cpus": len(os.sched_getaffinity(0)),
        "gpus": sorted(gpu.uuid for gpu in survey()),
    }


def _shape(model: Path) -> str:
    """The text of its config.json; empty for a model that is not there yet, or is on the hub."""
    path = model / "config.json"
    return path.read_text() if path.is_file() else ""


def _version(package: str) -> str:
    try:
        return version(package)
    except PackageNotFoundError:
        return ""
