"""`python -m studio`: serve the pages until SIGINT or SIGTERM."""

from __future__ import annotations

import json
import os
import sys
from typing import Any

from studio.access import TOKEN_VARIABLE, is_local, new_token
from studio.server import studio_app
from studio.settings import StudioSettings, studio_settings

PRIMARY = "#2f6f9f"
PRIMARY_IN_THE_DARK = "#6cb2e6"
OTHER_LINES = ("#d55e00", "#009e73", "#cc79a7", "#e69f00", "#56b4e9")
"""Colours of further runs in a chart, distinguishable for any colour vision (Okabe and Ito, 2008)."""


def streamlit_options(settings: StudioSettings) -> dict[str, Any]:
    """Return Streamlit's options; telemetry is off."""
    return {
        "server.address": settings.host,
        "server.port": settings.port,
        "server.headless": True,
        "server.fileWatcherType": "none",
        "browser.serverAddress": settings.host,
        "browser.gatherUsageStats": False,
        "client.toolbarMode": "viewer",
        "runner.magicEnabled": False,  # it would draw the texts below our constants
        "theme.light.primaryColor": PRIMARY,
        "theme.dark.primaryColor": PRIMARY_IN_THE_DARK,
        "theme.light.chartCategoricalColors": json.dumps([PRIMARY, *OTHER_LINES]),
        "theme.dark.chartCategoricalColors": json.dumps([PRIMARY_IN_THE_DARK, *OTHER_LINES]),
    }


def main() -> None:
    """Serve the pages. They ask for a token, printed here, if one is set or other machines can reach them."""
    settings = studio_settings(sys.argv[1:])
    token = os.environ.get(TOKEN_VARIABLE) or ("" if is_local(settings.host) else new_token())
    os.environ[TOKEN_VARIABLE] = token
    named = f"[{settings.host}]" if ":" in settings.host else settings.host
    print(f"Studio: http://{named}:{settings.port}{f'/?token={token}' if token else ''}", flush=True)
    studio_app(settings, token).run(config=streamlit_options(settings))


if __name__ == "__main__":
    main()
