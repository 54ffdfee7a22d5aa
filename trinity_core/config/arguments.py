"""The arguments of an algorithm's parts: known by name, and of the type that each part takes them as."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from trinity_core.config.parts import PARTS, Arguments
from trinity_core.config.problems import Report, closest
from trinity_core.config.resolve import draws_by
from trinity_core.config.schema import Config
from trinity_core.config.types import Args
from trinity_core.config.validation import BAD, convert


def check_arguments(config: Config, report: Report) -> None:
    """Report the arguments that a part does not take. A part of the user's own is asked by the trainer."""
    _typed(config, report)


def typed_arguments(config: Config) -> Config:
    """The configuration with the arguments of every known part in the types that the part takes them as."""
    return config.with_values(_typed(config, Report()))


def _typed(config: Config, report: Report) -> dict[str, Any]:
    """The fitting arguments of every known part, by key."""
    values = {}
    for part, parts in PARTS.items():
        name, key = getattr(config.algorithm, part), f"{part}_args"
        if name in parts:
            known = _strategy(config) if part == "sample_strategy" else parts[name]
            given = getattr(config.algorithm, key)
            values[f"algorithm.{key}"] = _bound(known, given, f"algorithm.{key}", name, report)
    return values


def _strategy(config: Config) -> Arguments:
    """The arguments of the sample strategy and of the one that it draws rollouts by."""
    known = PARTS["sample_strategy"]
    return {**known[config.algorithm.sample_strategy], **known.get(draws_by(config), {})}


def _bound(known: Arguments, given: Mapping[str, Any], key: str, owner: str, report: Report) -> dict[str, Any]:
    values = {}
    for name, value in given.items():
        path, kind = f"{key}.{name}", known.get(name)
        if kind is None:
            takes = ", ".join(known) or "none"
            report.add(path, value, f"is no argument of '{owner}', which takes {takes}.", closest(name, known))
        elif isinstance(kind, dict) and isinstance(value, dict):
            values[name] = _bound(kind, value, path, name, report)
        elif (bound := convert(Args | None if isinstance(kind, dict) else kind, value, path, report)) is not BAD:
            values[name] = bound
    return values
