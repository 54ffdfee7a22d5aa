"""What a configuration names, and the arguments that it gives: checked and typed by the registries.

`check_arguments` only reports, `typed_arguments` only returns values. Both look at the parts of the algorithm and at
the monitor; `trinity_core.pipelines.checks` does the same, by `fitting`, for workflows, rewards and operators.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, get_args

from pydantic import BaseModel, ValidationError

from trinity_core.config.algorithm_types import PARTS
from trinity_core.config.problems import Report
from trinity_core.config.resolve import draws_by
from trinity_core.config.schema import Config
from trinity_core.config.types import Args
from trinity_core.config.validation import BAD, convert, key_of
from trinity_core.registry import Registry, registry_of
from trinity_core.signatures import arguments_model, from_yaml
from trinity_core.slips import closest

MONITOR = "monitor.monitor_type"
REPLAY = "buffer.trainer_input.experience_buffer.replay_buffer"


def check_arguments(config: Config, report: Report, plugins_loaded: bool = False) -> None:
    """Report unknown names and arguments that do not fit.

    With a `plugin_dir` whose modules this process has not loaded, a name that is not built in is trusted.
    """
    algorithm, trusted = config.algorithm, bool(config.plugin_dir) and not plugins_loaded
    for part in PARTS:
        name, registry = getattr(algorithm, part), registry_of(f"algorithm.{part}")
        if name is not None and name not in registry and not trusted:
            brought = "" if config.plugin_dir else " (or come with plugin_dir)"
            message = f"must be one of {', '.join(registry)}{brought}, not '{name}'."
            report.add(f"algorithm.{part}", name, message, closest(name, registry))
    priority = config.buffer.trainer_input.experience_buffer.replay_buffer.priority_fn
    others = ((MONITOR, config.monitor.monitor_type, registry_of(MONITOR)), (f"{REPLAY}.priority_fn", priority, _fns()))
    for key, name, registry in others:
        if name not in registry and not trusted:
            report.add(key, name, f"must be one of {', '.join(registry)}, not '{name}'.", closest(name, registry))
    _typed(config, report)


def typed_arguments(config: Config) -> Config:
    """The configuration with the arguments of every known part in the types that the part takes."""
    return config.with_values(_typed(config, Report()))


def fitting(
    registry: Registry[Any], part: Any, name: str, given: Mapping[str, Any], key: str, report: Report
) -> dict[str, Any]:
    """The arguments given to a part, in the types that it takes; those that do not fit are reported, and stay."""
    return _fitting(registry.arguments(part, name), name, given, key, report)


def unread_monitor_args(config: Config) -> list[str]:
    """Keys of arguments that belong to another monitor than the one in use."""
    known = _monitors(config.monitor.monitor_type)
    return [f"monitor.monitor_args.{name}" for name in config.monitor.monitor_args if name not in known]


def bypasses_in_vain(config: Config) -> bool:
    """True if the policy loss has no ratio that `rollout_correction: bypass` could take to the policy that sampled."""
    losses, loss = registry_of("algorithm.policy_loss_fn"), config.algorithm.policy_loss_fn
    return config.algorithm.rollout_correction == "bypass" and loss in losses and not losses.uses(loss, "old_logprobs")


def _typed(config: Config, report: Report) -> dict[str, Any]:
    """The arguments of every known part by key."""
    values: dict[str, Any] = {}
    for part in PARTS:
        name, registry, key = (
            getattr(config.algorithm, part),
            registry_of(f"algorithm.{part}"),
            f"algorithm.{part}_args",
        )
        if name in registry:
            given = getattr(config.algorithm, f"{part}_args")
            model = (
                _strategy(config, registry) if part == "sample_strategy" else registry.arguments(registry[name], name)
            )
            values[key] = _fitting(model, name, given, key, report)
    values["monitor.monitor_args"] = _monitor_args(config, report)
    replay, key = config.buffer.trainer_input.experience_buffer.replay_buffer, f"{REPLAY}.priority_fn_args"
    if replay.priority_fn in (functions := _fns()):
        function, given = functions[replay.priority_fn], replay.priority_fn_args
        values[key] = fitting(functions, function, replay.priority_fn, given, key, report)
    return values


def _fns() -> Registry[Any]:
    """The priority functions."""
    return registry_of("replay_buffer.priority_fn")


def _strategy(config: Config, registry: Registry[Any]) -> type[BaseModel] | None:
    """The arguments of the sample strategy and of the one that it draws rollouts by."""
    names = dict.fromkeys((config.algorithm.sample_strategy, draws_by(config)))
    models = [registry.arguments(registry[name], name) for name in names if name in registry]
    return arguments_model(config.algorithm.sample_strategy, [model for model in models if model is not None])


def _monitor_args(config: Config, report: Report) -> dict[str, Any]:
    """What belongs to another monitor may stay: it has no effect, and a notice says so."""
    name, given, key = config.monitor.monitor_type, config.monitor.monitor_args, "monitor.monitor_args"
    monitors = registry_of(MONITOR)
    if name not in monitors:
        return dict(given)
    own, known = _monitors(name), {other: None for each in monitors for other in _monitors(each)}
    for other in given:
        if other not in known:
            message = f"is no argument of '{name}', which takes {', '.join(own) or 'none'}."
            report.add(f"{key}.{other}", given[other], message, closest(other, known))
    return {
        **given,
        **fitting(monitors, monitors[name], name, {k: v for k, v in given.items() if k in own}, key, report),
    }


def _monitors(name: str) -> list[str]:
    """The arguments that a monitor takes."""
    monitors = registry_of(MONITOR)
    model = monitors.arguments(monitors[name], name) if name in monitors else None
    return list(model.model_fields) if model else []


def _fitting(
    model: type[BaseModel] | None, owner: str, given: Mapping[str, Any], key: str, report: Report
) -> dict[str, Any]:
    values, before = dict(given), len(report.problems)
    fields = {} if model is None else model.model_fields
    takes_any = model is None or model.model_config.get("extra") == "allow"
    for name, value in given.items():
        path = f"{key}.{name}"
        if name not in fields:
            if not takes_any:
                takes = ", ".join(fields) or "none"
                report.add(path, value, f"is no argument of '{owner}', which takes {takes}.", closest(name, fields))
            continue
        section = _section(fields[name].annotation)
        if section is not None and isinstance(value, Mapping):
            values[name] = _fitting(section, name, value, path, report)
        elif value is not fields[name].default:
            kind = fields[name].rebuild_annotation()
            if section is not None or from_yaml(kind):
                fits = convert(Args | None if section is not None else kind, value, path, report)
                values[name] = value if fits is BAD else fits
    if len(report.problems) == before:
        for name in (name for name, field in fields.items() if field.is_required() and name not in given):
            report.add(f"{key}.{name}", None, f"must be given: '{owner}' has no default for it.")
    if model is not None and len(report.problems) == before:
        _validate(model, values, key, report)
    return values


def _validate(model: type[BaseModel], values: dict[str, Any], key: str, report: Report) -> None:
    """Report what a model that a part brings itself finds beyond the type of each argument."""
    try:
        model.model_validate(values)
    except ValidationError as error:
        for fault in error.errors(include_url=False):
            report.add(f"{key}{key_of(fault['loc'], below=True)}", fault["input"], f"{fault['msg']}.")


def _section(kind: Any) -> type[BaseModel] | None:
    """The model of an argument that is a section of its own."""
    options = [option for option in (kind, *get_args(kind)) if isinstance(option, type)]
    return next((option for option in options if issubclass(option, BaseModel)), None)
