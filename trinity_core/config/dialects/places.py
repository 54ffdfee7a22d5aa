"""Places in a tree of plain values: the sections above a key, and a value put at another key."""

from __future__ import annotations

from typing import Any, NamedTuple

from trinity_core.config.problems import Report
from trinity_core.config.source import Tree, join_key
from trinity_core.config.validation import show


class Place(NamedTuple):
    """A section of the tree."""

    key: str
    node: Tree


Chain = tuple[Place, ...]
"""The sections above a key, from the top of the configuration, or of a stage, inwards."""
set_at = Place


def put(chain: Chain, to: str, value: Any, yields: bool, report: Report, old: str) -> None:
    """Set a value at the key `to` (as of `Moved`), which `old` was another spelling of.

    What is there already stays; unless `yields`, a different value is reported.
    """
    if to.startswith("/"):
        place, to = chain[0], to[1:]
    else:
        above = to.count("../")
        place, to = chain[-1 - above], to.removeprefix("../" * above)
    _put(place, to.split("."), value, yields, report, old)


def _put(place: Place, parts: list[str], value: Any, yields: bool, report: Report, old: str) -> None:
    (name, *rest), (key, node) = parts, place
    if name.endswith("[]"):
        entries = node.get(name[:-2])
        for index, entry in enumerate(entries if isinstance(entries, list) else []):
            if isinstance(entry, dict):
                _put(Place(f"{join_key(key, name[:-2])}[{index}]", entry), rest, value, yields, report, old)
        return
    at, there = join_key(key, name), node.get(name)
    if there is None:
        there = node[name] = {} if rest or isinstance(value, dict) else value
        if old in report.places:
            report.places.setdefault(at, report.places[old])
    if rest and isinstance(there, dict):
        _put(Place(at, there), rest, value, yields, report, old)
    elif isinstance(value, dict) and isinstance(there, dict):
        for part, each in value.items():
            _put(Place(at, there), [str(part)], each, yields, report, join_key(old, str(part)))
    elif not yields and there != value:
        report.add(old, value, f"is {show(value)}, but {at} is {show(there)}; give one of them.")
