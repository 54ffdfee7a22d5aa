"""Documents all settings from the schema: as a page (`python -m trinity_core.config.reference [FILE]`), and as text for
a terminal (`trinity schema`)."""

from __future__ import annotations

import inspect
import json
import sys
import textwrap
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from trinity_core.base.errors import TrinityError, closest
from trinity_core.config.fields import Setting, sections, settings
from trinity_core.config.foreign.table import accepted_keys
from trinity_core.config.schema import Config

WIDTH = 100
"""Width of the terminal text in columns."""
PAGE = Path(__file__).parents[2] / "docs" / "configuration.md"
MARKER = "<!-- Everything below is generated from the schema: `make generated`. -->"
"""The line in `PAGE` that ends the handwritten part."""


def page() -> str:
    """Return the page as Markdown: the introduction from `PAGE`, which exists only in a checkout, and the settings."""
    introduction = PAGE.read_text(encoding="utf-8").partition(MARKER)[0]
    return "\n".join([introduction + MARKER, "", *_section(Config, "", 2, {})]).rstrip() + "\n"


def _section(cls: type, key: str, level: int, shown: dict[type, str]) -> list[str]:
    """Return heading, doc and table of a section, then the sections below it that are not `shown` yet."""
    shown[cls] = key
    listed = settings(cls)
    below = {
        setting.name: (f"{key}.{setting.name}" if key else setting.name) + setting.entry_key
        for setting in listed
        if setting.section is not None
    }
    lines = [f"{'#' * min(level, 4)} {f'`{key}`' if key else 'The whole file'}", "", inspect.getdoc(cls) or "", ""]
    lines += ["| key | value | default | meaning |", "| --- | --- | --- | --- |"]
    lines += [_row(setting, shown) for setting in listed]
    if key.startswith("trainer.trainer_config."):
        lines += [f"| `{name}` |  |  | {text} |" for name, text, native in accepted_keys(cls) if native]
    lines += [""]
    for setting in listed:
        if setting.section is not None and setting.section not in shown:
            lines += _section(setting.section, below[setting.name], level + 1, shown)
    return lines


def _row(setting: Setting, shown: dict[type, str]) -> str:
    meaning = setting.doc
    if setting.section is not None and setting.section in shown:
        meaning += f" As `{shown[setting.section]}`."
    cells = (f"`{setting.name}`", value_text(setting), default_text(setting), meaning)
    return "| " + " | ".join(cell.replace("|", "\\|") for cell in cells) + " |"


def value_text(setting: Setting) -> str:
    if setting.section is not None:
        kinds = {"[i]": "list of sections", ".NAME": "sections by name"}
        return kinds.get(setting.entry_key, "section")
    if setting.choices or setting.names:
        return ", ".join(f"`{choice}`" for choice in setting.choices or setting.names)
    words = {"integer": "whole number", "number": "number", "boolean": "true, false", "string": "text", "array": "list"}
    text = "text or list" if setting.takes_text_or_list else words.get(setting.kind, "keys and values")
    bounds = f", {setting.bounds}" if setting.bounds else ""
    unit = f" of {setting.unit}" if setting.unit else ""
    return f"{text}{unit}{bounds}"


def default_text(setting: Setting) -> str:
    if setting.section is not None:
        return ""
    if setting.derived:
        return "derived"
    return "null" if setting.default is None else f"`{_plain(setting.default)}`"


def _plain(value: Any) -> str:
    return value if isinstance(value, str) and value else json.dumps(value)


def listing(below: str = "") -> str:
    """Return each setting with its values, default and doc; `below` restricts it to one setting or section.

    Raises TrinityError for an unknown key, suggesting the full keys that end in it.
    """
    rows = [
        (key, text)
        for key, text in _listed()
        if not below or key == below or key.startswith((f"{below}.", f"{below}["))
    ]
    if not rows:
        keys = [key for key, _ in sections()] + [key for key, _ in _listed()]
        meant = [key for key in keys if key.endswith(f".{below}")] or [closest(below, keys)]
        asks = f" Did you mean {' or '.join(map(repr, meant))}?" if meant[0] else ""
        raise TrinityError(f"There is no setting '{below}'.{asks}")
    return "\n".join(text for _, text in rows)


def _listed() -> Iterator[tuple[str, str]]:
    for prefix, section in sections():
        for setting in settings(section):
            if setting.section is not None:
                continue
            key = f"{prefix}.{setting.name}" if prefix else setting.name
            default = default_text(setting)
            head = f"{key}: {value_text(setting)}{f' [{default}]' if default else ''}"
            doc = textwrap.fill(setting.doc, WIDTH, initial_indent="    ", subsequent_indent="    ")
            yield key, f"{head}\n{doc}".replace("`", "")


def main() -> None:
    target = Path(sys.argv[1]) if len(sys.argv) > 1 else PAGE
    target.parent.mkdir(parents=True, exist_ok=True)
    target.write_text(page(), encoding="utf-8")


if __name__ == "__main__":
    main()
