"""`python -m studio`: serve Streamlit's pages, and below `/rollouts` the page of `trinity view` for every run."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from threading import Thread
from typing import Any

import streamlit
from starlette.middleware import Middleware
from starlette.requests import Request
from starlette.responses import HTMLResponse, RedirectResponse
from starlette.routing import Mount, Route
from streamlit.starlette import App

from studio.config_page import present_findings
from studio.form import form_fields
from studio.recipes import recipes
from studio.settings import StudioSettings, studio_settings
from trinity_core.base.addresses import ROLLOUTS
from trinity_core.base.gate import Gate, asked_for, server_key
from trinity_core.view.app import make_app
from trinity_core.view.viewed_run import RunFolders, import_for_pages

PAGES = ("/", "/runs", "/chat", "/docs")
INDEX = Path(streamlit.__file__).with_name("static") / "index.html"
BASE = "<head><script>window.__streamlit = {BACKEND_BASE_URL: location.origin}</script>"
"""Tells Streamlit where its server is: at an address such as /runs it would first look below that, and be refused."""


def page(_request: Request) -> HTMLResponse:
    return HTMLResponse(INDEX.read_text(encoding="utf-8").replace("<head>", BASE, 1))


def studio_app(settings: StudioSettings, key: str) -> App:
    """Return the application. Slow caches are filled here: the first page would wait a second for them."""
    form_fields("grpo", "both")
    for recipe in recipes()[:1]:  # the quick start
        present_findings(recipe.text, recipe.file)
    first = Route("/configuration", lambda request: RedirectResponse(f"/?{request.url.query}"))
    rollouts = Mount(ROLLOUTS, make_app(RunFolders(settings.checkpoints)))
    routes = [*(Route(path, page) for path in PAGES), first, rollouts]
    gate = Middleware(Gate, key=key, host=settings.host, open_paths=["/_stcore/health"])
    return App(Path(__file__).with_name("pages.py"), routes=routes, middleware=[gate])


PRIMARY = "#2f6f9f"
PRIMARY_IN_THE_DARK = "#6cb2e6"
OTHER_LINES = ("#d55e00", "#009e73", "#cc79a7", "#e69f00", "#56b4e9")
"""Colours of further runs in a chart, distinguishable for any colour vision (Okabe and Ito, 2008)."""


def main() -> None:
    """Serve the pages to those who have the folder's key."""
    settings = studio_settings(sys.argv[1:])
    key = server_key(settings.root)
    Thread(target=import_for_pages, daemon=True).start()
    address = f"[{settings.host}]" if ":" in settings.host else settings.host
    print(f"Studio: http://{address}:{settings.port}   ({asked_for(key)})", flush=True)
    options: dict[str, Any] = {
        "server.address": settings.host, "browser.serverAddress": settings.host, "server.port": settings.port,
        "server.headless": True, "server.fileWatcherType": "none", "browser.gatherUsageStats": False,
        "client.toolbarMode": "viewer",
        "runner.magicEnabled": False,  # it would draw the texts below our constants
    }  # fmt: skip
    for theme, colour in (("light", PRIMARY), ("dark", PRIMARY_IN_THE_DARK)):
        options[f"theme.{theme}.primaryColor"] = colour
        options[f"theme.{theme}.chartCategoricalColors"] = json.dumps([colour, *OTHER_LINES])
    studio_app(settings, key).run(config=options)


if __name__ == "__main__":
    main()
