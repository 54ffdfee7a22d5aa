"""A walk along the schema through a tree: each key or value of Trinity-RFT's or veRL's that calls for something."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from pydantic import BaseModel

from trinity_core.config.annotations import Type, types_of
from trinity_core.config.dialects.places import Chain, set_at
from trinity_core.config.dialects.tables import KEYS
from trinity_core.config.dialects.verdict import Below, Cases, Moved, Noted, Refused, Rewritten, Spelled, Verdict
from trinity_core.config.schema import Config
from trinity_core.config.source import Tree, join_key
from trinity_core.config.validation import show


@dataclass(frozen=True)
class Drop:
    """The value asks for nothing."""


@dataclass(frozen=True)
class Replace:
    """The value is written otherwise here."""

    value: Any


@dataclass(frozen=True)
class Put:
    """The value belongs elsewhere: the values by key, as of `Moved`."""

    values: Mapping[str, Any]
    yields: bool


Action = Noted | Refused | Drop | Replace | Put


@dataclass(frozen=True)
class Found:
    """A key with something to be done about it."""

    chain: Chain
    """The sections from the top down to the one in which the key stands."""
    name: str
    value: Any
    action: Action

    @property
    def key(self) -> str:
        """The dotted key."""
        return join_key(self.chain[-1].key, self.name)


def walk(cls: type[BaseModel], tree: Tree) -> list[Found]:
    """Every key below a section of the schema with something to be done about it, in the order of the tree."""
    return list(_section(cls, tree, (set_at("", tree),)))


def _section(cls: type[BaseModel], node: Mapping[str, Any], chain: Chain) -> Iterator[Found]:
    known, verdicts = types_of(cls), KEYS.get(cls, {})
    for name, value in node.items():
        verdict = verdicts.get(name)
        if name not in known:
            if verdict is not None:
                yield from _foreign(verdict, name, value, chain)
            continue
        if verdict is not None:
            yield from _spelled(verdict, name, value, chain)
        if (choice := _choice(known[name], value)) is not None:
            yield Found(chain, name, value, Replace(choice))
        if cls is Config and name == "stages" and isinstance(value, list):
            for index, stage in enumerate(value):
                if isinstance(stage, dict):
                    yield from _section(Config, stage, (set_at(f"stages[{index}]", stage),))
        elif known[name].section is not None:
            yield from _inner(known[name], join_key(chain[-1].key, name), value, chain)


def _inner(typed: Type, key: str, value: Any, chain: Chain) -> Iterator[Found]:
    """The section, or the sections of a list or by name."""
    cls, entries = typed.section, [(key, value)]
    if typed.entry is not None and isinstance(value, list):
        entries = [(join_key(key, index), each) for index, each in enumerate(value)]
    elif typed.entry is not None:
        entries = [(join_key(key, str(name)), each) for name, each in value.items()] if isinstance(value, dict) else []
    for at, each in entries:
        if cls is not None and isinstance(each, dict):
            yield from _section(cls, each, (*chain, set_at(at, each)))


def _spelled(verdict: Verdict, name: str, value: Any, chain: Chain) -> Iterator[Found]:
    """What is to be done about a value of a setting that is known here."""
    match verdict:
        case Spelled(values=values):
            if value is None or _among(value, values):
                other = next((new for old, new in values.items() if _among(value, (old,))), None)
                yield Found(chain, name, value, Drop() if other is None else Replace(other))
        case Cases(of=of):
            if case := next((each for other, each in of.items() if _among(value, (other,))), None):
                yield from _foreign(case, name, value, chain)
        case Below(keys=keys) if isinstance(value, dict):
            inner = (*chain, set_at(join_key(chain[-1].key, name), value))
            for part in (part for part in value if part in keys):
                yield from _foreign(keys[part], part, value[part], inner)
        case Rewritten() if isinstance(value, dict):
            yield from _foreign(verdict, name, value, chain)


def _foreign(verdict: Verdict, name: str, value: Any, chain: Chain) -> Iterator[Found]:
    """What is to be done about a key that is unknown here."""
    if value is None or (isinstance(verdict, Noted | Refused) and _among(value, verdict.harmless)):
        yield Found(chain, name, value, Drop())
        return
    match verdict:
        case Noted() | Refused():
            yield Found(chain, name, value, verdict)
        case Moved(to=to, unset=unset, convert=convert, yields=yields):
            there = None if _among(value, unset) else convert(value, chain[-1].node) if convert else value
            action: Action = Drop() if there is None else Put(dict.fromkeys(to, there), yields)
            yield Found(chain, name, value, action)
        case Rewritten(keys=rewrite):
            found = rewrite(value, chain[-1].node)
            if found is not None:
                yield Found(chain, name, value, Put({to: each for to, each in found.items() if each is not None}, True))
        case Cases(of=of, rest=rest):
            case = next((each for other, each in of.items() if _among(value, (other,))), rest)
            yield from _foreign(case, name, value, chain)
        case Below(keys=keys, rest=rest):
            yield from _below(keys, rest, name, value, chain)


def _below(keys: Mapping[str, Verdict], rest: Verdict | None, name: str, value: Any, chain: Chain) -> Iterator[Found]:
    """A section that is unknown here: each listed key for itself, the others together if they have no effect."""
    listed = isinstance(value, dict)
    if listed and not value:
        yield Found(chain, name, value, Drop())
        return
    if isinstance(rest, Noted) and not (listed and value.keys() <= keys.keys()):
        yield Found(chain, name, value, rest)
    elif not listed:
        yield Found(chain, name, value, Refused(f"must be a section with keys, not {show(value)}."))
    if not listed:
        return
    inner = (*chain, set_at(join_key(chain[-1].key, name), value))
    for part, each in value.items():
        verdict = keys.get(part, None if isinstance(rest, Noted) else rest)
        if verdict is not None:
            yield from _foreign(verdict, part, each, inner)


def _choice(typed: Type, value: Any) -> str | None:
    """The choice that a text stands for in other capitals."""
    if not isinstance(value, str) or value in typed.choices:
        return None
    return next((choice for choice in typed.choices if choice.lower() == value.lower()), None)


def _among(value: Any, values: Any) -> bool:
    """Whether this is one of the values; a flag is no number."""
    return any(type(value) is type(each) and value == each for each in values)
