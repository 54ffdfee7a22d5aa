"""Settings that a flow's form shows as separate parameters."""

from __future__ import annotations

import json
from collections.abc import Sequence

MAIN_SETTINGS = {
    "algorithm_type": "algorithm.algorithm_type",
    "lr": "algorithm.optimizer.lr",
    "total_steps": "buffer.total_steps",
    "batch_size": "buffer.batch_size",
    "repeat_times": "algorithm.repeat_times",
}
"""Parameter → key. Empty parameters keep the file's value."""


def with_main_settings(overrides: Sequence[str], stage: str, **main_settings: float | str | None) -> list[str]:
    """Return the overrides plus one for each given main setting, for the stage if one is named."""
    prefix = f"stages.{stage}." if stage else ""
    added = {MAIN_SETTINGS[name]: json.dumps(value) for name, value in main_settings.items() if value not in (None, "")}
    return [*overrides, *(f"{prefix}{key}={value}" for key, value in added.items())]
