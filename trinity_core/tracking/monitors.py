"""Importing this module registers the built-in tracking systems in `MONITORS`."""

from trinity_core.tracking import mlflow_writer, other_writers
from trinity_core.tracking.writers import MONITORS

__all__ = ["MONITORS", "mlflow_writer", "other_writers"]
