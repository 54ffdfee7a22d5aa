"""Serve the configuration page on the loopback interface."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable
from pathlib import Path

from trinity_core.addresses import LOOPBACK

PAGE = Path(__file__).parent / "config_page.py"


def command(file: Path, port: int) -> list[str]:
    """The command that serves the page of a YAML file until it gets SIGTERM; nothing is reported to anyone."""
    options = {
        "server.address": LOOPBACK,
        "server.port": str(port),
        "server.headless": "true",
        "server.fileWatcherType": "none",
        "browser.gatherUsageStats": "false",
        "client.toolbarMode": "viewer",
    }
    given = [f"--{name}={value}" for name, value in options.items()]
    return [sys.executable, "-m", "streamlit", "run", str(PAGE), *given, "--", str(file.absolute())]


def serve_form(file: Path, port: int, say: Callable[[str], None]) -> None:
    """Become the server of the page; it ends with Ctrl-C or SIGTERM."""
    say(f"Studio: http://{LOOPBACK}:{port}")
    sys.stdout.flush()
    argv = command(file, port)
    os.execv(argv[0], argv)  # noqa: S606 - no shell is wanted
