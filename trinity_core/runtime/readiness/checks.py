"""All that keeps a run from starting, found before anything of it is started."""

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence
from pathlib import Path

from trinity_core.config import Config
from trinity_core.config.problems import ConfigError, Problem, Report
from trinity_core.errors import TransientFault
from trinity_core.runtime.configuration import load_checked
from trinity_core.runtime.readiness.first_rows import unusable_data
from trinity_core.runtime.readiness.machine_room import busy_port, missing_gpus, unwritable_folders
from trinity_core.runtime.readiness.model_folder import missing_models
from trinity_core.runtime.readiness.obstacle import Obstacle
from trinity_core.runtime.readiness.oversized import oversized


def unready(config: Config, is_first: bool = True) -> Iterator[Obstacle]:
    """What keeps a run (a configuration without stages) from starting on this machine.

    `is_first` is False for a stage that begins with the weights of the one before. Of a Ray cluster that is joined
    (`cluster.ray_address`), only the run's folder is looked at: its nodes open models, data and ports.
    """
    yield from _unopened(config, is_first)
    if not config.cluster.ray_address:
        yield from oversized(config)


def check_opened(config: Config, report: Report) -> None:
    """Report what keeps a run from starting, with the file and line of the setting that names it."""
    if config.stages:
        return
    look = _unopened if report.problems else unready  # a size follows from settings that are all in order
    for found in look(config, report.stage in (None, "stages[0]")):
        if not report.touched([found.key]):
            report.add(found.key, found.value, found.message)


def load_ready(path: Path | str, overrides: Sequence[str] = ()) -> Config:
    """`load_checked` of a run that can start: all that it names is there. Raises ConfigError with every problem."""
    return load_checked(path, overrides, check_opened)


def require_ready(config: Config, is_first: bool = True) -> None:
    """Raise ConfigError if something keeps the run from starting, `TransientFault` if all of it may soon be gone."""
    found = list(unready(config, is_first))
    problems = [Problem(each.key, each.value, each.message) for each in found]
    if not found:
        return
    if all(each.passes for each in found):
        raise TransientFault("; ".join(map(str, problems)))
    raise ConfigError(problems)


def _unopened(config: Config, is_first: bool) -> Iterator[Obstacle]:
    yield from unwritable_folders(config)
    if config.cluster.ray_address:
        return
    yield from missing_models(config, is_first)
    yield from unusable_data(config, is_first)
    yield from busy_port(config)
    yield from missing_gpus(config, len(os.sched_getaffinity(0)))
