"""A configuration under construction: values with their origins, keys without a counterpart, and both as YAML."""

from __future__ import annotations

import functools
import re
import textwrap
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from typing import Any, NamedTuple

from trinity_core.config.fields import sections, settings, type_at
from trinity_core.config.findings import parts_of
from trinity_core.config.foreign.actions import Action, Below, Dropped, Moved, Refusal
from trinity_core.config.foreign.names import instead_of
from trinity_core.config.foreign.run_keys import ANYWHERE
from trinity_core.config.foreign.table import KEYS, ROOT
from trinity_core.config.import_verl.keys import COUNTERPARTS, RENAMED
from trinity_core.config.import_verl.read import Unread, VerlRun
from trinity_core.config.schema import Config, VerlConfig
from trinity_core.config.yaml_text import dump_line

OFF: tuple[Any, ...] = (None, False, "", [], {}, "???", "None", -1)
"""Values that request nothing."""
_KEY = re.compile(r"[a-z_]+(\.\w+)+")


class Written(NamedTuple):
    value: Any
    origin: str
    """The value's source, for a comment."""


@dataclass
class Draft:
    """The configuration built from veRL's settings. Each veRL key is used once, or left out with a reason."""

    verl: VerlRun
    tree: dict[str, Any] = field(default_factory=dict)
    """Sections, and lists of sections, with a `Written` for each value."""
    left_out: dict[str, list[str]] = field(default_factory=dict)
    """Reason → veRL keys, with their values."""
    used: set[str] = field(default_factory=set)
    """veRL keys that have been handled."""

    def __post_init__(self) -> None:
        values = dict(self.verl.values)
        self.renamed: dict[str, str] = {}
        for new, old in RENAMED[self.verl.is_sft].items():
            for key in [key for key in values if key == new or (new.endswith(".") and key.startswith(new))]:
                if values.get(target := f"{old}{key[len(new) :]}") is None:
                    values[target], self.renamed[target] = values.pop(key), key
        self.verl = replace(self.verl, values=values)
        self.left_out |= {remark: [] for remark in self.verl.remarks}

    def get(self, key: str, default: Any = None) -> Any:
        """Return the value of a veRL key, which then counts as used; `default` if it is not given."""
        self.used.add(key)
        value = self.verl.values.get(key)
        if isinstance(value, Unread):
            self.leave(key, "the file does not say what this is; give key=value after it")
            return default
        return default if value is None or value == "???" else value

    def path(self, key: str, default: Any) -> Any:
        """Return a model or data set; `???` if the file does not say which, never veRL's own."""
        value = self.get(key)
        return "???" if isinstance(self.verl.values.get(key), Unread) else value or default

    def whole(self, key: str, default: int) -> int:
        value = self.get(key, default)
        if isinstance(value, str) and value.isdigit():
            return int(value)
        if isinstance(value, int) and not isinstance(value, bool) and value > 0:
            return value
        self.leave(key, f"must be a number here; {default} was taken: give key=value behind the file")
        return default

    def first(self, keys: Iterable[str], default: Any = None) -> tuple[str, Any]:
        """Return the first of these veRL keys that is given, with its value; otherwise the first key and `default`."""
        keys = list(keys)
        return next(((key, value) for key in keys if (value := self.get(key)) is not None), (keys[0], default))

    def written(self, value: Any, origin: str) -> Written:
        """Return a value with its comment; `origin` is a veRL key, or a text."""
        if not _KEY.fullmatch(origin):
            return Written(value, origin)
        stated = self.verl.values.get(origin)
        name = self.renamed.get(origin, origin)
        if stated is None or stated == "???":
            return Written(value, f"{name} (veRL's default)")
        original = stated.text if isinstance(stated, Unread) else stated
        differs = original != value and not isinstance(original, list | dict)
        return Written(value, f"{name}={_short(original)}" if differs else name)

    def put(self, native: str, value: Any, origin: str) -> None:
        *path, name = native.split(".")
        section = self.tree
        for segment in path:
            section = section.setdefault(segment, {})
        section[name] = self.written(value, origin)

    def leave(self, key: str, reason: str = "") -> None:
        """List a key as left out; by default because there is no such setting here."""
        instead = instead_of(key)
        reason = reason or f"no such setting here ({f'instead: {instead}' if instead else 'docs/porting.md'})"
        self.used.add(key)
        value = self.verl.values.get(key)
        name, text = self.renamed.get(key, key), _short(value.text if isinstance(value, Unread) else value)
        self.left_out.setdefault(reason, []).append(name if value is None else f"{name}={text}")

    def remark(self, text: str) -> None:
        """Record a remark that belongs to no single key."""
        self.left_out.setdefault(text, [])

    def rows(self, defaults: Mapping[str, Any], steps: Mapping[str, int] | None = None) -> None:
        """Write every key that has a counterpart, and veRL's `defaults` for missing ones; `???` for a value that is not
        in the file, unless it is only a name.

        `steps` are the steps here of one of veRL's, for keys that count such.
        """
        missing = {key: value for key, value in defaults.items() if self.verl.values.get(key) in (None, "???")}
        for key in [*missing, *(key for key in self.verl.values if key not in missing)]:
            native, action = self._counterpart(key)
            if not native or key in self.used:
                continue
            if isinstance(self.verl.values.get(key), Unread) and native not in ("project", "name"):
                self.get(key)
                self.put(native, "???", key)
                continue
            value = self._converted(key, action, self.get(key, defaults.get(key)))
            if isinstance(value, Refusal):
                self.leave(key, value.why)
                continue
            default = next((_verl_defaults()[prefix] for prefix in prefixes(key) if prefix in _verl_defaults()), OFF)
            if value is None or (native.startswith(ROOT) and value == default):
                continue
            typed = None if native.startswith(ROOT) else type_at(Config, parts_of(native))
            if typed is not None and typed.choices and isinstance(value, str) and value not in typed.choices:
                self.leave(key, f"{native} knows {', '.join(typed.choices)}")
                continue
            interval = (steps or {}).get(key, 1)
            if isinstance(value, int) and interval != 1 and value:
                self.put(native, value * interval, f"{self.written(value, key).origin} * {interval}")
            else:
                self.put(native, value, key)

    def _counterpart(self, key: str) -> tuple[str, Action | None]:
        """Return our key for a veRL key, and the action that leads to it; an empty key if there is none."""
        for prefix in prefixes(key):
            action = COUNTERPARTS[self.verl.is_sft].get(prefix) or _actions().get(prefix)
            if isinstance(action, Moved):
                to = f"{action.to[0]}{key[len(prefix) :]}"
                if to.startswith("/"):
                    return to[1:], action
                return self._counterpart(f"{prefix.rpartition('.')[0]}.{to}")
            if prefix in _verl_defaults():
                return f"{ROOT}.{key}", None
            if action is not None:
                break
        return "", None

    def _converted(self, key: str, action: Action | None, value: Any) -> Any:
        """Return veRL's value in our notation; None if it requests nothing, a Refusal if nothing here does it."""
        if not isinstance(action, Moved):
            return value
        above = f"{key.rpartition('.')[0]}."
        stated = ((name, other) for name, other in self.verl.values.items() if not isinstance(other, Unread))
        keys = action.keys(value, {n.removeprefix(above): other for n, other in stated if n.startswith(above)})
        return keys if isinstance(keys, Refusal) else next(iter(keys.values()), None)

    def absent(self) -> None:
        """List the remaining keys that request anything."""
        for key, value in self.verl.values.items():
            if key not in self.used and value not in OFF and not self._is_off(key, value):
                self.leave(key)

    def _is_off(self, key: str, value: Any) -> bool:
        """True if a key has no effect in veRL either, or asks for what is done anyway."""
        inner, *outer = prefixes(key)
        switches = [f"{prefix}.{name}" for prefix in outer for name in ("enable", "enabled")]
        if inner not in switches and any(self.verl.values.get(switch) is False for switch in switches):
            return True
        action = next((_actions()[prefix] for prefix in (inner, *outer) if prefix in _actions()), None)
        action = action or ANYWHERE.get(key.rpartition(".")[2])
        action = action.rest if isinstance(action, Below) else action
        return isinstance(action, Dropped) and action.requests_nothing(value)

    def left_out_lines(self) -> list[str]:
        """Return lines with the keys without a counterpart, by reason."""
        return [
            line
            for reason, keys in self.left_out.items()
            for line in textwrap.wrap(
                f"{', '.join(dict.fromkeys(keys))}: {reason}" if keys else reason,
                118, initial_indent="- ", subsequent_indent="    ", break_on_hyphens=False,
            )
        ]  # fmt: skip

    def yaml(self, name: str) -> str:
        """Return the text of the file; `name` is the name of its source."""
        lines = [f"# Imported from {name} ({self.verl.program}). The comments name veRL's settings."]
        if self.left_out:
            lines += ["#", "# Without a counterpart here:", *(f"# {line}" for line in self.left_out_lines())]
        ordered = {section: self.tree[section] for section in Config.model_fields if section in self.tree}
        return "\n".join([*lines, "", *(line for item in ordered.items() for line in _lines(dict([item]), ""))]) + "\n"


