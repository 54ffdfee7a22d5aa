"""Translates a tree with keys of Trinity-RFT and veRL into this schema's keys."""

from __future__ import annotations

import copy
from collections.abc import Iterator, Mapping
from dataclasses import replace
from typing import Any, NamedTuple

from pydantic import BaseModel

from trinity_core.base.errors import closest
from trinity_core.config.fields import Type, types_of
from trinity_core.config.findings import Finding, Report
from trinity_core.config.foreign.actions import (
    OFF,
    Action,
    Below,
    Dropped,
    Moved,
    Refusal,
    Rewritten,
    Spelled,
    is_among,
)
from trinity_core.config.foreign.table import KEYS, action_of
from trinity_core.config.foreign.verl_keys import SECTIONS
from trinity_core.config.schema import Config
from trinity_core.config.source import WHOLE, Tree, inherited, join_key, merge
from trinity_core.config.validation import show

_TABLE = "docs/porting.md#keys-without-a-counterpart"
_TYPO = 0.9
"""Similarity to a known key at which an unknown one of veRL is reported instead of dropped."""


class Place(NamedTuple):
    """A section of the tree."""

    key: str
    node: Tree
    values: Mapping[str, Any]
    """The section as it was before the translation, with what a stage inherits."""


Chain = tuple[Place, ...]
"""The sections that contain a key, from the top of the configuration or stage inwards."""


def native(tree: Tree, report: Report) -> tuple[Tree, list[Finding]]:
    """Return a translated copy, and a notice for each key without effect.

    Refused keys are reported. Earlier reports about keys without effect, such as an unresolved interpolation, are
    dropped.
    """
    tree = copy.deepcopy(tree)
    translation = _Translation(report)
    translation.whole(tree, "", {})
    for index, stage in enumerate(tree["stages"] if isinstance(tree.get("stages"), list) else []):
        if isinstance(stage, dict):
            translation.whole(stage, f"stages[{index}]", inherited({**tree, "stages": None}, stage))
    return tree, translation.notices


