"""A configuration under construction: values with their origins, keys without a counterpart, and both as YAML."""

from __future__ import annotations

import re
import textwrap
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

from trinity_core.config.fields import setting_at
from trinity_core.config.foreign.key_action import (
    SILENT,
    Below,
    Cases,
    Imported,
    KeyAction,
    Moved,
    Noted,
    Refused,
    is_among,
)
from trinity_core.config.foreign.verl_keys import SAID
from trinity_core.config.schema import Config
from trinity_core.config.yaml_text import dump_line
from trinity_core.import_verl.run_keys import RENAMED, counterpart, prefixes, verl_actions, verl_settings
from trinity_core.import_verl.verl_settings import Unread, VerlSettings

OFF: tuple[Any, ...] = (None, False, "", [], {}, "???", "None", -1)
"""Values that request nothing."""
WIDTH = 118
MANY_KEYS = 12
"""Maximum number of keys listed individually for one reason."""


@dataclass(frozen=True)
class Written:
    value: Any
    origin: str
    """The value's source, for a comment."""


@dataclass
class Draft:
    """The configuration built from veRL's settings. Each veRL key is used once, or left out with a reason."""

    verl: VerlSettings
    tree: dict[str, Any] = field(default_factory=dict)
    """Sections, and lists of sections, with a `Written` for each value."""
    left_out: dict[str, list[str]] = field(default_factory=dict)
    """Reason → veRL keys, with their values."""
    used: set[str] = field(default_factory=set)
    """veRL keys that have been handled."""
    renamed: dict[str, str] = field(default_factory=dict)
    """veRL's older name of a key → the name that the file has."""

    def __post_init__(self) -> None:
        self.actions = verl_actions(self.verl.is_sft)
        values = dict(self.verl.values)
        for new, old in RENAMED.items():
            for key in [key for key in values if key == new or (new.endswith(".") and key.startswith(new))]:
                target = f"{old}{key[len(new) :]}"
                if values.get(target) is None:
                    values[target] = values.pop(key)
                    self.renamed[target] = key
        self.verl = replace(self.verl, values=values)

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

    def first(self, keys: Iterable[str], default: Any = None) -> tuple[str, Any]:
        """Return the first of these veRL keys that is given, with its value; otherwise the first key and the
        default."""
        keys = list(keys)
        values = [(key, value) for key in keys if (value := self.get(key)) is not None]
        return values[0] if values else (keys[0], default)

    def origin(self, key: str) -> str:
        """Return the comment for a value that comes from this key."""
        return key if self.verl.values.get(key) not in (None, "???") else f"{key} (veRL's default)"

    def put(self, native: str, value: Any, origin: str) -> None:
        *path, name = native.split(".")
        section = self.tree
        for segment in path:
            section = section.setdefault(segment, {})
        section[name] = Written(value, origin)

    def leave(self, key: str, reason: str) -> None:
        self.used.add(key)
        value = self.verl.values.get(key)
        text = shown(value.text if isinstance(value, Unread) else value)
        name = self.renamed.get(key, key)
        entry = name if value is None else f"{name}={text}"
        entries = self.left_out.setdefault(reason, [])
        if entry not in entries:
            entries.append(entry)

    def remark(self, text: str) -> None:
        """Record a remark that belongs to no single key."""
        self.left_out.setdefault(text, [])

    def rows(self, defaults: Mapping[str, Any], steps: Mapping[str, int] | None = None) -> None:
        """Write every key that has a counterpart, and veRL's `defaults` for missing ones; `???` for a value that is not
        in the file, unless it is only a name.

        `steps` are the steps here of one of veRL's, for keys that count such.
        """
        left = {key: value for key, value in defaults.items() if self.verl.values.get(key) in (None, "???")}
        for key in [*left, *(key for key in self.verl.values if key not in left)]:
            native, action = counterpart(self.actions, key)
            if not native or key in self.used:
                continue
            if isinstance(self.verl.values.get(key), Unread) and native not in ("project", "name"):
                self.get(key)
                self.put(native, "???", key)
                continue
            if (value := self.get(key, defaults.get(key))) is None:
                continue
            written = _converted(action, value)
            if written is None:
                continue
            own = next((verl_settings()[prefix] for prefix in prefixes(key) if prefix in verl_settings()), None)
            if action is None and own is not None and written == own.default:
                continue
            choices = setting_at(native).choices if action is not None else ()
            if choices and isinstance(written, str) and written not in choices:
                self.leave(key, f"{native} knows {', '.join(choices)}")
                continue
            origin, interval = self.origin(key), (steps or {}).get(key, 1)
            if isinstance(written, int) and interval != 1 and written:
                written, origin = written * interval, f"{origin} * {interval}"
            self.put(native, written, origin)

    def absent(self) -> None:
        """List the remaining keys, with the table's reasons."""
        for key, value in self.verl.values.items():
            if key in self.used:
                continue
            if reason := "" if value in OFF else self._reason(key, value):
                self.leave(key, reason)
            self.used.add(key)

    def _reason(self, key: str, value: Any) -> str:
        """Return why a key has no counterpart; "" if the key has no effect."""
        prefix = next((prefix for prefix in prefixes(key) if prefix in self.actions), "")
        action = self.actions.get(prefix)
        if isinstance(action, Cases):
            action = next((case for other, case in action.of.items() if other == value), action.rest)
        if isinstance(action, Below):
            switches = {name: inner for name, inner in action.keys.items() if isinstance(inner, Refused)}
            on = [inner for name, inner in switches.items() if self._is_on(f"{prefix}.{name}")]
            action = on[0] if on else action.rest
        if action is SILENT or (isinstance(action, Noted | Refused) and is_among(value, action.harmless)):
            return ""
        if isinstance(action, Noted) and action.asked_by:
            section = prefix.rpartition(".")[0]
            places = (f"{prefix}.{action.asked_by}", f"{section}.{action.asked_by}", action.asked_by)
            return _after_colon(action.why) if any(map(self._is_on, places)) else ""
        if isinstance(action, Noted | Refused) and (action is not SAID or prefix == key):
            return _after_colon(action.why)
        return "there is no such setting here: see docs/configuration.md"

    def _is_on(self, key: str) -> bool:
        value, action = self.verl.values.get(key), self.actions.get(key)
        harmless = action.harmless if isinstance(action, Noted | Refused) else ()
        return value not in OFF and not is_among(value, harmless)


