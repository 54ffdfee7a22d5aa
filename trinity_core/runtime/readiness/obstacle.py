"""One thing that keeps a run from starting."""

from __future__ import annotations

from typing import Any, NamedTuple


class Obstacle(NamedTuple):
    """One thing that keeps a run from starting."""

    key: str
    """The setting that names it."""
    value: Any
    message: str
    """What is wrong and what to do."""
    passes: bool = False
    """It may be gone soon: a port in use, a hub that does not answer."""
