"""Finds every problem that would prevent a run from starting, before any process is started."""

from __future__ import annotations

import errno
import json
import os
import socket
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

from trinity_core.base.addresses import holder_of, in_words, is_orphan
from trinity_core.base.errors import DataError, TransientFault, TrinityError
from trinity_core.base.processes import cores
from trinity_core.config import Config, notices, stages
from trinity_core.config.findings import ConfigError, Finding, Report
from trinity_core.config.paths import PIPELINE, explored_file, operator_input_file, output_root, uses_pipeline
from trinity_core.config.rules.tasks import eval_tasksets, training_tasksets
from trinity_core.data.chat import ChatEncoder
from trinity_core.data.tokenizer import policy_encoder
from trinity_core.hosting.gpus import survey
from trinity_core.hosting.placement import Machine, flow_of, place, weakest
from trinity_core.pipelines.named_parts import missing_names
from trinity_core.run.configuration import load_checked
from trinity_core.run.preflight.first_rows import trial_of_rows
from trinity_core.run.preflight.memory import auxiliary_kind
from trinity_core.run.preflight.models import (
    missing_folders,
    missing_models,
    missing_packages,
    missing_template,
    spread_reward_models,
    unfit_policy,
)
from trinity_core.run.preflight.needs import ENGINE, REWARDS, TRAINER
from trinity_core.run.preflight.room import room_for, shortages
from trinity_core.run.preflight.stage_plan import plans_of


def check_opened(config: Config, report: Report) -> None:
    """Report problems that prevent a run from starting, with file and line. Other findings become the configuration's
    `remarks`."""
    if config.stages:
        return
    findings = [*_opened(config, report.stage in (None, "stages[0]"))]
    if not report.problems:  # sizes can be computed only from valid settings
        findings += oversized(config)
    report.extend(_refused(config, findings))


def _refused(config: Config, findings: Sequence[Finding]) -> list[Finding]:
    """Return the errors among the findings; the others become the configuration's `remarks`."""
    config.remarks[:] = [finding for finding in findings if finding.severity != "error"]
    return [finding for finding in findings if finding.severity == "error"]


def _policy(config: Config) -> tuple[ChatEncoder | None, list[Finding]]:
    """Return tokenizer and chat template of a policy in a local folder, and what is wrong with them. None if they
    cannot be used, or are not here."""
    from jinja2 import TemplateSyntaxError

    model = config.model
    if config.external_model or config.cluster.ray_address or not Path(model.model_path).is_dir():
        return None, []
    setting = "chat_template_path" if model.chat_template_path else "custom_chat_template"
    key, value = f"model.{setting}", getattr(model, setting)
    try:
        encoder = policy_encoder(model)
    except TrinityError as error:  # training on sampled tokens needs no template
        needs_template = config.mode != "train" or config.is_supervised
        return None, [Finding(key, value, "missing", f"must be given: {error}.")] if needs_template else []
    except (OSError, ValueError) as error:
        message = f"the tokenizer of {model.model_path} cannot be loaded: {error}."
        return None, [Finding("model", None, "invalid", message, severity="warning")]
    try:
        encoder.render([{"role": "user", "content": "?"}], prompt=True)
    except DataError as error:
        if isinstance(error.__cause__, TemplateSyntaxError):
            where = key if value else "model.model_path"
            return None, [Finding(where, value or model.model_path, "invalid", f"{error}.")]
    return encoder, []


def load_ready(path: Path | str, overrides: Sequence[str] = ()) -> Config:
    """Like `load_checked`, for a run that can start: all models, data and folders it names exist. Raises ConfigError
    with every problem."""
    return load_checked(path, overrides, check_opened)


def require_ready(config: Config) -> None:
    """Raise ConfigError if something prevents a run (a configuration without stages) from starting on this machine,
    TransientFault if all problems may resolve themselves. Other findings become its `remarks`.

    If the run joins a Ray cluster (`cluster.ray_address`), only its folder is checked: once nodes are reserved, they
    check models, names and room (`unready_node`), and open data and ports.
    """
    if problems := _refused(config, (*_opened(config, True), *oversized(config))):
        raise refusal(problems)


