"""An MLflow store, made once, and its client."""

from __future__ import annotations

import shutil
import sys
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parent))

from mlflow_store import mlflow_client


@pytest.fixture(scope="session")
def empty_store(tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = tmp_path_factory.mktemp("mlflow")
    mlflow_client(root).search_experiments()
    return root / "mlflow.db"


@pytest.fixture
def root(tmp_path: Path, empty_store: Path) -> Path:
    """A checkpoint root where MLflow's store is there: making one takes seconds."""
    shutil.copy(empty_store, tmp_path)
    return tmp_path
