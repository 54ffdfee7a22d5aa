"""OmegaConf's interpolation: `${other.key}` and `${oc.env:NAME,default}` replaced by the values that they refer to."""

from __future__ import annotations

import copy
import re
from typing import Any

from trinity_core.config.problems import Report
from trinity_core.config.source import Tree, YamlSource, first_line, join_key, merge

DEEPEST = 50
"""Levels of a tree. OmegaConf needs a dozen calls for each."""
UNFIT = "holds NUL, or bytes that are no UTF-8, which no file can hold."


def interpolate(origin: YamlSource, defaults: Tree, report: Report) -> Tree:
    """The tree with every `${…}` replaced; `defaults` stand in for keys that were not given.

    What cannot be replaced (an unset environment variable, an unknown key, a cycle) is reported and becomes None.
    """
    tree = _readable(origin.tree, "", report)
    if not _refers(tree):
        return tree
    from omegaconf import OmegaConf

    whole = merge(defaults, tree)
    trainer = whole.get("trainer")
    verl = trainer.get("trainer_config") if isinstance(trainer, dict) else None
    if isinstance(verl, dict):
        # The sections of a veRL configuration refer to each other as in a file of their own.
        sections = [name for name in ("actor_rollout_ref", "critic") if name in verl and name not in tree]
        whole |= {name: f"${{trainer.trainer_config.{name}}}" for name in sections}
    return _replace(tree, OmegaConf.create(whole), "", report)


def escaped(node: Any) -> Any:
    """The inverse of `interpolate`: a literal `${` in a text is written so that it stays one."""
    if isinstance(node, dict):
        return {name: escaped(value) for name, value in node.items()}
    if isinstance(node, list):
        return [escaped(value) for value in node]
    if isinstance(node, str):
        return re.sub(r"(\\*)\$\{", lambda found: found.group(1) * 2 + r"\${", node)
    return node


def _readable(node: Any, key: str, report: Report, depth: int = 0) -> Any:
    """A copy in which texts that are no valid interpolation, and `???`, are reported and become None."""
    from omegaconf import OmegaConf
    from omegaconf.errors import OmegaConfBaseException

    if isinstance(node, dict | list) and depth > DEEPEST:
        report.add(key, None, f"is nested too deeply, in more than {DEEPEST} levels.")
        return None
    if isinstance(node, dict):
        named = {str(name): each for name, each in node.items()}
        for name in filter(_unfit, named):
            report.add(join_key(key, name.encode(errors="backslashreplace").decode()), None, UNFIT)
        inner = {name: each for name, each in named.items() if not _unfit(name)}
        return {name: _readable(each, join_key(key, name), report, depth + 1) for name, each in inner.items()}
    if isinstance(node, list):
        return [_readable(each, join_key(key, index), report, depth + 1) for index, each in enumerate(node)]
    if node == "???":
        report.add(key, node, "must be given.")
        return None
    if not isinstance(node, str | int | float | None):
        report.add(key, node, f"must be text, a number, true, false or null, not a {type(node).__name__}.")
        return None
    if isinstance(node, str) and _unfit(node):
        report.add(key, None, UNFIT)
        return None
    if isinstance(node, str) and "${" in node:
        try:
            OmegaConf.create({"_": node})
        except OmegaConfBaseException as error:
            report.add(key, node, f"cannot be read: {first_line(error)}.")
            return None
    return node


def _unfit(text: str) -> bool:
    """Whether a text can stand neither in a file nor in the name of one."""
    return "\0" in text or any("\ud800" <= char <= "\udfff" for char in text)


def _replace(node: Any, resolved: Any, key: str, report: Report) -> Any:
    """`node` with its interpolations taken from `resolved`, the OmegaConf container at the same place."""
    from omegaconf import OmegaConf
    from omegaconf.errors import OmegaConfBaseException

    if not isinstance(node, dict | list):
        return node
    result = copy.copy(node)
    for name, value in node.items() if isinstance(node, dict) else enumerate(node):
        path = join_key(key, name)
        if isinstance(value, dict | list):
            result[name] = _replace(value, resolved[name], path, report)
        elif isinstance(value, str) and "${" in value:
            try:
                found = resolved[name]
                result[name] = OmegaConf.to_container(found, resolve=True) if OmegaConf.is_config(found) else found
            except OmegaConfBaseException as error:
                report.add(path, value, _unresolved(first_line(error)))
                result[name] = None
    return result


def _refers(node: Any) -> bool:
    """Whether any text below refers to something."""
    if isinstance(node, dict | list):
        return any(map(_refers, node.values() if isinstance(node, dict) else node))
    return isinstance(node, str) and "${" in node


def _unresolved(reason: str) -> str:
    """OmegaConf's reason in plain words."""
    if match := re.search(r"Environment variable '(.+)' not found", reason):
        name = match.group(1)
        return f"environment variable {name} is not set; set it, or give a default: ${{oc.env:{name},DEFAULT}}."
    if match := re.search(r"Interpolation key '(.+)' not found", reason):
        return f"refers to '{match.group(1)}', which is not there."
    if "Recursive interpolation" in reason:
        return "refers to itself."
    return f"cannot be interpolated: {reason}."
