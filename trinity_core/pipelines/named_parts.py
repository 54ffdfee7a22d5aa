"""Looks up the workflows, rewards and operators that a configuration names, and checks their arguments, before use.

A name that is looked up only when a task needs it would only fail that task, and the run would continue without its
data.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator, Mapping, Sequence
from itertools import chain
from pathlib import Path
from typing import Any, TypeGuard, TypeVar

from trinity_core.base.errors import InputError, TrinityError, closest
from trinity_core.config import Config, OperatorConfig, TasksetConfig
from trinity_core.config.arguments import fitting
from trinity_core.config.findings import Finding, Report
from trinity_core.config.paths import uses_pipeline
from trinity_core.config.rules.explorer import is_http
from trinity_core.config.rules.tasks import INPUT, eval_tasksets, training_tasksets
from trinity_core.config.schema.buffer import TaskSelectorConfig
from trinity_core.config.schema.monitor import DataJuicerConfig
from trinity_core.data.selectors import SELECTORS, check_columns
from trinity_core.pipelines import operators, shaping
from trinity_core.pipelines.data_juicer.client import steps_of
from trinity_core.pipelines.data_juicer.local import installed_operators, starts_own
from trinity_core.pipelines.operators import OPERATORS
from trinity_core.pipelines.shaping import taskset_balance_filter
from trinity_core.workflows import REWARD_FNS, WORKFLOWS, Registry, SimpleWorkflow
from trinity_core.workflows.agent import AgentWorkflow
from trinity_core.workflows.base import unknown_workflow
from trinity_core.workflows.conversation import ConversationWorkflow
from trinity_core.workflows.environments.workflow import EnvWorkflow
from trinity_core.workflows.rewards.functions import ANSWER, misfit
from trinity_core.workflows.rewards.models import MODEL_REWARDS

T = TypeVar("T")

EXPERIENCE_OPERATORS = "data_processor.experience_pipeline.operators"
TASK_OPERATORS_KEY = "data_processor.task_pipeline.operators"
PURE_MODULES = (operators.__name__, shaping.__name__)
"""Modules of experience operators that depend only on their arguments."""


def require_names(config: Config) -> Config:
    """Return the configuration with typed arguments of workflows, rewards and operators.

    For the process that uses them. Raises ConfigError unless all names, including dotted paths, are found and arguments
    fit.
    """
    report = Report()
    typed = _typed(config, report, imports=True)
    report.check()
    return typed


def check_names(config: Config, report: Report) -> Config:
    """Return the configuration with typed arguments of workflows, rewards and operators.

    Reports unknown names, unsuitable arguments, and judges and teachers that the run does not have. Dotted paths are
    trusted (`missing_names` imports them).
    """
    typed = _typed(config, report, imports=False)
    if config.mode != "train":
        tasksets = [*training_tasksets(typed), *eval_tasksets(typed)]
        faults = [_absent_models(config, key, taskset) for key, taskset in tasksets]
        faults += [_miscounted_turns(config, key, taskset) for key, taskset in training_tasksets(typed)]
        for fault in chain(*faults, _unread_rewards(config, tasksets), _absent_api(config, tasksets)):
            report.add(fault)
    section = typed.data_processor
    for key, pipeline, runs in (
        (EXPERIENCE_OPERATORS, section.experience_pipeline, config.explores),
        (TASK_OPERATORS_KEY, section.task_pipeline, uses_pipeline(config)),
    ):
        if pipeline is not None and runs:
            for fault in _data_juicer_faults(key, pipeline.operators, typed.service.data_juicer):
                report.add(fault)
    return typed


def missing_names(config: Config) -> list[Finding]:
    """Return the names of an exploring run that cannot be found, including dotted paths, which are imported. Like Ray's
    workers, also look for modules in the current folder."""
    if config.mode == "train":
        return []
    report, folder = Report(), str(Path.cwd())
    is_added = folder not in sys.path
    sys.path += [folder] * is_added
    try:
        _typed(config, report, imports=True)
    finally:
        if is_added:
            sys.path.remove(folder)
    return report.problems


def _typed(config: Config, report: Report, imports: bool) -> Config:
    """Return the configuration with typed arguments; unsuitable ones are reported and kept as given."""
    usual = config.buffer.explorer_input
    _resolved(WORKFLOWS, usual.default_workflow_type, f"{INPUT}.default_workflow_type", report, imports)
    _resolved(REWARD_FNS, usual.default_reward_fn_type, f"{INPUT}.default_reward_fn_type", report, imports)
    values: dict[str, Any] = {
        f"{INPUT}.{name}": [_typed_taskset(config, key, taskset, report, imports) for key, taskset in tasksets]
        for name, tasksets in (("tasksets", training_tasksets(config)), ("eval_tasksets", eval_tasksets(config)))
    }
    values[EXPERIENCE_OPERATORS] = [
        _check_experience_operator(config, operator, f"{EXPERIENCE_OPERATORS}[{index}]", report, imports)
        for index, operator in enumerate(config.data_processor.experience_pipeline.operators)
    ]
    if tasks := config.data_processor.task_pipeline:
        values[TASK_OPERATORS_KEY] = [
            _check_task_operator(config, operator, f"{TASK_OPERATORS_KEY}[{index}]", report, imports)
            for index, operator in enumerate(tasks.operators)
        ]
    return config.with_values(values)


def _typed_operator(
    registry: Registry[T], operator: OperatorConfig, key: str, report: Report, imports: bool
) -> OperatorConfig:
    operator_fn = _resolved(registry, operator.name, f"{key}.name", report, imports)
    if operator_fn is None:
        return operator
    args = fitting(registry, operator_fn, operator.name, operator.args, f"{key}.args", report)
    return operator.with_values({"args": args})


def _check_experience_operator(
    config: Config, operator: OperatorConfig, key: str, report: Report, imports: bool
) -> OperatorConfig:
    """Check an experience operator, including whether its arguments fit each other; ours check that before using any
    data."""
    faults = report.added
    typed = _typed_operator(OPERATORS, operator, key, report, imports)
    ours = OPERATORS.get(operator.name)
    if ours is None or ours.__module__ not in PURE_MODULES or report.added > faults:
        return typed
    try:
        ours([], **typed.args)
    except InputError as error:
        report.add(_refused(key, operator, error))
    names = [taskset.name for _, taskset in training_tasksets(config)]
    is_balance = ours is taskset_balance_filter and config.mode in ("both", "explore")
    shares = (typed.args.get("shares") or {}) if is_balance else {}
    for name in shares:
        if name not in names:
            there = ", ".join(map(str, names))
            report.add(
                Finding(
                    f"{key}.args.shares.{name}",
                    shares[name],
                    "unknown-name",
                    f"is the share of no task set; there is {there}.",
                )
            )
    return typed


def _check_task_operator(
    config: Config, operator: OperatorConfig, key: str, report: Report, imports: bool
) -> OperatorConfig:
    """Check a task operator, including whether its arguments fit each other, and whether its models can be called."""
    from trinity_core.pipelines.tasks import TASK_OPERATORS  # most runs have none
    from trinity_core.pipelines.tasks.curation import made_operator
    from trinity_core.pipelines.tasks.models import unknown_model

    faults, refused = report.added, report.touched((f"{key}.name",))
    typed = _typed_operator(TASK_OPERATORS, operator, key, report, imports)
    if report.added == faults and not refused and (imports or "." not in operator.name):
        try:
            asked = made_operator(typed).asks
        except TrinityError as error:
            report.add(_refused(key, operator, error))
        else:
            for model in asked:
                if why := unknown_model(config, model):
                    report.add(Finding(f"{key}.args.api_or_hf_model", model.name, "unknown-name", why))
    return typed


def _refused(key: str, operator: OperatorConfig, error: TrinityError) -> Finding:
    """Convert an operator's error to a finding, under the argument at fault if it was given."""
    if error.key in operator.args:
        return Finding(f"{key}.args.{error.key}", operator.args[error.key], "invalid", f"{error}.")
    return Finding(f"{key}.args", dict(operator.args), "invalid", f"{error}.")


