"""Prefect on this machine: its server, its worker, and the runs that they own."""
