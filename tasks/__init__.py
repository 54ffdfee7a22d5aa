"""Prefect tasks: what a flow does, one module each. Everything else is in `trinity_core`."""
