"""Serves the page until it is interrupted."""

from __future__ import annotations

import ipaddress
import threading
import webbrowser
from collections.abc import Callable, Mapping

from trinity_core.errors import TrinityError
from trinity_core.view.viewed_run import ViewedRun, import_for_pages
from trinity_core.waits import poll

OWN_NAMES = ["127.0.0.1", "localhost", "[::1]"]


def serve(
    runs: Mapping[str, ViewedRun], host: str, port: int, open_browser: bool, say: Callable[[str], object]
) -> None:
    """Serve until SIGINT or SIGTERM. Raises TrinityError if the port is taken."""
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
    loopback = ipaddress.ip_address(address).is_loopback
    if not loopback:
        say(f"warning: anyone who reaches {host} can read what this run sampled; there is no password")
    say(f"{url}   (Ctrl+C ends it)")
    app = make_app(runs, [*OWN_NAMES, named] if loopback else ["*"])
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
