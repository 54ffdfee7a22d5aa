"""The workflows, rewards and operators that a configuration names: looked up, with their arguments, before any is used.

A name that is looked up only when a task needs it fails that task alone, and the run goes on without its data.
"""

from __future__ import annotations

import inspect
import types
from collections.abc import Callable, Collection, Mapping
from typing import Any, TypeGuard, TypeVar, Union, get_args, get_origin

from trinity_core.config import Config, OperatorConfig, TasksetConfig
from trinity_core.config.problems import Report, closest
from trinity_core.config.rules import INPUT, eval_tasksets, training_tasksets
from trinity_core.config.validation import BAD, convert
from trinity_core.errors import TrinityError
from trinity_core.pipelines.operators import OPERATORS
from trinity_core.workflows import REWARD_FNS, WORKFLOWS, Registry, SimpleWorkflow

T = TypeVar("T")

OPERATED = "data_processor.experience_pipeline.operators"
PLAIN = {bool, int, float, str}
SCORED = ("prompt", "response", "truth", "task")
"""What every reward function is given."""


def require_names(config: Config) -> Config:
    """The configuration with the arguments of rewards and operators in the types that they take.

    For the process that uses them. Raises ConfigError unless all names are found, dotted paths too, and arguments fit.
    """
    report = Report()
    typed = _typed(config, report, imports=True)
    report.check()
    return typed


def check_names(config: Config, report: Report) -> None:
    """Report names that are not found and arguments that do not fit. A dotted path is trusted."""
    _typed(config, report, imports=False)


def typed_arguments(config: Config) -> Config:
    """The configuration with the arguments of rewards and operators in the types that they take."""
    return _typed(config, Report(), imports=False)


def _typed(config: Config, report: Report, imports: bool) -> Config:
    """`typed_arguments`; what does not fit is reported, and stays as it is."""
    for key, section in ((INPUT, config.buffer.explorer_input), ("buffer", config.buffer)):
        _found(WORKFLOWS, section.default_workflow_type, f"{key}.default_workflow_type", report, imports)
        _found(REWARD_FNS, section.default_reward_fn_type, f"{key}.default_reward_fn_type", report, imports)
    values: dict[str, Any] = {
        f"{INPUT}.{name}": [_typed_taskset(config, key, taskset, report, imports) for key, taskset in tasksets]
        for name, tasksets in (("tasksets", training_tasksets(config)), ("eval_tasksets", eval_tasksets(config)))
    }
    if pipeline := config.data_processor.experience_pipeline:
        values[OPERATED] = [
            _typed_operator(operator, f"{OPERATED}[{index}]", report, imports)
            for index, operator in enumerate(pipeline.operators)
        ]
    return config.with_values(values)


def _typed_operator(operator: OperatorConfig, key: str, report: Report, imports: bool) -> OperatorConfig:
    function = _found(OPERATORS, operator.name, f"{key}.name", report, imports)
    if function is None:
        return operator
    experiences = next(iter(inspect.signature(function).parameters), "")
    args = _fitting(function, operator.name, operator.args, f"{key}.args", [experiences], report)
    return operator.with_values({"args": args})


def _typed_taskset(config: Config, key: str, taskset: TasksetConfig, report: Report, imports: bool) -> TasksetConfig:
    flow, reward = taskset.default_workflow_type, taskset.default_reward_fn_type
    workflow = _found(WORKFLOWS, flow, _place(config, key, "default_workflow_type", flow), report, imports)
    where = _place(config, key, "default_reward_fn_type", reward)
    if reward is None and _is_scored(workflow):
        reward = workflow.default_reward
        if reward is None:
            report.add(where, None, f"must be given: workflow '{flow}' has no reward function of its own.")
    function = _found(REWARD_FNS, reward, where, report, imports)
    if function is None:
        return taskset
    given = taskset.reward_fn_args
    args = _fitting(function, str(reward), given, f"{key}.reward_fn_args", SCORED, report)
    return taskset.with_values({"reward_fn_args": args})


def _is_scored(workflow: Any) -> TypeGuard[type[SimpleWorkflow]]:
    """Whether a workflow asks for the reward function as `SimpleWorkflow` does."""
    return (
        isinstance(workflow, type)
        and issubclass(workflow, SimpleWorkflow)
        and workflow.run is SimpleWorkflow.run
        and workflow.reward_name is SimpleWorkflow.reward_name
    )


def _place(config: Config, key: str, name: str, value: str | None) -> str:
    """The key under which a task set's default was given: its own, or that of what surrounds it."""
    for above, section in ((INPUT, config.buffer.explorer_input), ("buffer", config.buffer)):
        if value is not None and getattr(section, name) == value:
            return f"{above}.{name}"
    return f"{key}.{name}"


def _found(registry: Registry[T], name: str | None, key: str, report: Report, imports: bool) -> T | None:
    if name is None or (name not in registry and "." in name and not imports):
        return None
    try:
        return registry.resolve(name)
    except TrinityError as error:
        report.add(key, name, f"{error}.")
        return None


def _fitting(
    function: Callable[..., Any],
    owner: str,
    given: Mapping[str, Any],
    key: str,
    inputs: Collection[str],
    report: Report,
) -> dict[str, Any]:
    """The arguments with the types that the function gives them; those it does not take are reported.

    A function with `**args` takes any; one that calls them `**_` reads none of them.
    """
    parameters = _parameters(function)
    if parameters is None:
        return dict(given)
    takes_any = any(p.kind is p.VAR_KEYWORD and not p.name.startswith("_") for p in parameters)
    kinds = {p.name: p.annotation for p in parameters if p.kind is not p.VAR_KEYWORD and p.name not in inputs}
    defaults = {p.name: p.default for p in parameters}
    values = dict(given)
    for name, value in given.items():
        if name not in kinds and not takes_any:
            takes = ", ".join(kinds) or "none"
            report.add(
                f"{key}.{name}", value, f"is no argument of '{owner}', which takes {takes}.", closest(name, kinds)
            )
        elif _is_plain(kinds.get(name)) and value is not defaults[name]:
            bound = convert(kinds[name], value, f"{key}.{name}", report)
            values[name] = value if bound is BAD else bound
    return values


def _parameters(function: Callable[..., Any]) -> list[inspect.Parameter] | None:
    """With their types, where its annotations are types; None of what has no signature, such as some built-ins."""
    try:
        plain = list(inspect.signature(function).parameters.values())
    except (TypeError, ValueError):
        return None
    try:
        return list(inspect.signature(function, eval_str=True).parameters.values())
    except (NameError, SyntaxError, AttributeError, LookupError, TypeError, ValueError):
        return plain  # an annotation may be any text, or stand for type checkers alone


def _is_plain(kind: Any) -> bool:
    """Whether a type is text, a number or a switch, or one of them or nothing."""
    options = set(get_args(kind) if get_origin(kind) in (types.UnionType, Union) else (kind,)) - {type(None)}
    return len(options) == 1 and options <= PLAIN