class _Translation:
    def __init__(self, report: Report) -> None:
        self.notices: list[Finding] = []
        self._report = report
        self._moves = 0
        """Values set so far. They may be foreign themselves, so a walk that sets any is repeated."""

    def whole(self, tree: Tree, key: str, above: Mapping[str, Any]) -> None:
        """Translate a configuration or a stage, which inherits the sections `above`."""
        moves = -1
        while moves != self._moves:
            moves = self._moves
            self._section(Config, (_place(key, tree, above),))

    def _section(self, cls: type[BaseModel], chain: Chain) -> None:
        node = chain[-1].node
        settings = types_of(cls)
        for name, value in list(node.items()):
            action = action_of(cls, name)
            if node.get(name) is not value:
                continue  # another key was moved here; the next walk handles it
            if name in settings:
                self._known(settings[name], action, name, value, chain)
            elif action is not None:
                self._apply(action, name, value, chain)
            elif cls in SECTIONS and not closest(name, [*settings, *KEYS.get(cls, {})], _TYPO):
                self._apply(Dropped(), name, value, chain)

    def _known(self, typed: Type, action: Action | None, name: str, value: Any, chain: Chain) -> None:
        """Translate the value of a setting, then what is below it."""
        key, node, values = chain[-1]
        choices = {choice.lower(): choice for choice in typed.choices}
        if isinstance(value, str) and value not in typed.choices and value.lower() in choices:
            node[name] = value = choices[value.lower()]
        match action:
            case Spelled(values=others) if value is None or is_among(value, others):
                other = next((new for old, new in others.items() if is_among(value, (old,))), None)
                if isinstance(other, Refusal):
                    self._set(name, value, other, chain)
                else:
                    self._set(name, value, {} if other is None else {name: other}, chain)
            case Rewritten(keys=rewrite):
                if value is not None and (result := rewrite(value, values, chain[0].values)) is not None:
                    self._set(name, value, result, chain)
            case Below() if isinstance(value, dict):
                self._inner(action, (*chain, _place(join_key(key, name), value, {})))
        value = node.get(name)
        if typed.section is not None and not (key == "" and name == "stages"):
            above = values.get(name) if typed.entry is None and name not in WHOLE else None
            for place in _entries(typed, join_key(key, name), value, above):
                self._section(typed.section, (*chain, place))

    def _apply(self, action: Action, name: str, value: Any, chain: Chain) -> None:
        """Take a foreign key out of the tree, and do with its value what the action says."""
        key, node, values = chain[-1]
        key = join_key(key, name)
        match action:
            case Dropped(refused=refused):
                node.pop(name)
                if not refused:
                    self._report.forget(key)
                if action.requests_nothing(value):
                    return
                if refused:
                    self._refuse(key, value, Refusal())
                else:
                    self.notices.append(Finding(key, value, "no-effect", f"See {_TABLE}.", severity="notice"))
            case Moved(to=to, unset=unset, convert=convert, yields=yields):
                is_given = value is not None and not is_among(value, unset)
                moved = convert(value, values) if convert and is_given else value if is_given else None
                targets = {} if moved is None else dict.fromkeys(to, moved)
                self._set(name, value, moved if isinstance(moved, Refusal) else targets, chain, yields)
            case Rewritten(keys=rewrite):
                if value is None:
                    node.pop(name)
                elif (result := rewrite(value, values, chain[0].values)) is not None:
                    self._set(name, value, result, chain)
            case Below():
                node.pop(name)
                if isinstance(value, dict):
                    self._below(action, key, value, chain)
                elif isinstance(action.rest, Dropped) and action.rest.is_told:
                    node[name] = value
                    self._apply(action.rest, name, value, chain)
                elif not is_among(value, OFF):
                    self._refuse(key, value, Refusal(f"must be a section with keys, not {show(value)}."))

    def _below(self, section: Below, key: str, value: Tree, chain: Chain) -> None:
        """Translate an unknown section, which is no longer in the tree."""
        if isinstance(section.rest, Dropped) and value.keys() - section.keys.keys():
            self._report.forget(key)
            if section.rest.is_told:
                self.notices.append(Finding(key, value, "no-effect", f"See {_TABLE}.", severity="notice"))
        self._inner(section, (*chain, _place(key, value, {})))

    def _inner(self, section: Below, chain: Chain) -> None:
        rest = None if isinstance(section.rest, Dropped) else section.rest
        for name, value in list(chain[-1].node.items()):
            if (action := section.keys.get(name, rest)) is not None:
                self._apply(action, name, value, chain)

    def _refuse(self, key: str, value: Any, refusal: Refusal) -> None:
        nothing = f"has no counterpart here (it is {show(value)}); see {_TABLE}."
        self._report.add(Finding(key, value, "unsupported-key", refusal.why or nothing))

    def _set(
        self, name: str, value: Any, result: Mapping[str, Any] | Refusal, chain: Chain, yields: bool = True
    ) -> None:
        """Take a key out of the tree, and set the values of other keys (as in `Moved`) that it stands for.

        An existing value stays; unless `yields`, a different value is reported.
        """
        key = join_key(chain[-1].key, name)
        chain[-1].node.pop(name, None)
        if isinstance(result, Refusal):
            self._refuse(key, value, result)
            return
        for to, part in result.items():
            above = to.count("../")
            place = chain[0] if to.startswith("/") else chain[-1 - above]
            path = to.removeprefix("/").removeprefix("../" * above).replace("*", name)
            self._moves += 1
            self._put(place, path.split("."), part, yields, key)

    def _put(self, place: Place, parts: list[str], value: Any, yields: bool, written: str) -> None:
        (name, *rest), (key, node, _), places = parts, place, self._report.places
        if name.endswith("[]"):
            entries = node.get(name[:-2])
            for index, entry in enumerate(entries if isinstance(entries, list) else []):
                if isinstance(entry, dict):
                    self._put(_place(f"{join_key(key, name[:-2])}[{index}]", entry, {}), rest, value, yields, written)
            return
        at, there = join_key(key, name), node.get(name)
        if there is None:
            there = node[name] = {} if rest or isinstance(value, dict) else value
            if written in places:
                places.setdefault(at, replace(places[written], key=places[written].key or written))
        if rest and isinstance(there, dict):
            self._put(_place(at, there, {}), rest, value, yields, written)
        elif isinstance(value, dict) and isinstance(there, dict):
            for part, entry in value.items():
                self._put(_place(at, there, {}), [str(part)], entry, yields, join_key(written, str(part)))
        elif not yields and there != value:
            message = f"is {show(value)}, but {at} is {show(there)}; give one of them."
            self._report.add(Finding(written, value, "two-spellings", message))


def _place(key: str, node: Tree, above: Any) -> Place:
    return Place(key, node, merge(above, node, WHOLE) if isinstance(above, dict) and above else dict(node))


def _entries(typed: Type, key: str, value: Any, above: Any) -> Iterator[Place]:
    """Yield the section, or the sections of a list or mapping."""
    if typed.entry is None:
        if isinstance(value, dict):
            yield _place(key, value, above)
        return
    items = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
    for name, entry in items:
        if isinstance(entry, dict):
            yield _place(join_key(key, name), entry, {})
