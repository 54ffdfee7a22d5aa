"""The table of foreign keys, used by the loader, its notices, the JSON Schema and `import-verl`."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from pydantic import BaseModel

from trinity_core.config.fields import types_of
from trinity_core.config.foreign import rollout_keys, run_keys, verl_keys
from trinity_core.config.foreign.actions import Action, Dropped, Keys, Moved

ROOT = "trainer.trainer_config"
KEYS: Mapping[type[Any], Keys] = {**run_keys.KEYS, **rollout_keys.KEYS, **verl_keys.KEYS}
"""Section of the schema → actions for foreign keys in it, besides those of `run_keys.ANYWHERE`."""


def action_of(section: type[BaseModel], name: str) -> Action | None:
    """Return the action for a key or a setting of a section; None if it has none."""
    return KEYS.get(section, {}).get(name) or (None if name in types_of(section) else run_keys.ANYWHERE.get(name))


def accepted_keys(section: type[BaseModel]) -> Iterator[tuple[str, str, str]]:
    """Yield the other keys that a section accepts, each with a sentence, and with the key here if it is just another
    spelling."""
    for name, action in KEYS.get(section, {}).items():
        is_refused = isinstance(action, Dropped) and action.refused and not action.default
        if name not in types_of(section) and not is_refused:
            target = action.to[0].lstrip("./") if isinstance(action, Moved) else ""
            text = f"Same as `{target}`." if target else "Without effect (docs/porting.md)."
            yield name, text, action.setting if isinstance(action, Moved) else ""
