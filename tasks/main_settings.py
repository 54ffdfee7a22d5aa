"""Settings that the form of a flow shows as parameters of their own."""

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
"""Parameter → key. An empty one is as in the file."""


def with_main_settings(overrides: Sequence[str], stage: str, **main_settings: float | str | None) -> list[str]:
    """The overrides, and one more for each main setting that is given; for the stage if one is named."""
    prefix = f"stages.{stage}." if stage else ""
    added = {MAIN_SETTINGS[name]: json.dumps(value) for name, value in main_settings.items() if value not in (None, "")}
    return [*overrides, *(f"{prefix}{key}={value}" for key, value in added.items())]
