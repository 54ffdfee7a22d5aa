"""The workflows, rewards and operators that a configuration names: looked up, with their arguments, before any is used.

A name that is looked up only when a task needs it fails that task alone, and the run continues without its data.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, TypeGuard, TypeVar

from trinity_core.config import Config, OperatorConfig, TasksetConfig
from trinity_core.config.external_rules import is_http
from trinity_core.config.named import fitting
from trinity_core.config.problems import Report
from trinity_core.config.rules import INPUT, eval_tasksets, training_tasksets
from trinity_core.config.schema.buffer import TaskSelectorConfig
from trinity_core.config.schema.monitor import DataJuicerConfig
from trinity_core.config.task_output import uses_pipeline
from trinity_core.data.selectors import SELECTORS, check_columns
from trinity_core.errors import InputError, TrinityError
from trinity_core.pipelines import operators, shaping
from trinity_core.pipelines.data_juicer.client import steps_of
from trinity_core.pipelines.data_juicer.installed import installed_operators
from trinity_core.pipelines.data_juicer.local import starts_own
from trinity_core.pipelines.operators import OPERATORS
from trinity_core.pipelines.shaping import taskset_balance_filter
from trinity_core.pipelines.tasks import TASK_OPERATORS
from trinity_core.pipelines.tasks.curation import made_operator
from trinity_core.pipelines.tasks.models import unknown_model
from trinity_core.slips import closest
from trinity_core.workflows import REWARD_FNS, WORKFLOWS, Registry, SimpleWorkflow
from trinity_core.workflows.elsewhere import unknown_workflow
from trinity_core.workflows.environments.workflow import EnvWorkflow
from trinity_core.workflows.rewards.models import MODEL_REWARDS

T = TypeVar("T")

OPERATED = "data_processor.experience_pipeline.operators"
CURATED = "data_processor.task_pipeline.operators"
OURS = (operators.__name__, shaping.__name__)
"""Modules of experience operators that are functions of their arguments alone."""


def require_names(config: Config) -> Config:
    """The configuration with the arguments of workflows, rewards and operators in the types that they take.

    For the process that uses them. Raises ConfigError unless all names are found, dotted paths too, and arguments fit.
    """
    report = Report()
    typed = _typed(config, report, imports=True)
    report.check()
    return typed


def check_names(config: Config, report: Report) -> None:
    """Report names that are not found, arguments that do not fit, and judges and teachers that the run does not have.

    A dotted path is trusted.
    """
    typed = _typed(config, report, imports=False)
    if config.mode != "train":
        tasksets = [*training_tasksets(typed), *eval_tasksets(typed)]
        for key, taskset in tasksets:
            _check_models(config, key, taskset, report)
            _check_turns(config, key, taskset, report)
        _check_unread_rewards(config, tasksets, report)
    given = typed.data_processor
    for key, pipeline, runs in (
        (OPERATED, given.experience_pipeline, config.explores), (CURATED, given.task_pipeline, uses_pipeline(config)),
    ):  # fmt: skip
        if pipeline is not None and runs:
            _check_data_juicer(key, pipeline.operators, typed.service.data_juicer, report)


def typed_arguments(config: Config) -> Config:
    """The configuration with the arguments of workflows, rewards and operators in the types that they take."""
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
            _tried_operator(config, operator, f"{OPERATED}[{index}]", report, imports)
            for index, operator in enumerate(pipeline.operators)
        ]
    if tasks := config.data_processor.task_pipeline:
        values[CURATED] = [
            _made_operator(config, operator, f"{CURATED}[{index}]", report, imports)
            for index, operator in enumerate(tasks.operators)
        ]
    return config.with_values(values)


def _typed_operator(
    registry: Registry[T], operator: OperatorConfig, key: str, report: Report, imports: bool
) -> OperatorConfig:
    found = _found(registry, operator.name, f"{key}.name", report, imports)
    if found is None:
        return operator
    args = fitting(registry, found, operator.name, operator.args, f"{key}.args", report)
    return operator.with_values({"args": args})


def _tried_operator(
    config: Config, operator: OperatorConfig, key: str, report: Report, imports: bool
) -> OperatorConfig:
    """An experience operator whose arguments also suit each other: one of ours says so before it looks at anything."""
    before = len(report.problems)
    typed = _typed_operator(OPERATORS, operator, key, report, imports)
    ours = OPERATORS.get(operator.name)
    if ours is None or ours.__module__ not in OURS or len(report.problems) > before:
        return typed
    try:
        ours([], **typed.args)
    except InputError as error:
        report.add(f"{key}.args", dict(operator.args), f"{error}.")
    names = [taskset.name for _, taskset in training_tasksets(config)]
    is_balance = ours is taskset_balance_filter and config.mode in ("both", "explore")
    shares = (typed.args.get("shares") or {}) if is_balance else {}
    for name in shares:
        if name not in names:
            there = ", ".join(map(str, names))
            report.add(f"{key}.args.shares.{name}", shares[name], f"is the share of no task set; there is {there}.")
    return typed


def _made_operator(config: Config, operator: OperatorConfig, key: str, report: Report, imports: bool) -> OperatorConfig:
    """A task operator whose arguments also suit each other, and whose models can be asked."""
    before = len(report.problems)
    typed = _typed_operator(TASK_OPERATORS, operator, key, report, imports)
    if len(report.problems) == before and (imports or "." not in operator.name):
        try:
            asked = made_operator(typed).asks
        except TrinityError as error:
            report.add(f"{key}.args", dict(operator.args), f"{error}.")
        else:
            for model in asked:
                if why := unknown_model(config, model):
                    report.add(f"{key}.args.api_or_hf_model", model.name, why)
    return typed


def _typed_taskset(config: Config, key: str, taskset: TasksetConfig, report: Report, imports: bool) -> TasksetConfig:
    flow, reward = taskset.default_workflow_type, taskset.default_reward_fn_type
    workflow = _found(WORKFLOWS, flow, _place(config, key, "default_workflow_type", flow), report, imports)
    where = _place(config, key, "default_reward_fn_type", reward)
    if reward is None and isinstance(workflow, type) and issubclass(workflow, SimpleWorkflow):
        reward = workflow.own_reward(taskset.workflow_args)
        if reward is None and _is_scored(workflow):
            report.add(where, None, f"must be given: workflow '{flow}' has no reward function of its own.")
    values: dict[str, Any] = {}
    for registry, part, name, args in (
        (WORKFLOWS, workflow, flow, "workflow_args"),
        (REWARD_FNS, _found(REWARD_FNS, reward, where, report, imports), reward, "reward_fn_args"),
    ):
        if part is not None:
            values[args] = fitting(registry, part, str(name), getattr(taskset, args), f"{key}.{args}", report)
    return taskset.with_values(values | _typed_selector(key, taskset.task_selector, report, imports))


def _typed_selector(key: str, given: TaskSelectorConfig, report: Report, imports: bool) -> dict[str, Any]:
    """The arguments of a task selector, by their key in the task set."""
    key, name = f"{key}.task_selector", given.selector_type
    selector = _found(SELECTORS, name, f"{key}.selector_type", report, imports)
    if selector is None:
        return {}
    try:
        check_columns(name, len(given.feature_keys))
    except TrinityError as error:
        report.add(f"{key}.feature_keys", given.feature_keys, f"{error}.")
    return {"task_selector.kwargs": fitting(SELECTORS, selector, name, given.kwargs, f"{key}.kwargs", report)}


def _check_data_juicer(
    operated: str, given: Sequence[OperatorConfig], service: DataJuicerConfig | None, report: Report
) -> None:
    """Report operators that use Data-Juicer wrongly, or where the run has none."""
    used = [(index, operator) for index, operator in enumerate(given) if operator.name == "data_juicer"]
    if used and service is not None and not starts_own(service) and not is_http(str(service.server_url)):
        message = "must be the address of a Data-Juicer server, such as http://127.0.0.1:5005."
        report.add("service.data_juicer.server_url", service.server_url, message)
    for index, operator in used:
        key = f"{operated}[{index}]"
        if service is None:
            told = "needs a server: give service.data_juicer, with `auto_start: true` or the `server_url` of one."
            report.add(f"{key}.name", operator.name, told)
        try:
            steps = steps_of(operator.args.get("operators"), operator.args.get("config_path"))
            known = installed_operators() if service is not None and starts_own(service) else None
        except TrinityError as error:
            named = ".config_path" if "config_path" in operator.args else ""
            report.add(f"{key}.args{named}", operator.args, f"{str(error).rstrip('.')}.")
            continue
        for place, name in enumerate(name for step in steps for name in step):
            if known is not None and name not in known:
                named = "config_path" if "config_path" in operator.args else f"operators[{place}]"
                told = f"Data-Juicer has no operator '{name}'."
                report.add(f"{key}.args.{named}", name, told, closest(name, known))


def _check_models(config: Config, key: str, taskset: TasksetConfig, report: Report) -> None:
    """Report a task set whose reward or workflow asks a model that the run does not have."""
    flow = taskset.default_workflow_type
    workflow = WORKFLOWS.get(flow or "")
    reward = taskset.default_reward_fn_type or (workflow.default_reward if _is_scored(workflow) else None)
    names = [model.name or model.model_path for model in config.explorer.auxiliary_models]
    for asks, default, name, args in (
        (workflow is not None and workflow.asks_models, "default_workflow_type", flow, "workflow_args"),
        (reward in MODEL_REWARDS, "default_reward_fn_type", reward, "reward_fn_args"),
    ):
        given = getattr(taskset, args)
        if not asks:
            continue
        _check_endpoint(f"{key}.{args}", given, report)
        if given.get("base_url"):
            continue
        if not names:
            where = _place(config, key, default, getattr(taskset, default))
            report.add(
                where, name, f"'{name}' asks another model than the policy: add it to explorer.auxiliary_models."
            )
        elif given.get("model") and given["model"] not in names:
            told = f"is the name of no auxiliary model; there is {', '.join(names)}."
            report.add(f"{key}.{args}.model", given["model"], told)


def _check_endpoint(key: str, given: Mapping[str, Any], report: Report) -> None:
    """Report arguments of a judge behind an endpoint without one, and those of another judge beside one."""
    url = given.get("base_url")
    if url and not given.get("model_name"):
        report.add(f"{key}.model_name", given.get("model_name"), "must be given with base_url: the endpoint's model.")
    if url and given.get("model"):
        report.add(
            f"{key}.model", given["model"], "names an auxiliary model, but the judge is at base_url: leave one out."
        )
    for name in ("model_name", "api_key_env"):
        if given.get(name) and not url:
            report.add(f"{key}.{name}", given[name], "belongs to an endpoint: give its base_url too.")


def _check_turns(config: Config, key: str, taskset: TasksetConfig, report: Report) -> None:
    """Report an environment whose turns have rewards that the algorithm cannot compare."""
    workflow, args = WORKFLOWS.get(taskset.default_workflow_type or ""), taskset.workflow_args
    if workflow is None or not issubclass(workflow, EnvWorkflow) or not args.get("step_wise"):
        return
    if config.algorithm.advantage_fn == "step_wise_grpo" and args.get("turn_rewards", "return") != "rollout":
        message = "must be rollout for step_wise_grpo, which compares the rewards of last turns."
        report.add(f"{key}.workflow_args.turn_rewards", args.get("turn_rewards"), message)


def _check_unread_rewards(config: Config, tasksets: Sequence[tuple[str, TasksetConfig]], report: Report) -> None:
    """Report reward functions of task sets whose rewards are an environment's, and arguments that nothing reads.

    A reward function for all task sets is read if one of them is of another kind.
    """
    unread = {key: taskset for key, taskset in tasksets if _is_played(taskset)}
    for key, taskset in unread.items():
        reward, where = taskset.default_reward_fn_type, f"{key}.default_reward_fn_type"
        message = f"is not read by {taskset.default_workflow_type}, whose rewards are the environment's: leave it out."
        if reward is not None:
            where = _place(config, key, "default_reward_fn_type", reward)
            if where.startswith(key) or len(unread) == len(tasksets):
                report.add(where, reward, message)
        if taskset.reward_fn_args:
            report.add(f"{key}.reward_fn_args", dict(taskset.reward_fn_args), message)
    for key, taskset in tasksets:
        alone = taskset.default_workflow_type == "command_workflow" and taskset.default_reward_fn_type is None
        if alone and taskset.reward_fn_args:
            told = "is read with a default_reward_fn_type alone: without one the command reports the reward."
            report.add(f"{key}.reward_fn_args", dict(taskset.reward_fn_args), told)


def _is_played(taskset: TasksetConfig) -> bool:
    """True if the task set's rewards are those of an environment."""
    workflow = WORKFLOWS.get(taskset.default_workflow_type or "")
    return workflow is not None and issubclass(workflow, EnvWorkflow) and workflow.run is EnvWorkflow.run


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
    if registry is WORKFLOWS and name not in registry and "." not in name:
        report.add(key, name, unknown_workflow(name))
        return None
    try:
        return registry.resolve(name)
    except TrinityError as error:
        report.add(key, name, f"{error}.")
        return None