def _typed_taskset(config: Config, key: str, taskset: TasksetConfig, report: Report, imports: bool) -> TasksetConfig:
    flow, reward = taskset.default_workflow_type, taskset.default_reward_fn_type
    workflow = _resolved(WORKFLOWS, flow, _place(config, key, "default_workflow_type", flow), report, imports)
    where = _place(config, key, "default_reward_fn_type", reward)
    if reward is None and isinstance(workflow, type) and issubclass(workflow, SimpleWorkflow):
        reward = workflow.own_reward(taskset.workflow_args)
        if reward is None and _is_scored(workflow):
            report.add(
                Finding(where, None, "missing", f"must be given: workflow '{flow}' has no reward function of its own.")
            )
    reward_fn = _resolved(REWARD_FNS, reward, where, report, imports)
    answers = reward_fn if reward not in MODEL_REWARDS else None
    if answers is not None and (fault := misfit(str(reward), answers, ANSWER)):
        report.add(Finding(where, reward, "invalid", f"{fault}."))
        reward_fn = None
    forced = taskset.rollout_args.structured_output
    if forced and isinstance(workflow, type) and issubclass(workflow, AgentWorkflow):
        message = f"must be left out with workflow '{flow}': its agents ask for their own grammars (response_format)."
        report.add(Finding(f"{key}.rollout_args.structured_output", list(forced), "conflict", message))
    values: dict[str, Any] = {}
    for registry, part, name, args in (
        (WORKFLOWS, workflow, flow, "workflow_args"),
        (REWARD_FNS, reward_fn, reward, "reward_fn_args"),
    ):
        if part is not None:
            values[args] = fitting(registry, part, str(name), getattr(taskset, args), f"{key}.{args}", report)
    return taskset.with_values(values | _typed_selector(key, taskset.task_selector, report, imports))


