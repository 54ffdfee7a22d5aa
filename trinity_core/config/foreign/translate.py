"""Translates a tree with keys of Trinity-RFT and veRL into this schema's keys."""

from __future__ import annotations

import copy
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import replace
from typing import Any

from pydantic import BaseModel

from trinity_core.base.errors import closest
from trinity_core.config.fields import Type, type_at, types_of
from trinity_core.config.findings import Finding, Report, parts_of, value_at
from trinity_core.config.foreign.actions import (
    OFF,
    Action,
    Below,
    Dropped,
    Moved,
    Refusal,
    Rewritten,
    is_among,
)
from trinity_core.config.foreign.names import instead_of
from trinity_core.config.foreign.table import KEYS, action_of
from trinity_core.config.foreign.verl_keys import SECTIONS
from trinity_core.config.schema import Config
from trinity_core.config.source import WHOLE, Tree, inherited, join_key, merge
from trinity_core.config.validation import show

_TABLE = "docs/porting.md#keys-without-a-counterpart"
_TYPO = 0.9
"""Similarity to a known key at which an unknown one of veRL is reported instead of dropped."""


Chain = tuple[tuple[str, Tree], ...]
"""The sections that contain a key, with their own keys, from the top of the configuration or stage inwards."""


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
        self._top, self._values = "", dict[str, Any]()
        """The key of the configuration or stage, and its values before this walk, with what a stage inherits."""

    def whole(self, tree: Tree, key: str, above: Tree) -> None:
        """Translate a configuration or a stage, which inherits the sections `above`."""
        moves = -1
        while moves != self._moves:
            moves, self._top, self._values = self._moves, key, merge(above, tree, WHOLE)
            self._section(Config, ((key, tree),))

    def _section(self, cls: type[BaseModel], chain: Chain) -> None:
        _, node = chain[-1]
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
        key, node = chain[-1]
        choices = {choice.lower(): choice for choice in typed.choices}
        if isinstance(value, str) and value not in typed.choices and value.lower() in choices:
            node[name] = value = choices[value.lower()]
        if isinstance(action, Rewritten):
            self._rewrite(action, name, value, chain)
        elif isinstance(action, Below) and isinstance(value, dict):
            self._inner(action, (*chain, (join_key(key, name), value)))
        if typed.section is not None and not (key == "" and name == "stages"):
            for place in _entries(typed, join_key(key, name), node.get(name)):
                self._section(typed.section, (*chain, place))

    def _apply(self, action: Action, name: str, value: Any, chain: Chain) -> None:
        """Take a foreign key out of the tree, and do with its value what the action says."""
        key = join_key(chain[-1][0], name)
        if isinstance(action, Moved | Rewritten) and value is not None:
            self._rewrite(action, name, value, chain)
        elif isinstance(action, Below) and isinstance(value, dict):
            chain[-1][1].pop(name)
            if isinstance(action.rest, Dropped) and value.keys() - action.keys.keys():
                self._drop(action.rest, key, value)
            self._inner(action, (*chain, (key, value)))
        else:
            chain[-1][1].pop(name)
            rest = action.rest if isinstance(action, Below) else action
            if isinstance(rest, Dropped) and (rest.is_told or rest is action):
                self._drop(rest, key, value)
            elif not is_among(value, OFF):
                self._refuse(key, value, Refusal(f"must be a section with keys, not {show(value)}."))

    def _drop(self, action: Dropped, key: str, value: Any) -> None:
        """Report a key without a counterpart, which is no longer in the tree, if it requests anything."""
        if not action.refused:
            self._report.forget(key)
        if action.requests_nothing(value):
            return
        if action.refused:
            self._refuse(key, value, Refusal())
        else:
            self.notices.append(Finding(key, value, "no-effect", f"{_advice(key)}.", severity="notice"))

    def _inner(self, section: Below, chain: Chain) -> None:
        rest = None if isinstance(section.rest, Dropped) else section.rest
        for name, value in list(chain[-1][1].items()):
            if (action := section.keys.get(name, rest)) is not None:
                self._apply(action, name, value, chain)

    def _rewrite(self, action: Moved | Rewritten, name: str, value: Any, chain: Chain) -> None:
        """Replace a key by what it stands for."""
        if value is None and isinstance(action, Rewritten) and not action.of_null:
            return
        result = action.keys(value, self._section_of(chain), self._values)
        if result is not None:
            self._set(name, value, result, chain, action.yields)

    def _section_of(self, chain: Chain) -> Mapping[str, Any]:
        """Return the innermost section as it was before this walk, with what a stage inherits."""
        key = chain[-1][0].removeprefix(self._top).removeprefix(".")
        section = value_at(self._values, key) if key else self._values
        return section if isinstance(section, Mapping) else {}

    def _refuse(self, key: str, value: Any, refusal: Refusal) -> None:
        nothing = f"has no counterpart here (it is {show(value)}). {_advice(key)}."
        self._report.add(Finding(key, value, "unsupported-key", refusal.why or nothing))

    def _set(self, name: str, value: Any, result: Mapping[str, Any] | Refusal, chain: Chain, yields: bool) -> None:
        """Take a key out of the tree, and set the values of other keys (as in `Moved`) that it stands for.

        An existing value stays; unless `yields`, a different value is reported.
        """
        key = join_key(chain[-1][0], name)
        chain[-1][1].pop(name, None)
        if isinstance(result, Refusal):
            self._refuse(key, value, result)
            return
        for to, part in result.items():
            above = to.count("../")
            place = chain[0] if to.startswith("/") else chain[-1 - above]
            path = to.removeprefix("/").removeprefix("../" * above).replace("*", name)
            self._moves += 1
            self._put(*place, path.split("."), part, yields, key)

    def _put(self, key: str, node: Tree, parts: list[str], value: Any, yields: bool, written: str) -> None:
        (name, *rest), places = parts, self._report.places
        if name.endswith("[]"):
            entries = node.get(name[:-2])
            for index, entry in enumerate(entries if isinstance(entries, list) else []):
                if isinstance(entry, dict):
                    self._put(f"{join_key(key, name[:-2])}[{index}]", entry, rest, value, yields, written)
            return
        at, there = join_key(key, name), node.get(name)
        if there is None:
            typed = None if rest else type_at(Config, parts_of(at))
            value = self._report.as_text(written, value) if typed is not None and typed.plain is str else value
            there = node[name] = {} if rest or isinstance(value, dict) else value
            if written in places:
                places.setdefault(at, replace(places[written], key=places[written].key or written))
        if rest and isinstance(there, dict):
            self._put(at, there, rest, value, yields, written)
        elif isinstance(value, dict) and isinstance(there, dict):
            for part, entry in value.items():
                self._put(at, there, [str(part)], entry, yields, join_key(written, str(part)))
        elif not yields and there != value:
            message = f"is {show(value)}, but {at} is {show(there)}; give one of them."
            self._report.add(Finding(written, value, "two-spellings", message))


def _advice(key: str) -> str:
    """Return what to do about a key without a counterpart."""
    instead = instead_of(key)
    return f"Instead: {instead}" if instead else f"See {_TABLE}"


def _entries(typed: Type, key: str, value: Any) -> Iterator[tuple[str, Tree]]:
    """Yield the section, or the sections of a list or mapping."""
    if typed.entry is None:
        entries: Iterable[tuple[str, Any]] = [(key, value)]
    else:
        items = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
        entries = [(join_key(key, name), entry) for name, entry in items]
    yield from ((place, entry) for place, entry in entries if isinstance(entry, dict))
