"""Child processes of tests that are killed amid their work."""

from __future__ import annotations

import multiprocessing

PROCESSES = multiprocessing.get_context("forkserver")
"""Begun within milliseconds, and not forked from this process, whose threads (Ray's, vLLM's) may hold locks."""
PROCESSES.set_forkserver_preload(["__main__", "torch", "trinity_core.store.store", "trinity_core.store.postgresql"])