def _typed_selector(key: str, section: TaskSelectorConfig, report: Report, imports: bool) -> dict[str, Any]:
    key, name = f"{key}.task_selector", section.selector_type
    selector = _resolved(SELECTORS, name, f"{key}.selector_type", report, imports)
    if selector is None:
        return {}
    try:
        check_columns(name, len(section.feature_keys))
    except TrinityError as error:
        report.add(Finding(f"{key}.feature_keys", section.feature_keys, "invalid", f"{error}."))
    return {"task_selector.kwargs": fitting(SELECTORS, selector, name, section.kwargs, f"{key}.kwargs", report)}


def _data_juicer_faults(
    operators_key: str, listed: Sequence[OperatorConfig], service: DataJuicerConfig | None
) -> Iterator[Finding]:
    """Yield operators that use Data-Juicer wrongly, or without a Data-Juicer service."""
    used = [(index, operator) for index, operator in enumerate(listed) if operator.name == "data_juicer"]
    if used and service is not None and not starts_own(service) and not is_http(str(service.server_url)):
        message = "must be the address of a Data-Juicer server, such as http://127.0.0.1:5005."
        yield Finding("service.data_juicer.server_url", service.server_url, "invalid", message)
    for index, operator in used:
        key = f"{operators_key}[{index}]"
        if service is None:
            message = "needs a server: give service.data_juicer, with `auto_start: true` or the `server_url` of one."
            yield Finding(f"{key}.name", operator.name, "missing", message)
        try:
            steps = steps_of(operator.args.get("operators"), operator.args.get("config_path"))
            installed = installed_operators() if service is not None and starts_own(service) else None
        except TrinityError as error:
            argument = ".config_path" if "config_path" in operator.args else ""
            yield Finding(f"{key}.args{argument}", operator.args, "invalid", f"{str(error).rstrip('.')}.")
            continue
        for number, name in enumerate(name for step in steps for name in step):
            if installed is not None and name not in installed:
                argument = "config_path" if "config_path" in operator.args else f"operators[{number}]"
                message = f"Data-Juicer has no operator '{name}'."
                yield Finding(
                    f"{key}.args.{argument}", name, "unknown-name", message, suggestion=closest(name, installed)
                )


