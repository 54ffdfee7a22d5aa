"""What a configuration would do, or its problems: shown next to its fields after each change."""

from __future__ import annotations

import re
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

from trinity_core.config import Config, ConfigError, Problem, config_from_text
from trinity_core.runtime.placement import flow_of
from trinity_core.runtime.preflight.stage_plan import plan_text, plans_with_pace


@dataclass(frozen=True, slots=True)
class CheckedDraft:
    """Either all problems, or the configuration with its plan."""

    problems: list[Problem]
    config: Config | None = None
    plan: str = ""
    flow: str = ""
    unplaced: str = ""
    """Why this machine cannot run it, or ""."""
    measurable: bool = False
    """True if this machine can measure a time that the plan lacks."""
    text: str = ""


def checked(text: str, file: Path | None = None) -> CheckedDraft:
    """Check a configuration's YAML text, as content of `file`, without loading modules of its `plugin_dir`."""
    try:
        config = config_from_text(text, name=str(file or "<text>"))
    except ConfigError as error:
        return CheckedDraft(error.problems, text=text)
    plans = plans_with_pace(config)
    unplaced = " ".join(dict.fromkeys(plan.unplaced for plan in plans if plan.unplaced))
    measurable = not unplaced and any(plan.pace is None and not plan.immeasurable for plan in plans)
    return CheckedDraft([], config, plan_text(plans), flow_of(config), unplaced, measurable, text)


def by_field(problems: Iterable[Problem], keys: Iterable[str]) -> dict[str, list[Problem]]:
    """Return key → its problems, with list indices as `.0`; problems of keys outside the form are under ""."""
    problems_by_field: dict[str, list[Problem]] = {}
    shown = set(keys)
    for problem in problems:
        key = re.sub(r"\[(\d+)\]", r".\1", problem.key)
        problems_by_field.setdefault(key if key in shown else "", []).append(problem)
    return problems_by_field


def by_section(problems: Iterable[Problem]) -> dict[str, int]:
    """Return first part of a key → number of problems below it; keys without a section are under `run`."""
    counts: dict[str, int] = {}
    for problem in problems:
        section = problem.key.partition(".")[0].partition("[")[0] if "." in problem.key else "run"
        counts[section] = counts.get(section, 0) + 1
    return counts
