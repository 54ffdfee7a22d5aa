"""A fresh SQLite store for tests."""

import pytest

from trinity_core.store.store import ExperienceStore


@pytest.fixture
def store(tmp_path):
    with ExperienceStore.open(f"sqlite:///{tmp_path}/buffer/store.db") as opened:
        yield opened