def refusal(problems: Sequence[Finding]) -> ConfigError | TransientFault:
    """Return the error for problems that prevent a run; a TransientFault if all of them may resolve themselves."""
    if all(problem.code == "busy" for problem in problems):
        return TransientFault("; ".join(map(str, problems)))
    return ConfigError(problems)


@dataclass(frozen=True, slots=True)
class Validation:
    """The result of `trinity validate`: the stages of an accepted configuration, or its problems."""

    opened: bool
    """True if models, data, folders, port and GPUs were checked on this machine."""
    stages: list[dict[str, Any]]
    """Name, project, algorithm, mode, folder and notices of each."""
    problems: list[Finding]
    flow: str = ""
    """The flow that runs the configuration."""
    run: str = ""
    """`project/name` of the whole run, whose folder is `job_dir`."""
    job_dir: str = ""

    @property
    def accepted(self) -> bool:
        return not self.problems

    def text(self) -> str:
        if self.problems:
            return f"error: {ConfigError(self.problems)}"
        lines = []
        for stage in self.stages:
            lines.append("{project}/{name}: {algorithm}, mode {mode}, {job_dir}".format(**stage))
            lines += [f"  {notice}" for notice in stage["notices"]]
        unopened = "" if self.opened else " Models, data and ports were not opened."
        return "\n".join([*lines, f"The configuration is fine.{unopened}"])

    def json(self) -> str:
        """Return JSON without the problems' values, which may be secrets."""
        problems = [
            {name: value for name, value in asdict(problem).items() if name != "value"} for problem in self.problems
        ]
        return json.dumps({"accepted": self.accepted, **asdict(self), "problems": problems}, indent=2)


def validate(path: Path | str, overrides: Sequence[str], offline: bool) -> Validation:
    try:
        config = load_checked(path, overrides, None if offline else check_opened)
    except ConfigError as error:
        return Validation(False, [], error.problems)
    listed = [
        {
            "name": stage.name,
            "project": stage.project,
            "algorithm": stage.algorithm.algorithm_type,
            "mode": stage.mode,
            "job_dir": str(stage.job_dir),
            "notices": [*notices(stage), *map(str, stage.remarks)],
        }
        for stage in stages(config)
    ]
    run = f"{config.project}/{config.name}"
    opened = not offline and not config.cluster.ray_address
    return Validation(opened, listed, [], flow_of(config), run, str(config.job_dir))


def _opened(config: Config, is_first: bool) -> Iterator[Finding]:
    """Check everything on this machine except sizes."""
    encoder, faults = _policy(config)
    yield from faults
    yield from unwritable_folders(config)
    if config.cluster.ray_address:
        return
    yield from absent_secrets(config)
    yield from missing_models(config, is_first)
    yield from missing_packages(config)
    unknown = missing_names(config)
    yield from unknown
    yield from trial_of_rows(config, is_first, encoder, judges=not unknown)
    yield from busy_port(config)
    yield from missing_gpus(config, cores())


def unwritable_folders(config: Config) -> Iterator[Finding]:
    """Yield the folders of a run that cannot be created or written to. Each is tried in place, and nothing is left
    behind."""
    pipeline = config.data_processor.task_pipeline
    targets = {"checkpoint_root_dir": config.job_dir}
    if file := explored_file(config):
        targets["buffer.trainer_input.experience_buffer.path"] = file.parent
    if file := operator_input_file(config):
        targets["data_processor.experience_pipeline.input_save_path"] = file.parent
    if pipeline is not None and uses_pipeline(config):
        targets[f"{PIPELINE}.output.path"] = output_root(config)
    for key, folder in targets.items():
        if fault := folder_fault(folder):
            yield Finding(key, str(folder), "unavailable", fault)


def folder_fault(folder: Path) -> str:
    """Return why a folder cannot be created or written to, or ""."""
    there = next(parent for parent in (folder, *folder.parents) if parent.exists())
    if not there.is_dir():
        return f"{folder} cannot be made: {there} is a file."
    try:
        with tempfile.TemporaryDirectory(prefix=".trinity-", dir=there):
            return ""
    except OSError as error:
        return f"{folder} cannot be written to ({error.strerror or error})."


