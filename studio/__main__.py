"""`python -m studio`: serve Streamlit's pages, and below `/rollouts` the page of `trinity view` for every run."""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path
from secrets import token_urlsafe
from typing import Any

import streamlit
from starlette.middleware import Middleware
from starlette.middleware.trustedhost import TrustedHostMiddleware
from starlette.requests import Request
from starlette.responses import HTMLResponse, PlainTextResponse, RedirectResponse
from starlette.routing import Mount, Route
from starlette.types import ASGIApp, Receive, Scope, Send
from streamlit.starlette import App

from studio.config_draft import checked
from studio.form import form_fields
from studio.recipes import recipes
from studio.settings import TOKEN_VARIABLE, StudioSettings, admits, is_local, studio_settings
from tasks.retries import api_faults
from trinity_core.addresses import ROLLOUTS
from trinity_core.view.app import make_app
from trinity_core.view.serving_page import OWN_NAMES
from trinity_core.view.viewed_run import RunFolders

COOKIE = "trinity_studio"
PAGES = ("/", "/configuration", "/runs")
INDEX = Path(streamlit.__file__).with_name("static") / "index.html"
BASE = "<head><script>window.__streamlit = {BACKEND_BASE_URL: location.origin}</script>"
"""Tells Streamlit where its server is: at an address such as /runs it would first look below that, and be refused."""


class Guard:
    """Asks for Studio's token, once in the address and then in a cookie."""

    def __init__(self, app: ASGIApp, token: str) -> None:
        self._app = app
        self._token = token

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        request = Request(scope)
        if not self._token or admits(self._token, request.cookies.get(COOKIE, "")):
            await self._app(scope, receive, send)
        elif admits(self._token, request.query_params.get("token", "")):
            here = RedirectResponse(request.url.remove_query_params("token"))
            here.set_cookie(COOKIE, self._token, httponly=True, samesite="strict")
            await here(scope, receive, send)
        else:
            await PlainTextResponse("Add ?token=… with the token that Studio printed.", 401)(scope, receive, send)


def page(_request: Request) -> HTMLResponse:
    return HTMLResponse(INDEX.read_text(encoding="utf-8").replace("<head>", BASE, 1))


def studio_app(settings: StudioSettings, token: str) -> App:
    """Return the application. Slow imports and caches are warmed up here: the first page would wait a second for
    them."""
    api_faults()
    form_fields("grpo", "both")
    for recipe in recipes()[:1]:  # the quick start
        checked(recipe.text, recipe.file)
    # Another site's host name may resolve to this address; the browser would then treat it as the same origin.
    hosts = [*OWN_NAMES, settings.host] if is_local(settings.host) else ["*"]
    rollouts = make_app(RunFolders(settings.checkpoints), hosts)
    return App(
        Path(__file__).with_name("pages.py"),
        routes=[
            *(Route(path, page) for path in PAGES),
            Mount(ROLLOUTS, rollouts, middleware=[Middleware(Guard, token=token)]),
        ],
        middleware=[Middleware(TrustedHostMiddleware, allowed_hosts=hosts)],
    )


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
    token = os.environ.get(TOKEN_VARIABLE) or ("" if is_local(settings.host) else token_urlsafe(24))
    os.environ[TOKEN_VARIABLE] = token
    named = f"[{settings.host}]" if ":" in settings.host else settings.host
    print(f"Studio: http://{named}:{settings.port}{f'/?token={token}' if token else ''}", flush=True)
    studio_app(settings, token).run(config=streamlit_options(settings))


if __name__ == "__main__":
    main()
