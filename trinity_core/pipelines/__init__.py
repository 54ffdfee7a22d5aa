"""Pipelines: operators on tasks and on experiences."""
