"""What `python -m studio` serves: Streamlit's pages, and below `/rollouts` the page of `trinity view` for every run."""

from __future__ import annotations

import os
import sys
from pathlib import Path

import altair as altair
from starlette.datastructures import MutableHeaders
from starlette.middleware import Middleware
from starlette.requests import Request
from starlette.responses import PlainTextResponse, RedirectResponse
from starlette.routing import Mount
from starlette.types import ASGIApp, Message, Receive, Scope, Send
from streamlit.starlette import App

from studio import checked_draft as checked_draft
from studio.access import TOKEN_VARIABLE, admits, is_local
from studio.settings import studio_settings
from tasks.retries import api_faults
from trinity_core.page_notes import ROLLOUTS
from trinity_core.view.app import make_app
from trinity_core.view.serving_page import OWN_NAMES
from trinity_core.view.viewed_run import RunFolders

COOKIE = "trinity_studio"
BASE = b"<head><script>window.__streamlit = {BACKEND_BASE_URL: location.origin}</script>"
"""Tells Streamlit where its server is: at an address such as /runs it would look below that first, and be refused."""


class Guard:
    """Asks for Studio's token, in the address once and in a cookie from then on."""

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


class Based:
    """Puts `BASE` into Streamlit's page."""

    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        parts: list[Message] = []

        async def based(message: Message) -> None:
            if message["type"] == "http.response.start":
                headers = MutableHeaders(raw=message["headers"])
                if headers.get("content-type", "").startswith("text/html") and "content-encoding" not in headers:
                    parts.append(message)
                    return
            if parts and message["type"] == "http.response.body":
                parts.append(message)
                if not message.get("more_body"):
                    await whole(parts, send)
                return
            await send(message)

        own = scope["type"] == "http" and not scope["path"].startswith((ROLLOUTS, "/static"))
        if own:
            scope["headers"] = [pair for pair in scope["headers"] if pair[0] not in (b"accept-encoding", b"range")]
        await self._app(scope, receive, based if own else send)


async def whole(parts: list[Message], send: Send) -> None:
    """Send a page in one piece, with `BASE` in its head."""
    body = b"".join(part["body"] for part in parts[1:]).replace(b"<head>", BASE, 1)
    MutableHeaders(raw=parts[0]["headers"])["content-length"] = str(len(body))
    await send(parts[0])
    await send({"type": "http.response.body", "body": body})


# What the pages need is imported before anyone asks for one: a first page would stay blank meanwhile.
api_faults()
place = studio_settings(sys.argv[1:])
rollouts = make_app(RunFolders(place.checkpoints), [*OWN_NAMES, place.host] if is_local(place.host) else ["*"])
app = App(
    Path(__file__).with_name("pages.py"),
    middleware=[Middleware(Based)],
    routes=[Mount(ROLLOUTS, rollouts, middleware=[Middleware(Guard, token=os.environ.get(TOKEN_VARIABLE, ""))])],
)
