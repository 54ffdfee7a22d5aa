"""Documents all settings from the schema, and the parts that they name from the registries: as a page (`python -m
trinity_core.config.reference [FILE]`), and as text for a terminal (`trinity schema`)."""

from __future__ import annotations

import inspect
import json
import sys
import textwrap
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, Literal, get_args, get_origin

from pydantic.fields import FieldInfo

from trinity_core.base.errors import TrinityError, closest
from trinity_core.base.registry import HOMES, registry_of
from trinity_core.config.algorithm_types import PARTS, AlgorithmType
from trinity_core.config.fields import Setting, plain_settings, sections, settings
from trinity_core.config.findings import is_within
from trinity_core.config.foreign.names import INSTEAD, TRL_SETTINGS
from trinity_core.config.foreign.table import accepted_keys
from trinity_core.config.schema import Config

WIDTH = 100
"""Width of the terminal text in columns."""
PAGE = Path(__file__).parents[2] / "docs" / "configuration.md"
MARKER = "<!-- Everything below is generated from the schema: `make generated`. -->"
"""The line in `PAGE` that ends the handwritten part."""


def page() -> str:
    """Return the page as Markdown: the introduction from `PAGE`, which exists only in a checkout, the settings, and the
    parts that they name."""
    introduction = PAGE.read_text(encoding="utf-8").partition(MARKER)[0]
    lines = [introduction + MARKER, "", *_section(Config, "", 2, {}), *_algorithms(), *_parts()]
    lines += _names("Names of TRL and peft", "`GRPOConfig`, `DPOConfig`, `SFTConfig` and `LoraConfig`.", TRL_SETTINGS)
    lines += _names("Names of Trinity-RFT and veRL", "Those without a counterpart of their own.", INSTEAD)
    return "\n".join(lines).rstrip() + "\n"


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


def _algorithms() -> list[str]:
    """Return a table of the parts that each `algorithm_type` stands for, without those that are the default of all."""
    lines = ["## Algorithm types", "", "What [each of them](algorithms.md) stands for.", ""]
    lines += ["| `algorithm_type` | parts | least, default `repeat_times` |", "| --- | --- | --- |"]
    for name, algorithm in registry_of("algorithm.algorithm_type").items():
        parts = []
        for part in PARTS:
            value, args = getattr(algorithm, part), getattr(algorithm, f"{part}_args")
            if value != getattr(AlgorithmType, part) or args:
                shown = ", ".join(f"{key} {_plain(default)}" for key, default in args.items())
                parts.append(f"`{part}: {value}`" + (f" ({shown})" if shown else ""))
        lines.append(
            f"| `{name}` | {', '.join(parts)} | {algorithm.min_repeat_times}, {algorithm.default_repeat_times} |"
        )
    return [*lines, ""]


def _parts() -> list[str]:
    """Return a table for each kind of part that a configuration names: the built-in ones, with their arguments."""
    lines = ["## Parts and their arguments", "", "An argument without a default must be given.", ""]
    kinds: dict[str, list[str]] = {}
    for key, home in HOMES.items():
        kinds.setdefault(home, []).append(key)
    for keys in kinds.values():
        if keys == ["algorithm.algorithm_type"]:
            continue
        names = ", ".join(f"`{key.removeprefix('algorithm.')}`" for key in keys)
        lines += [f"### {names}", "", "| name | arguments |", "| --- | --- |"]
        registry = registry_of(keys[0])
        for name, part in registry.items():
            if getattr(part, "function", part).__module__.startswith("trinity_core."):
                model = registry.arguments(part, name)
                fields = {} if model is None else model.model_fields
                arguments = ", ".join(_argument(argument, field) for argument, field in fields.items())
                lines.append(f"| `{name}` | {arguments} |".replace("\n", "\\n"))
        lines += [""]
    return lines


def _names(title: str, text: str, names: Mapping[str, str]) -> list[str]:
    """Return a table of what other systems' settings are called here."""
    lines = [f"## {title}", "", text, "", "| there | here |", "| --- | --- |"]
    return [*lines, *(f"| `{name}` | {ours} |" for name, ours in names.items()), ""]


def _argument(name: str, field: FieldInfo) -> str:
    """Return an argument with its default, and what else it may be if that is one of a few."""
    if field.is_required():
        return f"`{name}`"
    default = field.get_default(call_default_factory=True)
    kinds = [kind for kind in (field.annotation, *get_args(field.annotation)) if get_origin(kind) is Literal]
    also = [str(choice) for kind in kinds for choice in get_args(kind) if choice != default]
    is_made = not isinstance(default, str | int | float | list | tuple | None)  # by a factory: empty
    return f"`{name}` {_plain({} if is_made else default)}" + (f" (or {', '.join(also)})" if also else "")


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
    rows = [(key, text) for key, text in _listed() if not below or is_within(key, below)]
    if not rows:
        keys = [key for key, _ in sections()] + [key for key, _ in _listed()]
        meant = [key for key in keys if key.endswith(f".{below}")] or [closest(below, keys)]
        asks = f" Did you mean {' or '.join(map(repr, meant))}?" if meant[0] else ""
        raise TrinityError(f"There is no setting '{below}'.{asks}")
    return "\n".join(text for _, text in rows)


def _listed() -> Iterator[tuple[str, str]]:
    for key, setting in plain_settings():
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
