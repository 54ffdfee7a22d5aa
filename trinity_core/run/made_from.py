"""What a run was made from: its settings and digests of its data files and plugins, so that later changes can be named;
and the settings that its explorers and its trainer must share, as each may be a run with a file of its own."""

from __future__ import annotations

import logging
import os
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from sqlalchemy import make_url

from trinity_core.base.errors import DataError, TrinityError
from trinity_core.base.files import expanded, file_digest, read_json, write_json
from trinity_core.base.plugins import python_files
from trinity_core.base.runlock import RUN_TRAINS, is_held, release
from trinity_core.config import Config, ExperienceBufferConfig, ExperienceInputConfig, TasksetConfig, store_url
from trinity_core.config.load import without_defaults
from trinity_core.config.paths import normalised, uses_pipeline
from trinity_core.config.secrets import without_password, without_secrets
from trinity_core.config.sync_schedule import SyncSchedule
from trinity_core.data.files import data_files, is_local
from trinity_core.data.joined import inputs_of
from trinity_core.data.lengths import rollouts_taken
from trinity_core.exchange.tracking.writers import leaves
from trinity_core.run.nodes import software

OUTCOME = ("mode", "seed", "algorithm", "model", "buffer", "explorer", "trainer", "data_processor")
"""Sections of a configuration that determine a run's result."""
FORMER = {"trainer.total_steps"}
"""What earlier releases recorded beside the setting that it stood for."""
HASHED = 256 << 20
"""Largest file whose contents are compared; for larger files only the size is, which takes no time."""


def made_from(config: Config) -> dict[str, Any]:
    """Return `settings`, which determine a run's result, and `inputs`, whose change does not make it another run: sync
    settings, contents of data files and plugins; and the current `folder`.

    Settings are dotted keys with their values, without secrets and the schema's defaults: an update may add settings
    and change defaults. Existing paths are absolute.
    """
    tree = normalised(without_secrets(without_defaults(config)))
    outcome, sync = ({name: tree[name] for name in names if name in tree} for names in (OUTCOME, ("synchronizer",)))
    return {
        "folder": os.path.realpath("."),
        "settings": dict(leaves(outcome, entry="[{}]")),
        "inputs": dict(leaves(sync)) | {os.path.realpath(file): _contents(file) for file in _files(config)},
    }


def differences(recorded: Any, now: Mapping[str, Any], kind: str) -> list[str]:
    """Return the names of a kind, `settings` or `inputs`, whose values differ from those of an earlier attempt; the
    kind itself if that recorded none. It makes no difference that the project's folder was moved."""
    if not isinstance(recorded, dict) or "folder" not in recorded:
        return [kind]
    present = now[kind]
    settings = {name: value for name, value in recorded[kind].items() if name not in FORMER}
    candidates = (settings, _moved(settings, recorded["folder"], now["folder"]))
    return min(
        (
            sorted(name for name in earlier.keys() | present.keys() if earlier.get(name) != present.get(name))
            for earlier in candidates
        ),
        key=len,
    )


def _moved(value: Any, old: str, new: str) -> Any:
    """Return the value with paths in the folder `old` as paths in `new`."""
    if isinstance(value, dict):
        return {_moved(name, old, new): _moved(item, old, new) for name, item in value.items()}
    if isinstance(value, list):
        return [_moved(item, old, new) for item in value]
    is_inside = isinstance(value, str) and f"{value}{os.sep}".startswith(f"{old}{os.sep}")
    return new + value[len(old) :] if is_inside else value


def _files(config: Config) -> Iterator[Path]:
    """Yield the local data files that a run reads, and its plugins."""
    tasks, trained = config.buffer.explorer_input, config.buffer.trainer_input
    buffers = [trained.experience_buffer, *trained.auxiliary_buffers.values()]
    data_sets: list[TasksetConfig | ExperienceBufferConfig | ExperienceInputConfig]
    data_sets = [*tasks.tasksets, *tasks.eval_tasksets, *buffers, *(source for _, source in inputs_of(config))]
    read = [(data.path, data.split, data.subset_name) for data in data_sets if (data.storage_type or "file") == "file"]
    pipeline = config.data_processor.task_pipeline
    if pipeline is not None and uses_pipeline(config):
        read += [(path, pipeline.split, None) for path in pipeline.inputs]
    for path, split, subset in read:
        if path and is_local(path):
            try:
                yield from data_files(path, split, subset)
            except DataError:
                continue  # a run says so when it reads them
    if config.plugin_dir:
        yield from python_files(expanded(config.plugin_dir), "**/*.py")


