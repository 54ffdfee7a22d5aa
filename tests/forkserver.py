"""Child processes of tests that are killed at work."""

from __future__ import annotations

import multiprocessing
import multiprocessing.util

PROCESSES = multiprocessing.get_context("forkserver")
"""Begun within milliseconds, and not forked from this process, whose threads (Ray's, vLLM's) may hold locks."""
PROCESSES.set_forkserver_preload(
    ["__main__", "torch", "trinity_core.exchange.store.store", "trinity_core.exchange.store.postgresql"]
)
multiprocessing.util.get_temp_dir()
# The server's socket lies there, and its path may have 107 characters: not in a folder to which a test moves tempfile.