def _absent_models(config: Config, key: str, taskset: TasksetConfig) -> Iterator[Finding]:
    """Yield a finding if the task set's reward or workflow needs a model that the run does not have."""
    flow = taskset.default_workflow_type
    workflow = WORKFLOWS.get(flow or "")
    reward = taskset.default_reward_fn_type or (workflow.default_reward if _is_scored(workflow) else None)
    names = [model.called for model in config.explorer.auxiliary_models]
    for asks, default, name, args in (
        (workflow is not None and workflow.asks_models, "default_workflow_type", flow, "workflow_args"),
        (reward in MODEL_REWARDS, "default_reward_fn_type", reward, "reward_fn_args"),
    ):
        arguments = getattr(taskset, args)
        if not asks:
            continue
        yield from _endpoint_faults(f"{key}.{args}", arguments)
        if arguments.get("base_url"):
            continue
        if not names:
            where = _place(config, key, default, getattr(taskset, default))
            yield Finding(
                where,
                name,
                "missing",
                f"'{name}' asks another model than the policy: add it to explorer.auxiliary_models.",
            )
        elif arguments.get("model") and arguments["model"] not in names:
            message = f"is the name of no auxiliary model; there is {', '.join(names)}."
            yield Finding(f"{key}.{args}.model", arguments["model"], "unknown-name", message)


def _absent_api(config: Config, tasksets: Sequence[tuple[str, TasksetConfig]]) -> Iterator[Finding]:
    """Yield workflows that need the OpenAI API if the run serves none."""
    if config.explorer.rollout_model.enable_openai_api or config.external_model is not None:
        return
    for _, taskset in tasksets:
        workflow = WORKFLOWS.get(taskset.default_workflow_type or "")
        if isinstance(workflow, type) and issubclass(workflow, AgentWorkflow):
            message = f"must be true: the agent of '{taskset.default_workflow_type}' talks to the run's OpenAI API."
            yield Finding("explorer.rollout_model.enable_openai_api", False, "conflict", message)
            return


def _endpoint_faults(key: str, arguments: Mapping[str, Any]) -> Iterator[Finding]:
    """Yield endpoint arguments of a judge without an endpoint, and model arguments given together with an endpoint."""
    url = arguments.get("base_url")
    if url and not arguments.get("model_name"):
        yield Finding(
            f"{key}.model_name",
            arguments.get("model_name"),
            "missing",
            "must be given with base_url: the endpoint's model.",
        )
    if url and arguments.get("model"):
        yield Finding(
            f"{key}.model",
            arguments["model"],
            "conflict",
            "names an auxiliary model, but the judge is at base_url: leave one out.",
        )
    for name in ("model_name", "api_key_env", "requests_at_once", "requests_per_minute", "tokens_per_minute"):
        if arguments.get(name) and not url:
            yield Finding(f"{key}.{name}", arguments[name], "missing", "belongs to an endpoint: give its base_url too.")


def _miscounted_turns(config: Config, key: str, taskset: TasksetConfig) -> Iterator[Finding]:
    """Yield settings whose per-turn rewards are not what the algorithm compares or sums."""
    flow, args = taskset.default_workflow_type, taskset.workflow_args
    workflow, advantage = WORKFLOWS.get(flow or ""), config.algorithm.advantage_fn
    if workflow is None or advantage not in ("step_wise_grpo", "gigpo"):
        return
    if advantage == "gigpo" and issubclass(workflow, AgentWorkflow):
        message = (
            "gives each sequence of a session the rollout's reward, and gigpo would add these up: take grpo or rloo."
        )
        yield Finding(_place(config, key, "default_workflow_type", flow), flow, "conflict", message)
    if not args.get("step_wise") or not issubclass(workflow, EnvWorkflow | ConversationWorkflow):
        return
    whole = args.get("turn_rewards") == "rollout"
    if advantage == "step_wise_grpo" and issubclass(workflow, EnvWorkflow) and not whole:
        message = "must be rollout for step_wise_grpo, which compares the rewards of last turns."
        yield Finding(f"{key}.workflow_args.turn_rewards", args.get("turn_rewards"), "conflict", message)
    elif advantage == "gigpo" and whole:
        message = "must be return, with discount 0, for gigpo, which adds up the rewards of turns itself."
        yield Finding(f"{key}.workflow_args.turn_rewards", "rollout", "conflict", message)
    elif advantage == "gigpo" and args.get("discount") != 0:
        message = (
            "must be 0 for gigpo, which adds up later rewards itself, discounted by advantage_fn_args.gamma: "
            "else they count twice, and a late success is worth more than an early one."
        )
        yield Finding(f"{key}.workflow_args.discount", args.get("discount"), "conflict", message)


