"""Checks the parts that a configuration names, and converts their arguments, using the registries.

Covers the parts of the algorithm and the monitor; `trinity_core.pipelines.named_parts` uses `fitting` to do the same
for workflows, rewards and operators.
"""

from __future__ import annotations

import functools
from collections.abc import Iterable, Mapping
from typing import Any, get_args

from pydantic import BaseModel, ValidationError

from trinity_core.base.errors import closest
from trinity_core.base.registry import Registry, registry_of
from trinity_core.base.signatures import arguments_model
from trinity_core.config.algorithm_types import PARTS
from trinity_core.config.fields import Type, type_below
from trinity_core.config.findings import Finding, Report
from trinity_core.config.resolve import draws_by
from trinity_core.config.schema import Config
from trinity_core.config.source import join_key, key_of
from trinity_core.config.validation import exact, finding_of

MONITOR = "monitor.monitor_type"
PRIORITY = "buffer.trainer_input.experience_buffer.replay_buffer.priority_fn"


def typed_arguments(config: Config, report: Report, plugins_loaded: bool = False) -> Config:
    """Return the configuration with each part's arguments converted to the types that the part takes.

    Unknown names and unsuitable arguments are reported. If `plugin_dir` is set but its modules are not loaded in this
    process, names that are not built in are trusted.
    """
    trusted = bool(config.plugin_dir) and not plugins_loaded
    algorithm, monitor = config.algorithm, config.monitor
    replay = config.buffer.trainer_input.experience_buffer.replay_buffer
    parts = [(f"algorithm.{part}", getattr(algorithm, part), getattr(algorithm, f"{part}_args")) for part in PARTS]
    parts += [(PRIORITY, replay.priority_fn, replay.priority_fn_args)]
    parts += [(MONITOR, monitor.monitor_type, monitor.monitor_args)]
    values: dict[str, Any] = {}
    for key, name, args in parts:
        registry = registry_of("replay_buffer.priority_fn" if key == PRIORITY else key)
        if name is None or report.touched((key,)):
            continue  # its arguments belong to another part
        if name in registry:
            args_key = f"{key.removesuffix('_type')}_args"
            values[args_key] = _fitting(_taken(config, key, name, registry), name, args, args_key, report)
        elif not trusted:
            brought = " (or come with plugin_dir)" if key.startswith("algorithm.") and not config.plugin_dir else ""
            message = f"must be one of {', '.join(registry)}{brought}, not '{name}'."
            report.add(Finding(key, name, "unknown-name", message, suggestion=closest(name, registry)))
    return config.with_values(values)


def fitting(
    registry: Registry[Any], part: Any, name: str, args: Mapping[str, Any], key: str, report: Report
) -> dict[str, Any]:
    """Return a part's arguments, converted to its types; unsuitable ones are reported and kept as given."""
    return _fitting(registry.arguments(part, name), name, args, key, report)


def _taken(config: Config, key: str, name: str, registry: Registry[Any]) -> type[BaseModel] | None:
    """Return the arguments that may be given for a part: a sample strategy's with those of the strategy that draws
    rollouts, and those of all monitors, so that a file can be used with another one."""
    names: Iterable[str] = registry if key == MONITOR else [name]
    if key == "algorithm.sample_strategy":
        names = [name, draws_by(config)]
    models = [registry.arguments(registry[other], other) for other in dict.fromkeys(names) if other in registry]
    return models[0] if len(models) == 1 else _joined(name, tuple(model for model in models if model is not None))


_joined = functools.cache(arguments_model)
"""Builds a class for each name and models once; `exact` keeps one for every class that it gets."""


def _fitting(
    model: type[BaseModel] | None, owner: str, args: Mapping[str, Any], key: str, report: Report
) -> dict[str, Any]:
    if model is None:
        return dict(args)
    args = _as_written(args, Type(exact(model), (), False), key, report)
    try:
        values = exact(model).model_validate(args).model_dump(exclude_unset=True)
        return {name: values[name] for name in args}
    except ValidationError as error:
        faults = error.errors(include_url=False)
    for fault in [fault for fault in faults if fault["type"] != "missing"] or faults:  # one may be misspelt
        path, name = key_of(fault["loc"], key), str(fault["loc"][-1]) if fault["loc"] else ""
        if fault["type"] == "extra_forbidden":
            names = list(_section_at(model, fault["loc"][:-1]).model_fields)
            message = f"is no argument of '{owner}', which takes {', '.join(names) or 'none'}."
            meant = closest(name, names)
            report.add(Finding(path, fault["input"], "unknown-argument", message, suggestion=meant))
        elif fault["type"] == "missing":
            report.add(Finding(path, None, "missing", f"must be given: '{owner}' has no default for it."))
        else:
            report.add(finding_of(path, fault["input"], fault))
    return dict(args)


def _as_written(value: Any, typed: Type | None, key: str, report: Report) -> Any:
    """Return arguments with the values of texts as they are written: `1.10` and not `1.1`."""
    if isinstance(value, Mapping):
        parts = ((name, part, type_below(typed, name)) for name, part in value.items())
        return {name: _as_written(part, below, join_key(key, name), report) for name, part, below in parts}
    if isinstance(value, list):
        return [_as_written(part, type_below(typed, i), join_key(key, i), report) for i, part in enumerate(value)]
    return report.as_text(key, value) if typed is not None and typed.plain is str else value


def _section_at(model: type[BaseModel], path: Iterable[str | int]) -> type[BaseModel]:
    """Return the model of a section within arguments."""
    for name in path:
        kind = model.model_fields[name].annotation if isinstance(name, str) else None
        options = [option for option in (kind, *get_args(kind)) if isinstance(option, type)]
        model = next((option for option in options if issubclass(option, BaseModel)), model)
    return model
