"""The server of `python -m studio`: Streamlit's pages, and below `/rollouts` the page of `trinity view` for every
run."""

from __future__ import annotations

from pathlib import Path

import streamlit
from starlette.middleware import Middleware
from starlette.middleware.trustedhost import TrustedHostMiddleware
from starlette.requests import Request
from starlette.responses import HTMLResponse, PlainTextResponse, RedirectResponse
from starlette.routing import Mount, Route
from starlette.types import ASGIApp, Receive, Scope, Send
from streamlit.starlette import App

from studio.access import admits, is_local
from studio.checked_draft import checked
from studio.form import form_fields
from studio.recipes import recipes
from studio.settings import StudioSettings
from tasks.retries import api_faults
from trinity_core.page_notes import ROLLOUTS
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
