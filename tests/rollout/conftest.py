"""Makes the fakes in this folder importable."""

from __future__ import annotations

import asyncio
import sys
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parent.parent))


@pytest.fixture
def own_weights_after(tiny_engine, tiny_folder):
    """Restore the session engine's initial weights after the test."""
    yield
    from trinity_core.rollout.inference.requests import WeightSource

    asyncio.run(tiny_engine.load(WeightSource("folder", str(tiny_folder)), 0))
