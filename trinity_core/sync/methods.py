"""From the name of a sync method to the weight versions of a run. No other module of this package imports this one."""

from __future__ import annotations

from pathlib import Path
from pkgutil import resolve_name

from trinity_core.config import Config
from trinity_core.config.sync_methods import SYNC_METHODS
from trinity_core.errors import TrinityError
from trinity_core.sync.versions import WeightVersions


def versions_class(method: str) -> type[WeightVersions]:
    """The class that implements a `synchronizer.sync_method`. Raises `TrinityError` for an unknown name."""
    if method not in SYNC_METHODS:
        *others, last = SYNC_METHODS
        raise TrinityError(f"synchronizer.sync_method {method!r} is unknown; choose {', '.join(others)} or {last}")
    found = resolve_name(SYNC_METHODS[method].implementation)
    assert isinstance(found, type) and issubclass(found, WeightVersions), SYNC_METHODS[method].implementation
    return found


def open_versions(method: str, job_dir: Path | str) -> WeightVersions:
    """The versions that the run in `job_dir` publishes by `method`. Nothing is read or written yet."""
    return versions_class(method).open(Path(job_dir))


def run_versions(config: Config) -> WeightVersions:
    """The versions of the run that `config` (resolved) describes."""
    return open_versions(config.synchronizer.sync_method, config.job_dir)
