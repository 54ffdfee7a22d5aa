"""Prefect on this machine: server, worker, supervisor and pages."""
