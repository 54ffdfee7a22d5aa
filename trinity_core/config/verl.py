"""veRL's words for settings that have a native place (`SameAs`), laid under the native ones."""

from __future__ import annotations

import dataclasses
import functools
from operator import attrgetter
from typing import Any, get_args

from trinity_core.config.bind import hints, unpack
from trinity_core.config.schema import Config, VerlConfig
from trinity_core.config.types import IS_NO_EFFECT, SameAs

ROOT = "trainer.trainer_config"


@functools.cache
def spellings() -> dict[str, str]:
    """veRL key below `trainer.trainer_config` → native key."""
    return {key: extra.key for key, extras in _leaves(VerlConfig, "") for extra in extras if isinstance(extra, SameAs)}


@functools.cache
def without_effect() -> frozenset[str]:
    """veRL keys below `trainer.trainer_config` that nothing reads."""
    return frozenset(key for key, extras in _leaves(VerlConfig, "") if IS_NO_EFFECT in extras)


def lay_under(config: Config, tree: dict[str, Any]) -> None:
    """Give native settings the values written in veRL's words, unless `tree` gives them at their own keys.

    Null, and a negative number of warm-up steps, mean "not given" in veRL.
    """
    for verl_key, native_key in spellings().items():
        value = attrgetter(f"{ROOT}.{verl_key}")(config)
        unset = value is None or (verl_key.endswith("lr_warmup_steps") and value < 0)
        if not unset and _get(tree, native_key) is None:
            section, _, name = native_key.rpartition(".")
            setattr(attrgetter(section)(config), name, value)


def ignored(tree: dict[str, Any]) -> list[str]:
    """The keys given in this tree that have no effect."""
    return [f"{ROOT}.{key}" for key in sorted(without_effect()) if _get(tree, f"{ROOT}.{key}") is not None]


def _leaves(cls: type, prefix: str) -> list[tuple[str, tuple[Any, ...]]]:
    """Every setting below a section with its annotations."""
    found: list[tuple[str, tuple[Any, ...]]] = []
    for name, hint in hints(cls).items():
        inner, extras = unpack(hint)
        options = [option for option in (inner, *get_args(inner)) if dataclasses.is_dataclass(option)]
        if options and isinstance(options[0], type):
            found += _leaves(options[0], f"{prefix}{name}.")
        else:
            found.append((f"{prefix}{name}", extras))
    return found


def _get(tree: Any, key: str) -> Any:
    for part in key.split("."):
        tree = tree.get(part) if isinstance(tree, dict) else None
    return tree