def _unread_rewards(config: Config, tasksets: Sequence[tuple[str, TasksetConfig]]) -> Iterator[Finding]:
    """Yield reward functions of task sets whose rewards come from an environment, and arguments that nothing reads.

    A reward function for all task sets is used if one of them has no environment.
    """
    unread = {key: taskset for key, taskset in tasksets if _reward_is_environments(taskset)}
    for key, taskset in unread.items():
        reward, where = taskset.default_reward_fn_type, f"{key}.default_reward_fn_type"
        message = f"is not read by {taskset.default_workflow_type}, whose rewards are the environment's: leave it out."
        if reward is not None:
            where = _place(config, key, "default_reward_fn_type", reward)
            if where.startswith(key) or len(unread) == len(tasksets):
                yield Finding(where, reward, "conflict", message)
        if taskset.reward_fn_args:
            yield Finding(f"{key}.reward_fn_args", dict(taskset.reward_fn_args), "conflict", message)
    for key, taskset in tasksets:
        alone = taskset.default_workflow_type == "command_workflow" and taskset.default_reward_fn_type is None
        if alone and taskset.reward_fn_args:
            message = "is read with a default_reward_fn_type alone: without one the command reports the reward."
            yield Finding(f"{key}.reward_fn_args", dict(taskset.reward_fn_args), "conflict", message)


def _reward_is_environments(taskset: TasksetConfig) -> bool:
    workflow = WORKFLOWS.get(taskset.default_workflow_type or "")
    return workflow is not None and issubclass(workflow, EnvWorkflow) and workflow.run is EnvWorkflow.run


def reward_of(taskset: TasksetConfig) -> str | None:
    """Return the reward function that judges a task set's answers; None if none does."""
    workflow, name = WORKFLOWS.resolve(taskset.default_workflow_type or ""), taskset.default_reward_fn_type
    if _reward_is_environments(taskset):
        return None
    return name or (workflow.own_reward(taskset.workflow_args) if _is_scored(workflow) else None)


def _is_scored(workflow: Any) -> TypeGuard[type[SimpleWorkflow]]:
    """True if a workflow uses the reward function as `SimpleWorkflow` does."""
    return (
        isinstance(workflow, type)
        and issubclass(workflow, SimpleWorkflow)
        and workflow.run is SimpleWorkflow.run
        and workflow.reward_name is SimpleWorkflow.reward_name
    )


def _place(config: Config, key: str, name: str, value: str | None) -> str:
    """Return the key under which a task set's default was given: its own, or that of an outer section."""
    is_usual = value is not None and getattr(config.buffer.explorer_input, name) == value
    return f"{INPUT if is_usual else key}.{name}"


def _resolved(registry: Registry[T], name: str | None, key: str, report: Report, imports: bool) -> T | None:
    if name is None or (registry.is_imported(name) and not imports) or report.touched((key,)):
        return None
    if registry is WORKFLOWS and name not in registry and not registry.is_imported(name):
        report.add(Finding(key, name, "unknown-name", unknown_workflow(name)))
        return None
    try:
        return registry.resolve(name)
    except TrinityError as error:
        report.add(Finding(key, name, "unknown-name", f"{error}."))
        return None
