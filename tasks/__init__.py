"""Prefect tasks: thin adapters between Prefect and trinity_core."""
