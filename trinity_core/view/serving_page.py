"""Serves the page until it is interrupted."""

from __future__ import annotations

import threading
import webbrowser
from collections.abc import Callable, Mapping

from trinity_core.errors import TrinityError
from trinity_core.gate import Gate, asked_for, server_key
from trinity_core.view.viewed_run import ViewedRun, import_for_pages
from trinity_core.waits import poll


def serve(
    runs: Mapping[str, ViewedRun], host: str, port: int, open_browser: bool, say: Callable[[str], object]
) -> None:
    """Serve until SIGINT or SIGTERM, to those who have this folder's key. Raises TrinityError if the port is taken."""
    import socket

    from uvicorn import Config, Server

    from trinity_core.view.app import make_app

    try:
        family, _, _, _, (address, *_) = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0]
        listening = socket.create_server((str(address), port), family=family)
    except OSError as error:
        raise TrinityError(
            f"the page cannot be served on {host}:{port}: {error}; give another --port or --host"
        ) from error
    named = f"[{host}]" if ":" in host else host
    url = f"http://{named}:{listening.getsockname()[1]}"
    key = server_key()
    say(f"{url}   ({asked_for(key)}; Ctrl+C ends it)")
    app = Gate(make_app(runs), key, host)
    server = Server(Config(app, log_config=None, access_log=False, lifespan="off"))
    threading.Thread(target=import_for_pages).start()
    if open_browser:
        threading.Thread(target=_open, args=(server, url), daemon=True).start()
    server.run(sockets=[listening])


def _open(server: object, address: str) -> None:
    for _ in poll(10.0, 0.05):
        if vars(server).get("started"):
            break
    webbrowser.open(address)
