"""Rules between settings, one file per part of the configuration. Rules report findings and never raise.

A finding is dropped if a setting it rests on is already reported.
"""

from __future__ import annotations

from collections.abc import Iterator

from trinity_core.config.findings import Finding, Report, conflict, repeated_names, unusable_name
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
        resources.stop_rules,
        resources.pause_rules,
        experiences.batch_rules,
        tasks.task_rules,
        algorithm.sampling_rules,
        algorithm.distillation_rules,
        algorithm.grammar_rules,
        experiences.experience_rules,
        resources.synchronizer_rules,
        resources.staleness_rules,
        resources.lora_rules,
        explorer.auxiliary_rules,
        explorer.engine_argument_rules,
        explorer.evaluation_rules,
        explorer.external_rules,
        explorer.openai_api_rules,
        _serve,
        tasks.joined_rules,
        resources.trainer_rules,
        tasks.gate_rules,
    )
    report.extend([*_spelled_twice(written), *(finding for rule in rules for finding in rule(config))])


def check_stage_list(config: Config, report: Report) -> None:
    """Report stages without a usable name or with a repeated one."""
    names = [(f"stages[{index}].stage_name", stage.stage_name) for index, stage in enumerate(config.stages)]
    for key, name in names:
        if wrong := unusable_name(name):
            report.add(Finding(key, name, "invalid", wrong))
    report.extend(repeated_names("stages", names))


def _spelled_twice(written: Config) -> Iterator[Finding]:
    optimizer, model, inputs = written.algorithm.optimizer, written.model, written.buffer.explorer_input
    twice: list[tuple[str, str, object]] = [
        (f"{tasks.INPUT}.tasksets", "taskset", inputs.taskset is not None and inputs.tasksets),
        (
            "algorithm.optimizer.lr_warmup_steps_ratio",
            "lr_warmup_steps",
            optimizer.lr_warmup_steps and optimizer.lr_warmup_steps_ratio,
        ),
        (
            "model.chat_template_path",
            "custom_chat_template",
            model.chat_template_path and model.custom_chat_template,
        ),
    ]
    for key, taskset in tasks.written_tasksets(written):
        both = taskset.weight is not None and taskset.weight_by_step
        twice.append((f"{key}.weight_by_step", "weight", both))
    for key, other, is_given in twice:
        if is_given:
            yield conflict(written, key, f"give this or {other}, not both.", code="two-spellings")


def _names(config: Config) -> Iterator[Finding]:
    for key in ("project", "name"):
        if wrong := unusable_name(getattr(config, key)):
            yield conflict(config, key, wrong, code="invalid")


def _serve(config: Config) -> Iterator[Finding]:
    """Yield settings that contradict mode `serve` or have no effect there."""
    if config.mode != "serve":
        return
    if not config.explorer.rollout_model.enable_openai_api:
        message = "must be true in mode serve, whose users come through that API."
        yield conflict(config, "explorer.rollout_model.enable_openai_api", message, "mode")
    usual = {"buffer.total_epochs": BufferConfig().total_epochs}
    for key, why in {
        f"{tasks.INPUT}.taskset": "users' requests take the place of tasks.",
        f"{tasks.INPUT}.tasksets": "users' requests take the place of tasks.",
        "buffer.total_steps": "it ends when its trainer has finished; set it there.",
        "buffer.total_epochs": "it ends when its trainer has finished; set it there.",
        "synchronizer.max_staleness": "the time of users' feedback is unknown.",
    }.items():
        if config.written(key) not in (None, [], usual.get(key)):
            yield conflict(config, key, f"must be left out in mode serve: {why}", "mode")
