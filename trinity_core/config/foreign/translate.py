"""Translates a tree with keys of Trinity-RFT and veRL into this schema's keys.

Each walk follows the schema through the tree and finds all foreign keys and values; moved values are checked again by
the next walk.
"""

from __future__ import annotations

import copy
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, replace
from typing import Any, NamedTuple

from pydantic import BaseModel

from trinity_core.config.fields import Type, types_of
from trinity_core.config.findings import Finding, Report
from trinity_core.config.foreign.key_action import (
    SILENT,
    Below,
    Cases,
    KeyAction,
    Moved,
    Noted,
    Refused,
    Rewritten,
    Spelled,
    is_among,
)
from trinity_core.config.foreign.table import KEYS
from trinity_core.config.schema import Config
from trinity_core.config.source import WHOLE, Tree, inherited, join_key, merge
from trinity_core.config.validation import show

_TABLE = "docs/porting.md#keys-without-a-counterpart"


class Place(NamedTuple):
    """A section of the tree."""

    key: str
    node: Tree
    inherited: Mapping[str, Any] = {}
    """The values that a stage inherits from the section above all stages."""

    @property
    def values(self) -> Mapping[str, Any]:
        return merge(self.inherited, self.node, WHOLE) if self.inherited else self.node


Chain = tuple[Place, ...]
"""The sections that contain a key, from the top of the configuration or stage inwards."""


@dataclass(frozen=True)
class Put:
    """Moves the value elsewhere, or drops it if it requests nothing."""

    values: Mapping[str, Any] = field(default_factory=dict)
    """Key → value; keys as in `Moved`."""
    yields: bool = True


@dataclass(frozen=True)
class Foreign:
    """A key of the tree that needs an action."""

    chain: Chain
    """The sections from the top to the one that contains the key."""
    name: str
    value: Any
    action: Noted | Refused | Put

    @property
    def key(self) -> str:
        return join_key(self.chain[-1].key, self.name)


def native(tree: Tree, report: Report) -> tuple[Tree, list[Finding]]:
    """Return a translated copy, and a notice for each key without effect.

    Refused keys are reported. Earlier reports about keys without effect, such as an unresolved interpolation, are
    dropped.
    """
    tree, notices = copy.deepcopy(tree), list[Finding]()
    while todo := list(_section(Config, tree, (Place("", tree),))):
        for foreign in todo:
            notices += _apply(foreign, report)
    return tree, notices


def _section(cls: type[BaseModel], node: Mapping[str, Any], chain: Chain) -> Iterator[Foreign]:
    settings, actions = types_of(cls), KEYS.get(cls, {})
    for name, value in node.items():
        action = actions.get(name)
        if name not in settings:
            if action is not None:
                yield from _unknown(action, name, value, chain)
            continue
        if action is not None:
            yield from _known(action, name, value, chain)
        if (choice := _choice(settings[name], value)) is not None:
            yield Foreign(chain, name, value, Put({name: choice}))
        if cls is Config and name == "stages" and isinstance(value, list):
            for index, stage in enumerate(value):
                if isinstance(stage, dict):
                    place = Place(f"stages[{index}]", stage, inherited({**node, "stages": None}, stage))
                    yield from _section(Config, stage, (place,))
        elif settings[name].section is not None:
            above = chain[-1].inherited.get(name) if settings[name].entry is None and name not in WHOLE else None
            yield from _inner(settings[name], join_key(chain[-1].key, name), value, chain, above)


def _inner(typed: Type, key: str, value: Any, chain: Chain, above: Any) -> Iterator[Foreign]:
    """Yield the section, or the sections of a list or mapping. `above`: what a stage inherits for it."""
    cls, entries = typed.section, [(key, value)]
    if typed.entry is not None:
        named = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
        entries = [(join_key(key, name), entry) for name, entry in named]
    for place, entry in entries:
        if cls is not None and isinstance(entry, dict):
            yield from _section(cls, entry, (*chain, Place(place, entry, above if isinstance(above, dict) else {})))


def _known(action: KeyAction, name: str, value: Any, chain: Chain) -> Iterator[Foreign]:
    match action:
        case Spelled(values=values):
            if value is None or is_among(value, values):
                other = next((new for old, new in values.items() if is_among(value, (old,))), None)
                yield Foreign(chain, name, value, Put({} if other is None else {name: other}))
        case Cases(of=of):
            if case := next((case for other, case in of.items() if is_among(value, (other,))), None):
                yield from _unknown(case, name, value, chain)
        case Below(keys=keys) if isinstance(value, dict):
            inner = (*chain, Place(join_key(chain[-1].key, name), value))
            for part in (part for part in value if part in keys):
                yield from _unknown(keys[part], part, value[part], inner)
        case Rewritten() if isinstance(value, dict):
            yield from _unknown(action, name, value, chain)


