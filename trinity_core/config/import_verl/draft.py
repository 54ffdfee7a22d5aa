"""A configuration in the making: values with their origins, and what has no counterpart."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from fnmatch import fnmatchcase
from typing import Any

from trinity_core.config.dialects.tables import KEYS
from trinity_core.config.dialects.verdict import Noted
from trinity_core.config.fields import Setting, sections, settings
from trinity_core.config.import_verl.counterparts import ABSENT, SECTIONS, Absent, Counterpart
from trinity_core.config.import_verl.verl_settings import Unread, VerlSettings
from trinity_core.config.schema import VerlConfig
from trinity_core.config.verl import ROOT, spellings

_OFF: tuple[Any, ...] = (None, False, "", [], {}, "???", "None", -1)
"""Values that ask for nothing."""


@dataclass(frozen=True)
class Written:
    """A value of the configuration."""

    value: Any
    origin: str
    """What it comes from, as a comment."""


@dataclass
class Draft:
    """The configuration that grows out of veRL's settings. Each veRL key is used once, or left out with a reason."""

    verl: VerlSettings
    tree: dict[str, Any] = field(default_factory=dict)
    """Sections, and lists of sections, with a `Written` in place of each value."""
    left_out: dict[str, list[str]] = field(default_factory=dict)
    """Reason → veRL keys, with their values."""
    used: set[str] = field(default_factory=set)
    """veRL keys that are dealt with."""

    def get(self, key: str, default: Any = None) -> Any:
        """The value of a veRL key, which counts as used; `default` where it is not given."""
        self.used.add(key)
        value = self.verl.values.get(key)
        if isinstance(value, Unread):
            self.leave(key, "the file does not say what this is; give key=value after it")
            return default
        return default if value is None or value == "???" else value

    def first(self, keys: Iterable[str], default: Any = None) -> tuple[str, Any]:
        """The first of these veRL keys that is given, with its value; without one, the first key and the default."""
        keys = list(keys)
        found = [(key, value) for key in keys if (value := self.get(key)) is not None]
        return found[0] if found else (keys[0], default)

    def origin(self, key: str) -> str:
        """What stands as a comment behind a value that comes from this key."""
        return key if self.verl.values.get(key) not in (None, "???") else f"{key} (veRL's default)"

    def put(self, native: str, value: Any, origin: str) -> None:
        """Write a value at a dotted key."""
        *path, name = native.split(".")
        section = self.tree
        for each in path:
            section = section.setdefault(each, {})
        section[name] = Written(value, origin)

    def leave(self, key: str, reason: str) -> None:
        """Note that a key has no counterpart."""
        self.used.add(key)
        value = self.verl.values.get(key)
        text = shown(value.text if isinstance(value, Unread) else value)
        entry = key if value is None else f"{key}={text}"
        entries = self.left_out.setdefault(reason, [])
        if entry not in entries:
            entries.append(entry)

    def remark(self, text: str) -> None:
        """Note what no single key says."""
        self.left_out.setdefault(text, [])

    def rows(self, table: Iterable[Counterpart], batches: Any = 1) -> None:
        """Write the keys of a table; `batches` are the steps here of one step of veRL's."""
        for row in table:
            value = self.get(row.verl, row.default)
            if value is None:
                continue
            given, value, origin = value, row.convert(value), self.origin(row.verl)
            if value is None:
                self.leave(row.verl, f"{given} is not there for {row.native}")
                continue
            if row.counts_batches and isinstance(value, int) and batches != 1 and value:
                value, origin = value * batches, f"{origin} * sync_interval"
            self.put(row.native, value, origin)

    def trainer_config(self) -> None:
        """Write the keys that `trainer.trainer_config` knows: at their native key if they have one."""
        known = _trainer_keys()
        for key, value in list(self.verl.values.items()):
            setting = known.get(key) or known.get(_open_section(key, known))
            if setting is None or key in self.used or value is None:
                continue
            if (value := self.get(key)) is not None and value != setting.default:
                self.put(spellings().get(key, f"{ROOT}.{key}"), value, key)

    def absent(self) -> None:
        """List what is left over: with the reason of the table, that of the dialects, or that of the section."""
        noted = _noted_keys()
        for key, value in self.verl.values.items():
            if key in self.used:
                continue
            row = _fitting(key, ABSENT)
            asked = row is None or not row.asked_by or self._is_on(row.asked_by)
            why = noted.get(key) or noted.get(_open_section(key, noted))
            if value in _OFF or not asked:
                self.used.add(key)
            elif row is None and why:
                self.leave(key, _sentence(why))
            else:
                row = row or _fitting(key, SECTIONS)
                self.leave(key, row.reason if row else "this section is not known here")

    def _is_on(self, pattern: str) -> bool:
        values = self.verl.values.items()
        return any(value not in _OFF for key, value in values if fnmatchcase(key, pattern))


def _trainer_keys() -> Mapping[str, Setting]:
    """Every key below `trainer.trainer_config` that is no section."""
    return {
        f"{key}.{setting.name}" if key else setting.name: setting
        for key, section in sections(VerlConfig)
        for setting in settings(section)
        if setting.section is None
    }


def _noted_keys() -> Mapping[str, str]:
    """The keys below `trainer.trainer_config` that have no effect, each with a sentence that says why."""
    return {
        f"{key}.{name}" if key else name: verdict.why
        for key, section in sections(VerlConfig)
        for name, verdict in KEYS.get(section, {}).items()
        if isinstance(verdict, Noted) and verdict.why
    }


def _fitting(key: str, table: Iterable[Absent]) -> Absent | None:
    return next((row for row in table if fnmatchcase(key, row.pattern)), None)


def _sentence(doc: str) -> str:
    """The doc of a setting within a sentence."""
    return (doc[:1].lower() if doc[1:2].islower() else doc[:1]) + doc[1:].rstrip(".")


def _open_section(key: str, known: Mapping[str, Any]) -> str:
    """The known key that holds any keys, such as `override_config`, and this one; empty if there is none."""
    return next((each for each in _parents(key) if each in known), "")


def _parents(key: str) -> Iterator[str]:
    while "." in key:
        key = key.rpartition(".")[0]
        yield key


def shown(value: Any, limit: int = 60) -> str:
    """A value in a comment: on one line, and not too long."""
    text = "".join(char if char.isprintable() else " " for char in str(value))
    return text if len(text) <= limit else f"{text[:limit]}…"
