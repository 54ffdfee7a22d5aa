"""Settings that the explorers and the trainer of a run must share, since each may be its own run with its own file.

Each records its settings next to its lock, and compares them with those of the other active parts.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from sqlalchemy import make_url

from trinity_core.config import Config, store_url
from trinity_core.config.sync_schedule import SyncSchedule
from trinity_core.data.lengths import rollouts_taken
from trinity_core.errors import TrinityError
from trinity_core.files import read_json, write_json
from trinity_core.runlock import RUN_TRAINS, is_held, release
from trinity_core.runtime.nodes import software

RECORD = ".settings.json"
"""Suffix of a record's name, after a dot and the name of the lock."""
SOFTWARE = "software"
OTHER_SOFTWARE = "%s, which is at work on the same run, has other software: %s. Update all parts of a run together"
log = logging.getLogger(__name__)


def shared_settings(config: Config) -> dict[str, Any]:
    """Return the settings that must agree, by key.

    All others may differ, such as an explorer's batch size, time limits, and how often it looks for weights. With
    `max_staleness` an explorer also computes when the trainer publishes.
    """
    sync, lora = config.synchronizer, config.engine_adapter
    modules = " ".join(sorted(lora.target_modules)) if lora is not None else ""
    settings: dict[str, Any] = {
        "buffer.trainer_input.experience_buffer.path": _database(store_url(config)),
        "synchronizer.sync_method": sync.sync_method,
        "model.lora_configs": None if lora is None else f"rank {lora.lora_rank} of {modules}",
        "synchronizer.max_staleness": sync.max_staleness,
    }
    if sync.max_staleness is None:
        return settings
    settings |= {"synchronizer.sync_style": sync.style, "rollouts of a buffer.train_batch_size": rollouts_taken(config)}
    every = {"synchronizer.sync_interval": SyncSchedule.of(config).interval}
    return settings | ({} if sync.style == "explorer_driven" else every)


def check_shared_settings(config: Config, locks: Sequence[str]) -> None:
    """Record a run's settings and software, and compare them with those of other active parts.

    The run holds `locks`, which are released on an error. Different software causes a warning, different settings a
    TrinityError. Settings of parts that have ended do not count, because their files may have changed.
    """
    mine, own = shared_settings(config), software(str(config.plugin_dir or ""))
    for lock in locks:
        write_json(_record(config.job_dir, lock), mine | {SOFTWARE: own}, durable=False)
    for path in sorted(config.job_dir.glob(f".*{RECORD}")):
        other = path.name[1:].removesuffix(RECORD)
        if other in locks or not is_held(config.job_dir, other):
            continue
        theirs = read_json(path) or {}
        differ = [
            f"{key} ({mine[key]} and {theirs[key]})" for key in mine if key in theirs and mine[key] != theirs[key]
        ]
        if differ:
            for lock in locks:
                release(config.job_dir, lock)
            raise TrinityError(
                f"{' and '.join(map(_holder_name, locks))} of this file and {_holder_name(other)}, which is at work on "
                f"the same run ({config.job_dir}), must have the same {', '.join(differ)}. Correct one of the files; "
                "a running part uses a new value only after a restart.",
                key=differ[0],
            )
        there = theirs.get(SOFTWARE, {})
        unlike = [f"{name} {there[name]} (here {own[name]})" for name in own if there.get(name, own[name]) != own[name]]
        if unlike:
            log.warning(OTHER_SOFTWARE, _holder_name(other), ", ".join(unlike))


def _record(job_dir: Path, lock: str) -> Path:
    return job_dir / f".{lock}{RECORD}"


def _holder_name(lock: str) -> str:
    return "the trainer" if lock == RUN_TRAINS else lock.replace("_", " ", 1)


def _database(url: str) -> str:
    """Return a store's URL without the server's address and the user, which may differ between machines."""
    parsed = make_url(url)
    return f"{parsed.get_backend_name()}:///{parsed.database or ''}"
