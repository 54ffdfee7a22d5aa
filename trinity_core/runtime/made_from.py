"""What a run was made from: digests of its settings, data files and plugins, so that later changes can be named."""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from hashlib import sha256
from pathlib import Path
from typing import Any

from trinity_core.config import Config, ExperienceBufferConfig, ExperienceInputConfig, TasksetConfig, to_dict
from trinity_core.config.load import without_defaults
from trinity_core.config.paths import uses_pipeline
from trinity_core.data.files import data_files, is_local
from trinity_core.data.joined import inputs_of
from trinity_core.errors import DataError
from trinity_core.files import expanded, file_digest
from trinity_core.plugins import python_files

OUTCOME = ("mode", "seed", "algorithm", "model", "buffer", "explorer", "trainer", "data_processor")
"""Sections of a configuration that determine a run's result."""
USUAL = "default"
"""Replaces the digest of a setting with the schema's default."""
HASHED = 256 << 20
"""Largest file whose contents are compared; for larger files only the size is, which takes no time."""


def absolute(path: str) -> str:
    """Return a path relative to the current directory as an absolute one, with links followed."""
    return os.path.realpath(expanded(path))


SPELLINGS: tuple[Callable[[str], str], ...] = (
    str,
    absolute,
    lambda path: os.path.relpath(absolute(path), os.path.realpath(".")),
)
"""Equivalent notations of an existing path: as written, absolute, relative to the current folder."""


def made_from(config: Config) -> dict[str, dict[str, Any]]:
    """Return `settings`, which determine a run's result, and `inputs`, whose change does not make it another run: sync
    settings, contents of data files and plugins.

    Each maps a name to its digests, one per notation of the paths in it. An inner section counts as one setting; `keys`
    has each of its keys, with `USUAL` for schema defaults.
    """
    sections, set_here = to_dict(config), without_defaults(config)
    outcome = {name: sections[name] for name in OUTCOME}
    unusual = {name for name, _ in _entries(set_here)}
    return {
        "settings": {name: _digests(value) for name, value in _entries(outcome, 2)},
        "keys": {name: _digests(value) + [USUAL] * (name not in unusual) for name, value in _entries(outcome)},
        "inputs": {name: _digests(value) for name, value in _entries({"synchronizer": sections["synchronizer"]})}
        | {str(file): _contents(file) for file in _files(config)},
    }


def differences(before: Any, now: Mapping[str, Mapping[str, Any]], kind: str) -> list[str]:
    """Return the changed names of a kind, `settings` or `inputs`; for settings the keys, if `before` has them. If
    `before` lacks the kind, return the kind itself."""
    known = before.get(kind) if isinstance(before, dict) else None
    if not isinstance(known, dict):
        return [kind]
    changed = _changed(known, now[kind])
    if kind == "settings" and changed:
        return _changed(before["keys"], now["keys"]) if "keys" in before else changed
    return changed


def _changed(before: Mapping[str, Any], now: Mapping[str, Any]) -> list[str]:
    """Return the names with no digest in common; files are named as now, or else as before.

    A setting with its default on both sides, or with its default now and unknown before, is unchanged.
    """
    known, present = ({_place(name): (name, _as_set(value)) for name, value in one.items()} for one in (before, now))
    pairs = [(known.get(place), present.get(place)) for place in known.keys() | present.keys()]
    differing = [new or old for old, new in pairs if not (old[1] if old else {USUAL}) & (new[1] if new else set())]
    return sorted(one[0] for one in differing if one is not None)


def _place(name: str) -> str:
    return os.path.realpath(name) if os.path.exists(name) else name  # noqa: PTH110 - Path.exists raises for long text


def _as_set(value: str | Sequence[str]) -> set[str]:
    """Return recorded digests as a set; earlier versions recorded a single one."""
    return {value} if isinstance(value, str) else set(value)


def _entries(value: Any, depth: int = -1, name: str = "") -> Iterator[tuple[str, Any]]:
    """Yield the entries `depth` levels deep (negative: all leaves) with dotted keys."""
    inner = value if isinstance(value, dict) else {}
    if depth < 0 and isinstance(value, list) and any(isinstance(item, dict) for item in value):
        inner = {f"[{place}]": item for place, item in enumerate(value)}
    if not inner or depth == 0:
        yield name, value
    for key, item in inner.items() if depth else ():
        yield from _entries(item, depth - 1, f"{name}{key}" if key[:1] == "[" or not name else f"{name}.{key}")


def _digests(value: Any) -> list[str]:
    texts = (json.dumps(normalised(value, spelled), sort_keys=True, default=str) for spelled in SPELLINGS)
    return list(dict.fromkeys(sha256(text.encode()).hexdigest()[:16] for text in texts))


def normalised(value: Any, spelled: Callable[[str], str] = absolute) -> Any:
    """Make equal numbers (1024 and 1024.0) the same text, and write existing paths in one notation."""
    if isinstance(value, dict):
        return {name: normalised(item, spelled) for name, item in value.items()}
    if isinstance(value, list):
        return [normalised(item, spelled) for item in value]
    if isinstance(value, str):
        return spelled(value) if value and os.path.exists(expanded(value)) else value  # noqa: PTH110 - as above
    return int(value) if isinstance(value, float) and value.is_integer() else value


def _files(config: Config) -> Iterator[Path]:
    """Yield the local data files that a run reads, and its plugins."""
    tasks, trained = config.buffer.explorer_input, config.buffer.trainer_input
    buffers = [trained.experience_buffer, *trained.auxiliary_buffers.values()]
    data_sets: list[TasksetConfig | ExperienceBufferConfig | ExperienceInputConfig]
    data_sets = [*tasks.tasksets, *tasks.eval_tasksets, *buffers, *(source for _, source in inputs_of(config))]
    read = [(one.path, one.split, one.subset_name) for one in data_sets if (one.storage_type or "file") == "file"]
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
