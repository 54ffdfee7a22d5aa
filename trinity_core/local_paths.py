"""Paths as a user writes them."""

from __future__ import annotations

import os
from pathlib import Path


def expanded(path: str | Path) -> Path:
    """The path with `~` as the user's home. `~name` of an unknown user stays as it is: a folder of that name."""
    return Path(os.path.expanduser(path))  # noqa: PTH111 - Path.expanduser raises for an unknown user
