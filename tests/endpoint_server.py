"""A real HTTP server that answers chat completions by a script, for tests of what asks it."""

from __future__ import annotations

import json
import socket
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any


def completion(text: str = "#### 7", reason: str = "stop") -> dict[str, Any]:
    """A chat completion of five tokens."""
    choice = {"index": 0, "message": {"role": "assistant", "content": text}, "finish_reason": reason}
    usage = {"prompt_tokens": 9, "completion_tokens": 5, "total_tokens": 14}
    return {"id": "1", "object": "chat.completion", "choices": [choice], "usage": usage}


@dataclass
class Reply:
    """What the server sends."""

    body: Any = field(default_factory=completion)
    """JSON, or text that is none."""
    status: int = 200
    headers: dict[str, str] = field(default_factory=dict)
    seconds: float = 0.0
    cut: bool = False
    """Whether the connection breaks off in mid-body."""


@dataclass
class Asked:
    """A request as it arrived."""

    path: str
    authorization: str | None
    body: dict[str, Any]
    headers: set[str] = field(default_factory=set)
    """The names of its headers, in small letters."""


@dataclass
class EndpointServer:
    """Replies by `script`, which is called with the number of the request and the request."""

    script: Callable[[int, Asked], Reply]
    asked: list[Asked] = field(default_factory=list)
    most_at_once: int = 0
    url: str = ""
    _open: int = 0
    _lock: threading.Lock = field(default_factory=threading.Lock)

    def reply(self, asked: Asked) -> Reply:
        with self._lock:
            number = len(self.asked)
            self.asked.append(asked)
            self._open += 1
            self.most_at_once = max(self.most_at_once, self._open)
        try:
            reply = self.script(number, asked)
            time.sleep(reply.seconds)
            return reply
        finally:
            with self._lock:
                self._open -= 1


class _Http(ThreadingHTTPServer):
    daemon_threads = True
    request_queue_size = 128  # the system refuses further connections that come at once


@contextmanager
def serving(script: Callable[[int, Asked], Reply]) -> Iterator[EndpointServer]:
    """A server on a free port of this machine."""
    server = EndpointServer(script)

    class Handler(BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"

        def do_POST(self) -> None:
            body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
            reply = server.reply(
                Asked(self.path, self.headers.get("Authorization"), body, {*map(str.lower, self.headers)})
            )
            content = (reply.body if isinstance(reply.body, str) else json.dumps(reply.body)).encode()
            self.send_response(reply.status)
            for name, value in {"Content-Type": "application/json", **reply.headers}.items():
                self.send_header(name, value)
            self.send_header("Content-Length", str(len(content)))
            self.end_headers()
            try:
                self.wfile.write(content[: len(content) // 2] if reply.cut else content)
            except OSError:
                self.close_connection = True  # the client has gone
            if reply.cut:
                self.connection.shutdown(socket.SHUT_RDWR)
                self.close_connection = True

        def log_message(self, *_: Any) -> None:
            """Nothing."""

    with _Http(("127.0.0.1", 0), Handler) as http:
        thread = threading.Thread(target=http.serve_forever, args=(0.05,), daemon=True)
        thread.start()
        server.url = f"http://127.0.0.1:{http.server_address[1]}/v1"
        try:
            yield server
        finally:
            http.shutdown()
            thread.join(10)
