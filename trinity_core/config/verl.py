"""veRL's spellings of native settings (`SameAs`), laid under the native ones."""

from __future__ import annotations

import functools
from collections.abc import Iterator
from operator import attrgetter
from typing import Any

from trinity_core.config.fields import Setting, sections, settings
from trinity_core.config.schema import Config, VerlConfig

ROOT = "trainer.trainer_config"


@functools.cache
def spellings() -> dict[str, str]:
    """veRL key below `trainer.trainer_config` → native key."""
    return {key: setting.same_as for key, setting in _leaves() if setting.same_as}


def laid_under(config: Config, tree: dict[str, Any]) -> Config:
    """The configuration with native settings as written in veRL's words, unless `tree` gives them at their own keys.

    Null, and a negative number of warm-up steps, mean "not given" in veRL.
    """
    values = {}
    for verl_key, native_key in spellings().items():
        value = attrgetter(f"{ROOT}.{verl_key}")(config)
        unset = value is None or (verl_key.endswith("lr_warmup_steps") and value < 0)
        if not unset and _get(tree, native_key) is None:
            values[native_key] = value
    return config.with_values(values) if values else config


def _leaves() -> Iterator[tuple[str, Setting]]:
    """Every veRL setting that is no section, with its key."""
    for key, section in sections(VerlConfig):
        for setting in settings(section):
            if setting.section is None:
                yield f"{key}.{setting.name}" if key else setting.name, setting


def _get(tree: Any, key: str) -> Any:
    for part in key.split("."):
        tree = tree.get(part) if isinstance(tree, dict) else None
    return tree