def _unknown(action: KeyAction, name: str, value: Any, chain: Chain) -> Iterator[Foreign]:
    if value is None or (isinstance(action, Noted | Refused) and is_among(value, action.harmless)):
        yield Foreign(chain, name, value, SILENT if isinstance(action, Noted) else Put())
        return
    match action:
        case Noted() | Refused():
            yield Foreign(chain, name, value, action)
        case Moved(to=to, unset=unset, convert=convert, yields=yields):
            there = None if is_among(value, unset) else convert(value, chain[-1].values) if convert else value
            yield Foreign(chain, name, value, Put({} if there is None else dict.fromkeys(to, there), yields))
        case Rewritten(keys=rewrite, from_top=from_top):
            values = rewrite(value, chain[0 if from_top else -1].values)
            if isinstance(values, Refused):
                yield Foreign(chain, name, value, values)
            elif values is not None:
                yield Foreign(chain, name, value, Put(values))
        case Cases(of=of, rest=rest):
            case = next((case for other, case in of.items() if is_among(value, (other,))), rest)
            yield from _unknown(case, name, value, chain)
        case Below():
            yield from _below(action, name, value, chain)


def _below(action: Below, name: str, value: Any, chain: Chain) -> Iterator[Foreign]:
    """Handle an unknown section: each listed key by itself, the others together if they have no effect."""
    if not isinstance(value, dict):
        must = Refused(why=f"must be a section with keys, not {show(value)}.")
        yield Foreign(chain, name, value, action.rest if isinstance(action.rest, Noted) else must)
        return
    if not value:
        yield Foreign(chain, name, value, Put())
    elif isinstance(action.rest, Noted) and not value.keys() <= action.keys.keys():
        yield Foreign(chain, name, value, action.rest)
    inner = (*chain, Place(join_key(chain[-1].key, name), value))
    for part, entry in value.items():
        of_part = action.keys.get(part, None if isinstance(action.rest, Noted) else action.rest)
        if of_part is not None:
            yield from _unknown(of_part, part, entry, inner)


def _choice(typed: Type, value: Any) -> str | None:
    """Return the choice that a text matches if case is ignored."""
    if not isinstance(value, str) or value in typed.choices:
        return None
    return next((choice for choice in typed.choices if choice.lower() == value.lower()), None)


def _apply(foreign: Foreign, report: Report) -> Iterator[Finding]:
    """Take the key out of the tree and apply its action; yields a notice, if any."""
    owner, value = foreign.chain[-1].node, foreign.value
    if owner.get(foreign.name) is not value:
        return  # another key was moved here meanwhile; the next walk handles it
    owner.pop(foreign.name, None)
    match foreign.action:
        case Noted(is_told=is_told):
            report.forget(foreign.key)
            if is_told:
                yield Finding(foreign.key, value, "no-effect", f"See {_TABLE}.", severity="notice")
        case Refused(why=why):
            nothing = f"has no counterpart here (it is {show(value)}); see {_TABLE}."
            report.add(Finding(foreign.key, value, "unsupported-key", why or nothing))
        case Put(values=values, yields=yields):
            for to, part in values.items():
                _put(foreign.chain, to.replace("*", foreign.name), part, yields, report, foreign.key)


def _put(chain: Chain, to: str, value: Any, yields: bool, report: Report, written: str) -> None:
    """Set the value at the key `to` (as in `Moved`), of which the key `written` is another spelling.

    An existing value stays; unless `yields`, a different value is reported.
    """
    if to.startswith("/"):
        place, to = chain[0], to[1:]
    else:
        above = to.count("../")
        place, to = chain[-1 - above], to.removeprefix("../" * above)
    _put_below(place, to.split("."), value, yields, report, written)


def _put_below(place: Place, parts: list[str], value: Any, yields: bool, report: Report, written: str) -> None:
    (name, *rest), (key, node, _) = parts, place
    if name.endswith("[]"):
        entries = node.get(name[:-2])
        for index, entry in enumerate(entries if isinstance(entries, list) else []):
            if isinstance(entry, dict):
                _put_below(Place(f"{join_key(key, name[:-2])}[{index}]", entry), rest, value, yields, report, written)
        return
    at, there = join_key(key, name), node.get(name)
    if there is None:
        there = node[name] = {} if rest or isinstance(value, dict) else value
        if written in report.places:
            source = report.places[written]
            report.places.setdefault(at, replace(source, key=source.key or written))
    if rest and isinstance(there, dict):
        _put_below(Place(at, there), rest, value, yields, report, written)
    elif isinstance(value, dict) and isinstance(there, dict):
        for part, entry in value.items():
            _put_below(Place(at, there), [str(part)], entry, yields, report, join_key(written, str(part)))
    elif not yields and there != value:
        message = f"is {show(value)}, but {at} is {show(there)}; give one of them."
        report.add(Finding(written, value, "two-spellings", message))
