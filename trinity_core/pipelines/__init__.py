"""Pipelines: operators on tasks and on experiences. Importing this package registers the built-in ones."""

from trinity_core.pipelines import shaping
from trinity_core.pipelines.data_juicer import client
from trinity_core.pipelines.operators import OPERATORS

__all__ = ["OPERATORS", "client", "shaping"]
