"""What a run was made from: its settings, data files and plugins, so that a change of one can be named later."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from hashlib import sha256
from pathlib import Path
from typing import Any

from trinity_core.config import Config, ExperienceBufferConfig, ExperienceInputConfig, TasksetConfig, to_dict
from trinity_core.config.paths import uses_pipeline
from trinity_core.data.files import data_files, is_local
from trinity_core.data.joined import inputs_of
from trinity_core.errors import DataError
from trinity_core.files import expanded, file_digest
from trinity_core.plugins import python_files

OUTCOME = ("mode", "seed", "algorithm", "model", "buffer", "explorer", "trainer", "data_processor")
"""Sections of a configuration that decide what a run makes."""
HASHED = 256 << 20
"""Bytes of the largest file whose contents are compared; of a larger one only the size is, which takes no time."""


def made_from(config: Config) -> dict[str, dict[str, str]]:
    """`settings`, which decide what a run makes, and `inputs`, beside which it counts as the same run: sync settings,
    the contents of data files and plugins. Each is a name → a digest."""
    sections = to_dict(config)
    settings = dict(_entries({name: sections[name] for name in OUTCOME}))
    inputs = dict(_entries({"synchronizer": sections["synchronizer"]}))
    return {"settings": settings, "inputs": inputs | {str(file): _contents(file) for file in _files(config)}}


def differences(before: Any, now: Mapping[str, Mapping[str, str]], kind: str) -> list[str]:
    """The names of a kind, `settings` or `inputs`, whose digests have changed; the kind itself if `before` lacks it."""
    known = before.get(kind) if isinstance(before, dict) else None
    if not isinstance(known, dict):
        return [kind]
    return [name for name in sorted(known.keys() | now[kind].keys()) if known.get(name) != now[kind].get(name)]


def _entries(sections: Mapping[str, Any]) -> Iterator[tuple[str, str]]:
    """The settings of each section by dotted key; an inner section is one entry."""
    for section, values in sections.items():
        for name, value in values.items() if isinstance(values, dict) else [("", values)]:
            text = json.dumps(_normalised(value), sort_keys=True, default=str)
            yield f"{section}.{name}".rstrip("."), sha256(text.encode()).hexdigest()[:16]


def _normalised(value: Any) -> Any:
    """Equal numbers become the same text: 1024 and 1024.0."""
    if isinstance(value, dict):
        return {name: _normalised(item) for name, item in value.items()}
    if isinstance(value, list):
        return [_normalised(item) for item in value]
    return int(value) if isinstance(value, float) and value.is_integer() else value


def _files(config: Config) -> Iterator[Path]:
    """The local data files that a run reads, and its plugins."""
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