def absent_secrets(config: Config) -> Iterator[Finding]:
    """Yield variables for rollout commands that neither this environment, which the explorer inherits, nor
    `explorer.env_vars` contains."""
    trained = training_tasksets(config) if config.explores else []
    for key, taskset in [*trained, *eval_tasksets(config)] if config.mode != "train" else []:
        secrets = taskset.workflow_args.get("secrets")
        if taskset.default_workflow_type != "command_workflow" or not isinstance(secrets, list | tuple):
            continue  # other faults of the arguments have been reported
        if absent := [name for name in secrets if name not in os.environ and name not in config.explorer.env_vars]:
            message = f"this environment has no variable {', '.join(map(str, absent))}: export it."
            yield Finding(f"{key}.workflow_args.secrets", list(secrets), "missing", message)


def busy_port(config: Config) -> Iterator[Finding]:
    """Yield the OpenAI API's port if something else listens there. The server itself waits for actors of a killed
    run."""
    explorer = config.explorer
    host, port = explorer.listen_address, explorer.api_port
    if not (explorer.rollout_model.enable_openai_api and port and config.explores):
        return
    try:
        family, kind, protocol, _, place_of = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0]
        with socket.socket(family, kind, protocol) as probe:
            probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            probe.bind(place_of)
    except OSError as error:
        if error.errno == errno.EADDRINUSE:
            holder = holder_of(port)
            if holder is None or not is_orphan(holder):
                used = f"port {port} of {host} is in use by {in_words(holder)}"
                message = f"{used}; end that, choose another port, or leave it out for one that is free."
                yield Finding("explorer.api_port", port, "busy", message)
        else:
            message = f"cannot listen on {host}:{port}: {error.strerror}."
            yield Finding("explorer.listen_address", host, "unavailable", message)


def missing_gpus(config: Config, cpus: int) -> Iterator[Finding]:
    """Yield GPUs that the run asks for and this machine lacks. Whether they are free is checked when the run starts."""
    gpus = 0 if config.cluster.gpu_per_node == 0 else len(survey())
    try:
        place(config, weakest([Machine(cpus, gpus)], config.cluster.node_num))
    except TrinityError as error:
        yield Finding(error.key, None, "unavailable", str(error).removeprefix(error.key).lstrip(": "))


def oversized(config: Config) -> Iterator[Finding]:
    """Yield memory and disk that the run needs and this machine lacks, unless that is allowed, cannot be estimated, or
    is a joined cluster's: an error if weights and optimizer alone do not fit, or the disk, otherwise a warning."""
    if not (config.cluster.allow_oversized or config.cluster.ray_address):
        (stage,) = plans_of(config)
        yield from shortages(stage, room_for(config.job_dir))


def unready_node(config: Config, gpu_per_node: int, numbers: Mapping[str, int], reads: bool) -> Iterator[Finding]:
    """Yield problems that prevent a run from starting on this node of a joined cluster.

    Checks models in folders, packages, memory and disk, and on the explorer's node whether names can be found.
    `numbers` counts the node's processes by kind; `REWARDS` counts as one, on the explorer's node. `reads`: the node
    has the worker that reads the model.
    """
    engines = [numbers.get(auxiliary_kind(model)) for model in config.explorer.auxiliary_models]
    keys = {f"explorer.auxiliary_models[{index}].model_path" for index, number in enumerate(engines) if number}
    computes = numbers.get(ENGINE) or numbers.get(TRAINER)
    keys |= {"model.model_path"} if computes else set()
    keys |= {"model.critic_model_path"} if numbers.get(TRAINER) else set()
    yield from missing_folders(config, keys)
    if any(engines):
        yield from spread_reward_models(config)
    if computes:
        yield from unfit_policy(config)
        yield from missing_packages(config)
    if (reads or numbers.get(REWARDS)) and not config.external_model:
        yield from missing_template(config)
    if numbers.get(REWARDS):
        yield from missing_names(config)
    if config.cluster.allow_oversized:
        return
    (stage,) = plans_of(config, Machine(cores(), gpu_per_node))
    here = [
        replace(
            process,
            number=process.number if process.kind == REWARDS else numbers[process.kind],
            once=process.once if reads else (),
        )
        for process in stage.processes
        if numbers.get(process.kind)
    ]
    yield from shortages(replace(stage, processes=tuple(here)), room_for(config.job_dir))
