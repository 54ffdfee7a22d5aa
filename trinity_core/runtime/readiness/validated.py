"""What `trinity validate` says: the stages of a configuration that is fine, or its problems."""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass, field

from trinity_core.config import Config, notices, stages
from trinity_core.config.problems import ConfigError, Problem


@dataclass(frozen=True, slots=True)
class ValidatedStage:
    """A stage that can start."""

    name: str
    project: str
    algorithm: str
    mode: str
    job_dir: str
    notices: list[str]


@dataclass(frozen=True, slots=True)
class Validated:
    """Whether a configuration is accepted, and its stages or its problems."""

    accepted: bool
    opened: bool = False
    """Whether models, data, folders, port and GPUs were looked at on this machine."""
    stages: list[ValidatedStage] = field(default_factory=list)
    problems: list[Problem] = field(default_factory=list)


def accepted(config: Config, opened: bool) -> Validated:
    """What is said of a checked configuration."""
    listed = [
        ValidatedStage(
            each.name, each.project, each.algorithm.algorithm_type, each.mode, str(each.job_dir), list(notices(each))
        )
        for each in stages(config)
    ]
    return Validated(True, opened and not config.cluster.ray_address, listed)


def refused(error: ConfigError) -> Validated:
    """What is said of a configuration that is not fine."""
    return Validated(False, problems=error.problems)


def validated_text(given: Validated) -> str:
    """The lines for a terminal."""
    if not given.accepted:
        return f"error: {ConfigError(given.problems)}"
    lines = []
    for stage in given.stages:
        lines.append(f"{stage.project}/{stage.name}: {stage.algorithm}, mode {stage.mode}, {stage.job_dir}")
        lines += [f"  {notice}" for notice in stage.notices]
    unseen = "" if given.opened else " Models, data and ports were not opened."
    return "\n".join([*lines, f"The configuration is fine.{unseen}"])


def validated_json(given: Validated) -> str:
    """It as JSON, without the values, which may be secrets."""
    told = asdict(given)
    for problem in told["problems"]:
        del problem["value"]
    return json.dumps(told, indent=2)
