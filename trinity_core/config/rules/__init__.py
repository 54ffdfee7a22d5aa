"""Rules between settings, one file per part of the configuration. Rules report findings and never raise.

A finding is dropped if a setting it rests on is already reported.
"""

from __future__ import annotations

from collections.abc import Iterator

from trinity_core.config.findings import Finding, Report, repeated_names, unusable_name
from trinity_core.config.rules import algorithm, experiences, explorer, resources, tasks
from trinity_core.config.schema import BufferConfig, Config


def check(written: Config, config: Config, report: Report) -> None:
    """Report every contradiction between what was written and, in `config`, what it resolves to."""
    rules = (
        _names,
        algorithm.algorithm_rules,
        algorithm.model_rules,
        resources.colocation_rules,
        resources.cluster_rules,
        experiences.batch_rules,
        tasks.task_rules,
        algorithm.sampling_rules,
        algorithm.distillation_rules,
        experiences.experience_rules,
        resources.synchronizer_rules,
        resources.staleness_rules,
        resources.lora_rules,
        explorer.auxiliary_rules,
        explorer.engine_argument_rules,
        explorer.external_rules,
        explorer.openai_api_rules,
        _serve,
        tasks.joined_rules,
        resources.trainer_rules,
    )
    findings = [
        *_spelled_twice(written),
        *tasks.tasks_spelled_twice(written),
        *(finding for rule in rules for finding in rule(config)),
    ]
    report.extend(findings)


def check_stage_list(config: Config, report: Report) -> None:
    """Report stages without a usable name or with a repeated one."""
    names = [(f"stages[{index}].stage_name", stage.stage_name) for index, stage in enumerate(config.stages)]
    for key, name in names:
        if wrong := unusable_name(name):
            report.add(Finding(key, name, "invalid", wrong))
    report.extend(repeated_names("stages", names))


def _spelled_twice(written: Config) -> Iterator[Finding]:
    inputs = written.buffer.explorer_input
    if inputs.taskset is not None and inputs.tasksets:
        yield Finding(f"{tasks.INPUT}.tasksets", None, "two-spellings", "give this or taskset, not both.")
    steps, other = written.buffer.total_steps, written.trainer.total_steps
    if steps is not None and other is not None and steps != other:
        yield Finding(
            "trainer.total_steps",
            other,
            "two-spellings",
            f"is {other}, but buffer.total_steps is {steps}; give one of them.",
        )
    optimizer = written.algorithm.optimizer
    if optimizer.lr_warmup_steps and optimizer.lr_warmup_steps_ratio:
        message = "give this or lr_warmup_steps, not both."
        yield Finding(
            "algorithm.optimizer.lr_warmup_steps_ratio", optimizer.lr_warmup_steps_ratio, "two-spellings", message
        )
    if written.model.custom_chat_template and written.model.chat_template_path:
        message = "give this or custom_chat_template, not both."
        yield Finding("model.chat_template_path", written.model.chat_template_path, "two-spellings", message)


def _names(config: Config) -> Iterator[Finding]:
    for key, name in (("project", config.project), ("name", config.name)):
        if wrong := unusable_name(name):
            yield Finding(key, name, "invalid", wrong)


def _serve(config: Config) -> Iterator[Finding]:
    """Yield settings that contradict mode `serve` or have no effect there."""
    if config.mode != "serve":
        return
    if not config.explorer.rollout_model.enable_openai_api:
        message = "must be true in mode serve, whose users come through that API."
        yield Finding("explorer.rollout_model.enable_openai_api", False, "conflict", message, ("mode",))
    for key in (f"{tasks.INPUT}.taskset", f"{tasks.INPUT}.tasksets"):
        if config.written(key):
            message = "must be left out in mode serve: users' requests take the place of tasks."
            yield Finding(key, None, "conflict", message, ("mode",))
    for key, default in (("buffer.total_steps", None), ("buffer.total_epochs", BufferConfig().total_epochs)):
        if (length := config.written(key)) not in (None, default):
            message = "must be left out in mode serve, which ends when its trainer has finished; set it there."
            yield Finding(key, length, "conflict", message, ("mode",))
    if config.synchronizer.max_staleness is not None:
        message = "must be left out in mode serve: the time of users' feedback is unknown."
        yield Finding("synchronizer.max_staleness", config.synchronizer.max_staleness, "conflict", message, ("mode",))
