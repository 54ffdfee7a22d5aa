"""The key of a folder, and the gate in front of every page that we serve: MLflow, Studio, `trinity view`.

Whoever may use these pages, or Prefect's API, can run commands as their user or read what a run sampled. Without a key
that would be every other account of the machine, and every site that is open in the user's browser. The gate asks for
the key by HTTP Basic, whose password a browser sends to this port only; a cookie would go to every port of the host.
"""

from __future__ import annotations

import base64
import ipaddress
import os
import re
import shlex
import socket
import sys
from collections.abc import Sequence
from contextlib import suppress
from hmac import compare_digest
from pathlib import Path
from secrets import token_urlsafe
from typing import Any
from urllib.parse import urlsplit

from trinity_core.base.errors import TrinityError
from trinity_core.base.files import clear_errors, private_folder, write_atomically
from trinity_core.base.runlock import one_at_a_time

OWN_NAMES = frozenset({"127.0.0.1", "localhost", "::1"})
ELSEWHERE = "work in another folder"
LOCKED = (
    "This server asks for a user and a password. The user is trinity, and the password follows `trinity:` in the file "
    ".trinity/prefect.key of the folder in which the server was started."
)
"""What a browser shows whose user cancels its dialog."""


def state_dir(root: Path | None = None) -> Path:
    """Return `./.trinity`: databases, logs, the key and the record of running processes."""
    return (root or Path.cwd()).absolute() / ".trinity"


def make_state_dir(root: Path | None = None) -> Path:
    """Create `state_dir` without access for other accounts, because Prefect's database holds the parameters of runs."""
    path = state_dir(root)
    private_folder(path)
    with suppress(OSError):  # a file system without modes
        path.chmod(0o700)  # earlier releases let others enter
    return path


def key_file(root: Path | None = None) -> Path:
    return state_dir(root) / "prefect.key"


def server_key(root: Path | None = None) -> str:
    """Return the key that every server of this folder asks for, as `user:password`; create it if needed.

    Raises TrinityError if the file holds anything else, or if another account has put it there: it would know the key.
    """
    path = key_file(root)
    with clear_errors("reading or writing", path, ELSEWHERE):
        if not path.exists():
            make_state_dir(root)
            with one_at_a_time(path.with_name("prefect.lock"), instead=ELSEWHERE):
                if not path.exists():  # unless another command has just created it
                    write_atomically(path, f"trinity:{token_urlsafe(24)}".encode(), mode=0o600)
        if path.stat().st_uid not in (0, os.geteuid()):
            raise TrinityError(f"{path} belongs to another account, which knows this key: remove it, or {ELSEWHERE}.")
        key = path.read_text().strip()  # an editor ends the last line
    if not re.fullmatch(r"[^\s:]+:\S+", key):
        raise TrinityError(f"{path} must be one line, `user:password` without spaces. Without the file a key is made.")
    return key


def is_loopback(host: str) -> bool:
    """True if only this machine can reach that address or name."""
    try:
        addresses = {str(info[4][0]) for info in socket.getaddrinfo(host, None)}
    except OSError:
        return False
    return all(ipaddress.ip_address(address).is_loopback for address in addresses)


def asked_for(key: str) -> str:
    """Return what to enter in a browser's dialog. Output that goes to a file, such as a log that is passed on, has the
    command that prints the password in its place."""
    user, _, password = key.partition(":")
    shown = password if sys.stdout.isatty() else f"that `cut -d: -f2- {shlex.quote(str(key_file()))}` prints"
    return f"asks once for the user {user} and the password {shown}"


class Gate:
    """An ASGI application that passes on requests with the key, HTTP and WebSocket, and refuses all others.

    Requests to another Host (400), such as that of a site whose name resolves to this address, and from pages of
    another Origin (403), also to show ours in a frame, are refused with the key too: a browser that knows it sends it
    along. Links to our pages work from everywhere. The paths `open_paths` need no key.
    """

    def __init__(
        self, app: Any, key: str, host: str = "127.0.0.1", open_paths: Sequence[str] = (), asks_sockets: bool = True
    ) -> None:
        """`host`: the address or name that the application is served on. Without `asks_sockets` the application itself
        asks for the key on its WebSockets."""
        self._app = app
        self._expected = b"Basic " + base64.b64encode(key.encode())
        # Other machines' clients may know names of this one that it does not.
        self._hosts = OWN_NAMES | {host.lower()} if is_loopback(host) else None
        self._open_paths = open_paths
        self._asks_sockets = asks_sockets

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        refusal = None if scope["type"] == "lifespan" else self._refusal(scope)
        if refusal is None:
            await self._app(scope, receive, send)
            return
        from starlette.responses import PlainTextResponse

        status, text = refusal
        asks = {"www-authenticate": 'Basic realm="trinity", charset="UTF-8"'} if status == 401 else None
        await PlainTextResponse(f"{text}\n", status, asks)(scope, receive, send)

    def _refusal(self, scope: Any) -> tuple[int, str] | None:
        headers = dict(scope["headers"])
        host, origin = (headers.get(name, b"").decode("latin-1").lower() for name in (b"host", b"origin"))
        if self._hosts is not None and _name(host) not in self._hosts:
            return 400, "this server answers to the names of its machine only"
        is_foreign = headers.get(b"sec-fetch-site", b"none") not in (b"none", b"same-origin")
        if (origin and origin.partition("://")[2] != host) or (
            is_foreign and headers.get(b"sec-fetch-dest") != b"document"
        ):
            return 403, "pages of other origins may not use this server"
        if scope["path"] in self._open_paths or (scope["type"] == "websocket" and not self._asks_sockets):
            return None
        if not compare_digest(headers.get(b"authorization", b""), self._expected):
            return 401, LOCKED
        return None


def _name(host: str) -> str | None:
    try:
        return urlsplit(f"//{host}").hostname
    except ValueError:
        return None
