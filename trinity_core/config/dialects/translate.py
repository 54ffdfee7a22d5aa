"""A tree in the words of Trinity-RFT and veRL as one in this schema's own."""

from __future__ import annotations

import copy

from pydantic import BaseModel

from trinity_core.config.dialects.places import put
from trinity_core.config.dialects.verdict import Noted, Refused
from trinity_core.config.dialects.walk import Found, Put, Replace, walk
from trinity_core.config.problems import Report
from trinity_core.config.schema import Config
from trinity_core.config.source import Tree


def native(tree: Tree, report: Report) -> Tree:
    """A copy in this schema's words; only keys without effect stay as they are. Refused keys are reported."""
    tree = copy.deepcopy(tree)
    while todo := [found for found in walk(Config, tree) if not isinstance(found.action, Noted)]:
        for found in todo:
            _apply(found, report)
    return tree


def without_noted(tree: Tree) -> Tree:
    """A copy without the keys that have no effect."""
    tree = copy.deepcopy(tree)
    for found in walk(Config, tree):
        found.chain[-1].node.pop(found.name, None)
    return tree


def notes(tree: Tree) -> dict[str, list[str]]:
    """Reason → the keys that have no effect for it."""
    reasons: dict[str, list[str]] = {}
    for found in walk(Config, tree):
        if isinstance(found.action, Noted) and found.action.why:
            reasons.setdefault(found.action.why, []).append(found.key)
    return reasons


def noted_keys(cls: type[BaseModel], tree: Tree) -> list[str]:
    """The keys of a section's tree that have no effect."""
    return [found.key for found in walk(cls, tree) if isinstance(found.action, Noted)]


def _apply(found: Found, report: Report) -> None:
    owner, value = found.chain[-1].node, found.value
    if owner.get(found.name) is not value:
        return  # another key was moved here meanwhile; the next walk looks at it
    owner.pop(found.name, None)
    match found.action:
        case Replace(value=other):
            owner[found.name] = other
        case Refused(why=why):
            report.add(found.key, value, why)
        case Put(values=values, yields=yields):
            for to, each in values.items():
                put(found.chain, to.replace("*", found.name), each, yields, report, found.key)
