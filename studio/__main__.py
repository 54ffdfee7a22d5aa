"""`python -m studio`: serve the pages until SIGINT or SIGTERM."""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Sequence
from pathlib import Path

from studio.access import TOKEN_VARIABLE, is_local, new_token
from studio.settings import studio_settings

APP = Path(__file__).parent / "server.py"
PRIMARY = "#2f6f9f"
PRIMARY_IN_THE_DARK = "#6cb2e6"
OTHER_LINES = ("#d55e00", "#009e73", "#cc79a7", "#e69f00", "#56b4e9")
"""Colours of further runs in a chart, which people of any colour vision tell apart (Okabe and Ito, 2008)."""


def streamlit_command(arguments: Sequence[str]) -> list[str]:
    """The command that serves the pages with these arguments of ours; nothing is reported to anyone."""
    given = studio_settings(arguments)
    options = {
        "server.address": given.host,
        "server.port": given.port,
        "server.headless": "true",
        "server.fileWatcherType": "none",
        "browser.serverAddress": given.host,
        "browser.gatherUsageStats": "false",
        "client.toolbarMode": "viewer",
        "theme.light.primaryColor": PRIMARY,
        "theme.dark.primaryColor": PRIMARY_IN_THE_DARK,
        "theme.light.chartCategoricalColors": json.dumps([PRIMARY, *OTHER_LINES]),
        "theme.dark.chartCategoricalColors": json.dumps([PRIMARY_IN_THE_DARK, *OTHER_LINES]),
    }
    settings = [f"--{name}={value}" for name, value in options.items()]
    return [sys.executable, "-m", "streamlit", "run", str(APP), *settings, "--", *arguments]


def main() -> None:
    """Become the server. Where others than this machine reach it, it asks for a token, which is printed here."""
    arguments = sys.argv[1:]
    given = studio_settings(arguments)
    token = "" if is_local(given.host) else os.environ.get(TOKEN_VARIABLE) or new_token()
    named = f"[{given.host}]" if ":" in given.host else given.host
    print(f"Studio: http://{named}:{given.port}{f'/?token={token}' if token else ''}", flush=True)
    command = streamlit_command(arguments)
    os.execve(command[0], command, {**os.environ, TOKEN_VARIABLE: token})  # noqa: S606 - no shell is wanted


if __name__ == "__main__":
    main()
