"""OmegaConf's interpolation: `${other.key}` and `${oc.env:NAME,default}` replaced by the values that they refer to."""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any

from trinity_core.config.findings import Finding, Report
from trinity_core.config.source import WHOLE, Tree, YamlSource, first_line, join_key, merge


def interpolate(source: YamlSource, defaults: Callable[[], Tree], report: Report, stage: int | None = None) -> Tree:
    """The tree with every `${…}` replaced; values of `defaults` stand in for keys that were not given.

    What is written in a stage refers to the stage's own values before those above. So does, with the index of a
    `stage`, what is written above: the sections as this stage inherits them. What cannot be replaced (an unset
    environment variable, an unknown key, a cycle) is reported and becomes None.
    """
    if not source.refers:
        return source.tree
    tree = _parsable(source.tree, "", report)
    stages = tree["stages"] if isinstance(tree.get("stages"), list) else []
    above = {name: value for name, value in tree.items() if name != "stages" or not stages}

    def replaced(node: Any, within: int | None, key: str = "") -> Any:
        own = stages[within] if within is not None and isinstance(stages[within], dict) else {}
        seen = merge(tree, {name: value for name, value in own.items() if value is not None}, WHOLE)
        return _replaced(node, seen, _container(seen, defaults()), key, report)

    result: Tree = replaced(above, stage)
    if stages:
        result["stages"] = [replaced(each, index, f"stages[{index}]") for index, each in enumerate(stages)]
    return result


def _container(tree: Tree, defaults: Tree) -> Any:
    """OmegaConf's container of a tree, in which references are resolved."""
    from omegaconf import OmegaConf

    whole = merge(defaults, tree)
    trainer = whole.get("trainer")
    verl = trainer.get("trainer_config") if isinstance(trainer, dict) else None
    if isinstance(verl, dict):
        # The sections of a veRL configuration refer to each other as in a file of their own.
        sections = [name for name in ("actor_rollout_ref", "critic") if name in verl and name not in tree]
        whole |= {name: f"${{trainer.trainer_config.{name}}}" for name in sections}
    return OmegaConf.create(whole)


def escaped(node: Any) -> Any:
    """The inverse of `interpolate`: a literal `${` in a text is written so that it stays one."""
    if isinstance(node, dict):
        return {name: escaped(value) for name, value in node.items()}
    if isinstance(node, list):
        return [escaped(value) for value in node]
    if isinstance(node, str):
        return re.sub(r"(\\*)\$\{", lambda match: match.group(1) * 2 + r"\${", node)
    return node


def _parsable(node: Any, key: str, report: Report) -> Any:
    """A copy in which texts that are no valid interpolation are reported and become None."""
    from omegaconf import OmegaConf
    from omegaconf.errors import OmegaConfBaseException

    if isinstance(node, dict):
        return {name: _parsable(value, join_key(key, name), report) for name, value in node.items()}
    if isinstance(node, list):
        return [_parsable(value, join_key(key, index), report) for index, value in enumerate(node)]
    if isinstance(node, str) and "${" in node:
        try:
            OmegaConf.create({"_": node})
        except OmegaConfBaseException as error:
            report.add(Finding(key, node, "unresolved", f"cannot be read: {first_line(error)}."))
            return None
    return node


def _replaced(node: Any, seen: Any, resolved: Any, key: str, report: Report) -> Any:
    """`node` with its interpolations taken from `resolved`, the OmegaConf container of the tree `seen` at that place.

    A value other than the one in `seen` is overridden there, so that nobody asks for it: it becomes None.
    """
    from omegaconf import OmegaConf
    from omegaconf.errors import OmegaConfBaseException

    def replaced(name: Any, value: Any) -> Any:
        path = join_key(key, name)
        is_here = name in seen if isinstance(seen, dict) else isinstance(name, int) and name < len(seen)
        inner = seen[name] if is_here else None
        if isinstance(value, dict | list):
            return _replaced(value, inner, resolved[name], path, report) if type(inner) is type(value) else None
        if not isinstance(value, str) or "${" not in value:
            return value
        if inner != value:
            return None
        try:
            other = resolved[name]
            return OmegaConf.to_container(other, resolve=True) if OmegaConf.is_config(other) else other
        except OmegaConfBaseException as error:
            report.add(Finding(path, value, "unresolved", _reason(first_line(error))))
            return None

    if isinstance(node, dict):
        return {name: replaced(name, value) for name, value in node.items()}
    return [replaced(index, value) for index, value in enumerate(node)]


def _reason(reason: str) -> str:
    """OmegaConf's reason in plain words."""
    if match := re.search(r"Environment variable '(.+)' not found", reason):
        name = match.group(1)
        return f"environment variable {name} is not set; set it, or give a default: ${{oc.env:{name},DEFAULT}}."
    if match := re.search(r"Interpolation key '(.+)' not found", reason):
        return f"refers to '{match.group(1)}', which is not there."
    if "Recursive interpolation" in reason:
        return "refers to itself."
    return f"cannot be interpolated: {reason}."
