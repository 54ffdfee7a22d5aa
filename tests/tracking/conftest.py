"""A checkpoint root with an MLflow store."""

from __future__ import annotations

import shutil
import sys
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parent))


@pytest.fixture
def root(tmp_path: Path, empty_mlflow: Path) -> Path:
    """A checkpoint root where MLflow's store is there: making one takes seconds."""
    shutil.copy(empty_mlflow, tmp_path)
    return tmp_path
