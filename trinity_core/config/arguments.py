"""Checks the parts that a configuration names, and converts their arguments, using the registries.

Covers the parts of the algorithm and the monitor; `trinity_core.pipelines.named_parts` uses `fitting` to do the same
for workflows, rewards and operators.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, get_args

from pydantic import BaseModel, ValidationError

from trinity_core.base.errors import closest
from trinity_core.base.registry import Registry, registry_of
from trinity_core.base.signatures import arguments_model, from_yaml
from trinity_core.config.algorithm_types import PARTS
from trinity_core.config.findings import Finding, Report
from trinity_core.config.resolve import draws_by
from trinity_core.config.schema import Config
from trinity_core.config.source import key_of
from trinity_core.config.types import Args
from trinity_core.config.validation import BAD, convert

MONITOR = "monitor.monitor_type"
REPLAY = "buffer.trainer_input.experience_buffer.replay_buffer"


def typed_arguments(config: Config, report: Report, plugins_loaded: bool = False) -> Config:
    """Return the configuration with each part's arguments converted to the types that the part takes.

    Unknown names and unsuitable arguments are reported. If `plugin_dir` is set but its modules are not loaded in this
    process, names that are not built in are trusted.
    """
    trusted = bool(config.plugin_dir) and not plugins_loaded
    values: dict[str, Any] = {}
    for part in PARTS:
        name, key = getattr(config.algorithm, part), f"algorithm.{part}"
        registry, args = registry_of(key), getattr(config.algorithm, f"{part}_args")
        if report.touched((key,)):
            continue  # its arguments belong to another part
        if name in registry:
            model = registry.arguments(registry[name], name)
            if part == "sample_strategy":
                model = _strategy(config, registry)
            values[f"{key}_args"] = _fitting(model, name, args, f"{key}_args", report)
        elif name is not None and not trusted:
            brought = "" if config.plugin_dir else " (or come with plugin_dir)"
            report.add(_unknown_name(key, name, registry, brought))
    replay = config.buffer.trainer_input.experience_buffer.replay_buffer
    priorities, name, key = registry_of("replay_buffer.priority_fn"), replay.priority_fn, f"{REPLAY}.priority_fn"
    if name in priorities:
        args = replay.priority_fn_args
        values[f"{key}_args"] = fitting(priorities, priorities[name], name, args, f"{key}_args", report)
    elif not trusted:
        report.add(_unknown_name(key, name, priorities))
    monitors = registry_of(MONITOR)
    if config.monitor.monitor_type in monitors:
        values["monitor.monitor_args"] = _monitor_args(config, report)
    elif not trusted:
        report.add(_unknown_name(MONITOR, config.monitor.monitor_type, monitors))
    return config.with_values(values)


def fitting(
    registry: Registry[Any], part: Any, name: str, args: Mapping[str, Any], key: str, report: Report
) -> dict[str, Any]:
    """Return a part's arguments, converted to its types; unsuitable ones are reported and kept as given."""
    return _fitting(registry.arguments(part, name), name, args, key, report)


def monitor_arguments(name: str) -> list[str]:
    monitors = registry_of(MONITOR)
    model = monitors.arguments(monitors[name], name) if name in monitors else None
    return list(model.model_fields) if model else []


def _unknown_name(key: str, name: str, registry: Registry[Any], more: str = "") -> Finding:
    message = f"must be one of {', '.join(registry)}{more}, not '{name}'."
    return Finding(key, name, "unknown-name", message, suggestion=closest(name, registry))


def _unknown_argument(key: str, value: Any, name: str, owner: str, takes: list[str], known: list[str]) -> Finding:
    message = f"is no argument of '{owner}', which takes {', '.join(takes) or 'none'}."
    return Finding(key, value, "unknown-argument", message, suggestion=closest(name, known))


def _strategy(config: Config, registry: Registry[Any]) -> type[BaseModel] | None:
    """Return the arguments of the sample strategy combined with those of the strategy that draws rollouts."""
    names = dict.fromkeys((config.algorithm.sample_strategy, draws_by(config)))
    models = [registry.arguments(registry[name], name) for name in names if name in registry]
    return arguments_model(config.algorithm.sample_strategy, [model for model in models if model is not None])


def _monitor_args(config: Config, report: Report) -> dict[str, Any]:
    """Check the monitor's arguments. Other monitors' arguments are allowed without effect; a notice says so."""
    name, args, key = config.monitor.monitor_type, config.monitor.monitor_args, "monitor.monitor_args"
    monitors, own = registry_of(MONITOR), monitor_arguments(name)
    known = [argument for monitor in monitors for argument in monitor_arguments(monitor)]
    for other in (other for other in args if other not in known):
        report.add(_unknown_argument(f"{key}.{other}", args[other], other, name, own, known))
    taken = {argument: value for argument, value in args.items() if argument in own}
    return {**args, **fitting(monitors, monitors[name], name, taken, key, report)}


def _fitting(
    model: type[BaseModel] | None, owner: str, args: Mapping[str, Any], key: str, report: Report
) -> dict[str, Any]:
    values, before = dict(args), report.added
    fields = {} if model is None else model.model_fields
    takes_any = model is None or model.model_config.get("extra") == "allow"
    for name, value in args.items():
        path = f"{key}.{name}"
        if name not in fields:
            if not takes_any:
                report.add(_unknown_argument(path, value, name, owner, list(fields), list(fields)))
            continue
        section = _section(fields[name].annotation)
        if section is not None and isinstance(value, Mapping):
            values[name] = _fitting(section, name, value, path, report)
        elif value is not fields[name].default:
            kind = fields[name].rebuild_annotation()
            if section is not None or from_yaml(kind):
                fits = convert(Args | None if section is not None else kind, value, path, report)
                values[name] = value if fits is BAD else fits
    if report.added == before:
        for name in (name for name, field in fields.items() if field.is_required() and name not in args):
            report.add(Finding(f"{key}.{name}", None, "missing", f"must be given: '{owner}' has no default for it."))
    if model is not None and report.added == before:
        _validate(model, values, key, report)
    return values


def _validate(model: type[BaseModel], values: dict[str, Any], key: str, report: Report) -> None:
    """Report errors that a part's own model finds beyond the types of single arguments."""
    try:
        model.model_validate(values)
    except ValidationError as error:
        for fault in error.errors(include_url=False):
            report.add(Finding(key_of(fault["loc"], key), fault["input"], "invalid", f"{fault['msg']}."))


def _section(kind: Any) -> type[BaseModel] | None:
    options = [option for option in (kind, *get_args(kind)) if isinstance(option, type)]
    return next((option for option in options if issubclass(option, BaseModel)), None)
