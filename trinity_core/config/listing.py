"""All settings as text for a terminal: `trinity schema`."""

from __future__ import annotations

import textwrap
from collections.abc import Iterator

from trinity_core.config.fields import sections, settings
from trinity_core.config.json_schema import described
from trinity_core.config.reference import default_text, value_text
from trinity_core.errors import TrinityError
from trinity_core.slips import closest

WIDTH = 100


def listing(below: str = "") -> str:
    """Each setting with its values, default and doc; `below` is a key: its setting, or those of its section.

    Raises TrinityError if there is no such key.
    """
    found = [
        (key, text)
        for key, text in _listed()
        if not below or key == below or key.startswith((f"{below}.", f"{below}["))
    ]
    if not found:
        known = [key for key, _ in sections()] + [key for key, _ in _listed()]
        meant = closest(below, known)
        raise TrinityError(f"There is no setting '{below}'.{f' Did you mean {meant!r}?' if meant else ''}")
    return "\n".join(text for _, text in found)


def _listed() -> Iterator[tuple[str, str]]:
    for prefix, section in sections():
        for setting in settings(section):
            if setting.section is not None:
                continue
            key = f"{prefix}.{setting.name}" if prefix else setting.name
            default = default_text(setting)
            head = f"{key}: {value_text(setting)}{f' [{default}]' if default else ''}"
            doc = textwrap.fill(described(setting), WIDTH, initial_indent="    ", subsequent_indent="    ")
            yield key, f"{head}\n{doc}".replace("`", "")
