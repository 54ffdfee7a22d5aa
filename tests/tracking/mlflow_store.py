"""A client of the MLflow store in a checkpoint root."""

from __future__ import annotations

from pathlib import Path
from typing import Any


def mlflow_client(root: Path) -> Any:
    from mlflow import MlflowClient

    uri = f"sqlite:///{root}/mlflow.db"
    return MlflowClient(uri, uri)
