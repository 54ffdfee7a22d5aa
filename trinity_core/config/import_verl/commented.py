"""A draft as YAML: each value with its origin as a comment, what has no counterpart at the head."""

from __future__ import annotations

import textwrap
from collections.abc import Iterator
from typing import Any

from trinity_core.config.import_verl.draft import Draft, Written, shown
from trinity_core.config.schema import Config
from trinity_core.config.source import dump_line

_WIDTH = 118
_MANY = 12
"""Keys of one reason that are all listed."""


def left_out_lines(draft: Draft) -> list[str]:
    """What has no counterpart: the keys for each reason."""
    lines = []
    for reason, keys in draft.left_out.items():
        text = f"{', '.join(_gathered(keys))}: {reason}" if keys else reason
        lines += textwrap.wrap(text, _WIDTH, initial_indent="- ", subsequent_indent="    ", break_on_hyphens=False)
    return lines


def _gathered(keys: list[str]) -> list[str]:
    """The keys; where there are many, those of one section together."""
    if len(keys) <= _MANY:
        return keys
    sections: dict[str, list[str]] = {}
    for key in keys:
        sections.setdefault(".".join(key.partition("=")[0].split(".")[:3][:-1]), []).append(key)
    return [
        each
        for section, inner in sections.items()
        for each in ([f"{section}.* ({len(inner)} keys)"] if len(inner) > 3 else inner)
    ]


def commented_yaml(draft: Draft, name: str) -> str:
    """The text of the file; `name` is that of the file it was made from."""
    lines = [f"# Imported from {name} ({draft.verl.program}). veRL's words stand in the comments."]
    if draft.left_out:
        lines += ["#", "# Without a counterpart here:", *(f"# {line}" for line in left_out_lines(draft))]
    lines.append("")
    for section in Config.model_fields:
        if section in draft.tree:
            lines += _lines({section: draft.tree[section]}, 0, draft.verl.values)
    return "\n".join(lines) + "\n"


def _lines(section: dict[str, Any], indent: int, verl: dict[str, Any]) -> Iterator[str]:
    """Single values first, then sections; the arguments of a part stay behind its name."""
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
        for each in value:
            first, *others = _lines(each, indent + 2, verl)
            yield f"{' ' * indent}- {first.lstrip()}"
            yield from others


def _comment(written: Written, verl: dict[str, Any]) -> str:
    """The origin; with veRL's value where that is another one."""
    given = verl.get(written.origin, written.value)
    differs = given != written.value and not isinstance(given, list | dict)
    return f"  # {written.origin}{f'={shown(given)}' if differs else ''}" if written.origin else ""
