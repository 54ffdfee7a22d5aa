"""The work pool of this machine and the one worker that takes its runs."""

from __future__ import annotations

import re
import sys
from pathlib import Path

from flows.local.server import Process, prefect_environment, start_process

POOL = "trinity"
WORKER_LIMIT = 4
"""Runs at a time: explorer, a further explorer and trainer of an asynchronous run, and the sweep."""


def worker_name(root: Path) -> str:
    """The worker is called after its folder, as another folder's may use the same database."""
    return re.sub(r"[^\w.-]+", "-", str(root.absolute())).strip("-") or POOL


def start_worker(root: Path, api_url: str) -> Process:
    """Start the worker of the pool, in a session of its own."""
    options = {"--pool": POOL, "--name": worker_name(root), "--limit": str(WORKER_LIMIT)}
    command = [sys.executable, "-m", "flows.local.pool_worker", *(word for pair in options.items() for word in pair)]
    env = prefect_environment(root) | {"PREFECT_API_URL": api_url, "PREFECT_WORKER_QUERY_SECONDS": "3"}
    return Process.of("worker", start_process("worker", command, env, root).pid)