def _contents(file: Path) -> str:
    size = file.stat().st_size
    return f"{size} bytes" if size > HASHED else file_digest(file)[:16]


RECORD = ".settings.json"
"""End of the name of a record of shared settings, next to a lock; before it stand a dot and the name of the lock."""
SOFTWARE = "software"
STORE = "store"
STORE_PATH = "buffer.trainer_input.experience_buffer.path"
OTHER_SOFTWARE = "%s, which is at work on the same run, has other software: %s. Update all parts of a run together"
log = logging.getLogger(__name__)


def shared_settings(config: Config) -> dict[str, Any]:
    """Return the settings that must agree, by key.

    All others may differ, such as an explorer's batch size, time limits, and how often it looks for weights. With
    `max_staleness` an explorer also computes when the trainer publishes.
    """
    sync, lora = config.synchronizer, config.engine_adapter
    excluded = [f"-{name}" for name in sorted(lora.exclude_modules)] if lora is not None else []
    modules = " ".join([*sorted(lora.target_modules), *excluded]) if lora is not None else ""
    settings: dict[str, Any] = {
        STORE_PATH: _database(store_url(config)),
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
    mine, software_here = shared_settings(config), software(config.plugin_dir)
    for lock in locks:
        write_json(_record(config.job_dir, lock), mine | {SOFTWARE: software_here}, durable=False)
    for other, theirs in _others_at_work(config, locks):
        differ = {
            key: f"{key} ({mine[key]} and {theirs[key]})" for key in mine if key in theirs and mine[key] != theirs[key]
        }
        if differ:
            for lock in locks:
                release(config.job_dir, lock)
            raise TrinityError(
                f"{' and '.join(map(_holder_name, locks))} of this file and {_holder_name(other)}, which is at work on "
                f"the same run ({config.job_dir}), must have the same {', '.join(differ.values())}. Correct one of the "
                "files; a running part uses a new value only after a restart.",
                key=next(iter(differ)),
            )
        there = theirs.get(SOFTWARE, {})
        unlike = [
            f"{name} {there[name]} (here {software_here[name]})"
            for name in software_here
            if there.get(name, software_here[name]) != software_here[name]
        ]
        if unlike:
            log.warning(OTHER_SOFTWARE, _holder_name(other), ", ".join(unlike))


def check_same_store(config: Config, locks: Sequence[str], identity: str) -> None:
    """Record the `identity` of a run's store next to its settings. Raises TrinityError, and releases the locks, if
    another active part has another store: the same path or database name, but on another machine."""
    for path in (_record(config.job_dir, lock) for lock in locks):
        write_json(path, read_json(path) | {STORE: identity}, durable=False)
    for other, theirs in _others_at_work(config, locks):
        if theirs.get(STORE, identity) != identity:
            for lock in locks:
                release(config.job_dir, lock)
            raise TrinityError(
                f"{_holder_name(other)}, which is at work on the same run ({config.job_dir}), uses another store than "
                f"{without_password(store_url(config))} as seen from this machine: name the same server in all files.",
                key=STORE_PATH,
            )


def _others_at_work(config: Config, locks: Sequence[str]) -> Iterator[tuple[str, Mapping[str, Any]]]:
    """Yield the lock and the record of each other active part."""
    for path in sorted(config.job_dir.glob(f".*{RECORD}")):
        other = path.name[1:].removesuffix(RECORD)
        if other not in locks and is_held(config.job_dir, other):
            yield other, read_json(path)


def _record(job_dir: Path, lock: str) -> Path:
    return job_dir / f".{lock}{RECORD}"


def _holder_name(lock: str) -> str:
    return "the trainer" if lock == RUN_TRAINS else lock.replace("_", " ", 1)


def _database(url: str) -> str:
    """Return a store's URL without the server's address and the user, which may differ between machines."""
    parsed = make_url(url)
    return f"{parsed.get_backend_name()}:///{parsed.database or ''}"