def whole(draft: Draft, key: str, default: int) -> int:
    value = draft.get(key, default)
    if isinstance(value, str) and value.isdigit():
        return int(value)
    if isinstance(value, int) and not isinstance(value, bool) and value > 0:
        return value
    draft.leave(key, f"must be a number here; {default} was taken: give key=value behind the file")
    return default


def _after_colon(sentence: str) -> str:
    """Format a sentence to follow a colon; names keep their capitals."""
    first = sentence.partition(" ")[0]
    is_name = first == "Megatron" or any(map(str.isupper, first[1:]))
    return (sentence[:1] if is_name else sentence[:1].lower()) + sentence[1:].rstrip(".")


def _converted(action: KeyAction | None, value: Any) -> Any:
    """Return veRL's value in our notation; None if it requests nothing."""
    match action:
        case Imported(convert=convert):
            return value if convert is None else convert(value)
        case Moved(unset=unset) if is_among(value, unset):
            return None
        case Moved(convert=convert) if convert is not None:
            return convert(value, {})
    return value


def shown(value: Any, limit: int = 60) -> str:
    """Format a value for a comment: on one line, and not too long."""
    text = "".join(char if char.isprintable() else " " for char in str(value))
    return text if len(text) <= limit else f"{text[:limit]}…"


def left_out_lines(draft: Draft) -> list[str]:
    """Return lines with the keys without a counterpart, by reason."""
    lines = []
    for reason, keys in draft.left_out.items():
        text = f"{', '.join(_gathered(keys))}: {reason}" if keys else reason
        lines += textwrap.wrap(text, WIDTH, initial_indent="- ", subsequent_indent="    ", break_on_hyphens=False)
    return lines


def _gathered(keys: list[str]) -> list[str]:
    """Return the keys; if there are many, those of a section are joined."""
    if len(keys) <= MANY_KEYS:
        return keys
    sections: dict[str, list[str]] = {}
    for key in keys:
        sections.setdefault(".".join(key.partition("=")[0].split(".")[:3][:-1]), []).append(key)
    return [
        key
        for section, inner in sections.items()
        for key in ([f"{section}.* ({len(inner)} keys)"] if len(inner) > 3 else inner)
    ]


def commented_yaml(draft: Draft, name: str) -> str:
    """Return the text of the file; `name` is the name of its source."""
    lines = [f"# Imported from {name} ({draft.verl.program}). The comments name veRL's settings."]
    if draft.left_out:
        lines += ["#", "# Without a counterpart here:", *(f"# {line}" for line in left_out_lines(draft))]
    lines.append("")
    for section in Config.model_fields:
        if section in draft.tree:
            lines += _lines({section: draft.tree[section]}, 0, draft.verl.values)
    text = "\n".join(lines) + "\n"
    for old, new in draft.renamed.items():
        text = re.sub(rf"(?<![\w.]){re.escape(old)}(?![\w.])", new, text)
    return text


def _lines(section: dict[str, Any], indent: int, verl: dict[str, Any]) -> Iterator[str]:
    """Yield single values first, then sections; a part's arguments stay behind its name."""
    apart = sorted(section, key=lambda name: not isinstance(section[name], Written) and not name.endswith("_args"))
    for name in apart:
        yield from _entry(f"{' ' * indent}{name}:", section[name], indent + 2, verl)


def _entry(head: str, value: Any, indent: int, verl: dict[str, Any]) -> Iterator[str]:
    if isinstance(value, Written):
        yield f"{head} {dump_line(value.value)}{_comment(value, verl)}"
    elif isinstance(value, dict):
        yield head
        yield from _lines(value, indent, verl)
    else:
        yield head
        for item in value:
            first, *others = _lines(item, indent + 2, verl)
            yield f"{' ' * indent}- {first.lstrip()}"
            yield from others


def _comment(written: Written, verl: dict[str, Any]) -> str:
    """Return the origin, with veRL's value if that differs."""
    original = verl.get(written.origin, written.value)
    original = original.text if isinstance(original, Unread) else original
    differs = original != written.value and not isinstance(original, list | dict)
    return f"  # {written.origin}{f'={shown(original)}' if differs else ''}" if written.origin else ""