@functools.cache
def _actions() -> Mapping[str, Action]:
    """Return the table's actions for keys of `trainer.trainer_config`, also within sections, by dotted key."""

    def flat(key: str, action: Action) -> Iterator[tuple[str, Action]]:
        yield key, action
        for name, inner in action.keys.items() if isinstance(action, Below) else ():
            yield from flat(f"{key}.{name}", inner)

    return {
        path: inner
        for section, cls in sections(VerlConfig)
        for name, action in KEYS.get(cls, {}).items()
        for path, inner in flat(f"{section}.{name}".lstrip("."), action)
    }


@functools.cache
def _verl_defaults() -> Mapping[str, Any]:
    """Return the defaults of our settings that have a veRL key, by that key."""
    return {
        f"{section}.{setting.name}".lstrip("."): setting.default
        for section, cls in sections(VerlConfig)
        for setting in settings(cls)
        if setting.section is None
    }


def prefixes(key: str) -> Iterator[str]:
    """Yield a dotted key and the sections that contain it, innermost first."""
    while key:
        yield key
        key = key.rpartition(".")[0]


def _short(value: Any, limit: int = 60) -> str:
    """Format a value for a comment: on one line, and not too long."""
    text = "".join(char if char.isprintable() else " " for char in str(value))
    return text if len(text) <= limit else f"{text[:limit]}…"


def _lines(section: Mapping[str, Any], indent: str) -> Iterator[str]:
    """Yield single values first, then sections; a part's arguments stay behind its name."""
    for name in sorted(section, key=lambda name: not isinstance(section[name], Written) and not name.endswith("_args")):
        value, head = section[name], f"{indent}{name}:"
        if isinstance(value, Written):
            yield f"{head} {dump_line(value.value)}{f'  # {value.origin}' if value.origin else ''}"
            continue
        yield head
        if isinstance(value, dict):
            yield from _lines(value, f"{indent}  ")
        for item in value if isinstance(value, list) else ():
            first, *others = _lines(item, f"{indent}    ")
            yield from (f"{indent}  - {first.lstrip()}", *others)
