"""The server of the OpenAI API: vLLM's handlers, in a thread of the explorer's process with its own event loop.

vLLM is imported only when a server is started.
"""

from __future__ import annotations

import asyncio
import errno
import logging
import os
import secrets
import socket
from collections.abc import Mapping, Sequence
from concurrent.futures import Future, wait
from dataclasses import dataclass, field
from functools import partial
from typing import TYPE_CHECKING

from trinity_core.base.addresses import LOOPBACK, holder_of, in_words, outward_address, own_address
from trinity_core.base.errors import TransientFault, TrinityError
from trinity_core.base.lazy import lean_imports
from trinity_core.base.threads import DaemonThreads
from trinity_core.base.waits import poll_async
from trinity_core.data.session_log import SessionLog
from trinity_core.data.task_queue import TaskQueue
from trinity_core.rollout.openai_api.recorded_session import RecordedSession
from trinity_core.rollout.openai_api.served_model import ServedModel
from trinity_core.rollout.openai_api.served_sessions import ServedSessions
from trinity_core.rollout.openai_api.session_auth import PREFIX, SessionAuth

if TYPE_CHECKING:
    from uvicorn import Server

    from trinity_core.rollout.openai_api.middleware import SessionMiddleware

log = logging.getLogger(__name__)

START_SECONDS = 600.0
"""Time to import vLLM's server code, which takes long on a busy machine, and to listen."""
MOST_HEAD_BYTES = 1 << 20
STOP_SECONDS = 5.0
PORT_SECONDS = 60.0
"""Time for a port to become free: workers outlive a killed raylet by half a minute and more."""
EVERYWHERE = "::"
"""All addresses of this machine, including IPv4."""


def _new_key() -> str:
    return "sk-" + secrets.token_urlsafe(24)


@dataclass(eq=False)
class ApiServer:
    """Serves models. Used in the event loop of their pools; `open` and `close` from any thread."""

    models: Sequence[ServedModel]
    host: str = LOOPBACK
    port: int = 0
    """0: any free port."""
    sessions: SessionLog | None = None
    queues: Mapping[str, TaskQueue] = field(default_factory=dict)
    """Task queues that programs may add to, by the names of their task sets."""
    key: str = field(default_factory=_new_key, repr=False)
    session_key: str = field(default_factory=_new_key, repr=False)
    """The key for workflows and their agents: it opens their sessions, and no other route."""
    served_sessions: ServedSessions | None = None
    """Sessions of mode `serve`, which clients open and give feedback to."""
    _auth: SessionAuth = field(init=False, repr=False)
    _server: Server | None = None
    _served: Future[None] | None = None
    _socket: socket.socket | None = None

    async def start(self) -> None:
        """Return when requests are answered. Raises `TransientFault` if the address is in use for `PORT_SECONDS`."""
        self._socket = await _listening_once_free(self.host, self.port)
        self._auth = SessionAuth(self.key, self.session_key)
        self.port = self._socket.getsockname()[1]
        started: Future[None] = Future()
        explorer_loop = asyncio.get_running_loop()
        self._served = DaemonThreads("openai-api").submit(asyncio.run, self._serve(explorer_loop, started))
        self._served.add_done_callback(partial(_ended, started))
        await asyncio.wait_for(asyncio.wrap_future(started), START_SECONDS)
        log.info("the OpenAI API listens on %s:%d", self.host, self.port)

    def open(self, session: RecordedSession) -> None:
        self._auth.open(session)

    def note(self, session: RecordedSession, why: str = "") -> None:
        """Log the sampled answers of an ended session, and an unusual reason for its end."""
        if self.sessions is not None:
            self.sessions.add(session.name, session.digests, why)

    def close(self, session: RecordedSession, why: str = "") -> None:
        """End a session, and log it."""
        if self._auth.close(session):
            self.note(session, why)

    def base_url(self, session: RecordedSession | None = None) -> str:
        """Return the address of the API, or of a session, as clients take it."""
        host = _reached_at(self.host, from_outside=session is None)
        return f"http://{host}:{self.port}{PREFIX + session.name if session else ''}/v1"

    def stop(self) -> None:
        if self._server is not None:
            self._server.should_exit = self._server.force_exit = True
        if self._served is not None:
            wait([self._served], STOP_SECONDS)
        if self.sessions is not None:
            self.sessions.close()

    # ---- in the server's thread ----

    async def _serve(self, explorer_loop: asyncio.AbstractEventLoop, started: Future[None]) -> None:
        os.environ.setdefault("VLLM_LOGGING_LEVEL", "WARNING")  # read by vLLM when it is imported
        from uvicorn import Config, Server

        try:
            with lean_imports():
                app = self._app(explorer_loop)
        except (TypeError, ValueError) as error:
            raise TrinityError(f"the OpenAI API cannot be served as configured: {error}") from error
        # h11 limits a request's head, httptools nothing.
        config = Config(
            app, log_config=None, access_log=False, lifespan="off", ws="none", http="h11",
            h11_max_incomplete_event_size=MOST_HEAD_BYTES,
        )  # fmt: skip
        self._server = Server(config)
        assert self._socket is not None
        serving = asyncio.ensure_future(self._server.serve(sockets=[self._socket]))
        async for _ in poll_async():
            if self._server.started or serving.done():
                break
        started.set_result(None)
        await serving

    def _app(self, explorer_loop: asyncio.AbstractEventLoop) -> SessionMiddleware:
        from trinity_core.rollout.openai_api.application import application
        from trinity_core.rollout.openai_api.vllm_handlers import ModelHandlers, ServedModels, model_application

        models = ServedModels([ModelHandlers(model, explorer_loop) for model in self.models])
        if self.served_sessions is not None:
            for session in self.served_sessions.sessions:  # those of an earlier process are open again
                self.open(session)
            for session in self.served_sessions.judged:
                self.note(session)
        return application(model_application(models), self._auth, self.served_sessions, self.queues, self.close)


def _ended(started: Future[None], served: Future[None]) -> None:
    error = served.exception()
    if error is not None and not started.done():
        started.set_exception(error)
    elif error is not None:
        log.error("the OpenAI API ended", exc_info=error)


async def _listening_once_free(host: str, port: int) -> socket.socket:
    """Listen, retrying: the explorer of a killed run or of an earlier attempt may hold the port for a while."""
    warned = False
    async for elapsed in poll_async(pause=0.5):
        try:
            return _listening(host, port)
        except OSError as error:
            fault = f"the OpenAI API cannot listen on {host}:{port}: {error.strerror}"
            if error.errno != errno.EADDRINUSE:
                raise TransientFault(fault) from error
            held = in_words(await asyncio.to_thread(holder_of, port))
            if elapsed > PORT_SECONDS:
                advice = f"end that, or set explorer.api_port to another port (waited {PORT_SECONDS:g} s)"
                raise TransientFault(f"{fault}; it is held by {held}: {advice}") from error
            if not warned:
                log.warning("waiting up to %g s for port %d, which is held by %s", PORT_SECONDS, port, held)
            warned = True
    raise AssertionError("unreachable: the port is free or the time is over")


def _listening(host: str, port: int) -> socket.socket:
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    both = host == EVERYWHERE and socket.has_dualstack_ipv6()
    return socket.create_server((host, port), family=family, backlog=2048, dualstack_ipv6=both)


def _reached_at(host: str, from_outside: bool) -> str:
    """Return the URL host of a server listening on `host`, which may stand for all addresses of this machine.

    Agents run beside the server: they take the address that Ray uses. That is loopback if the run has its own Ray.
    """
    if host in ("", "0.0.0.0", EVERYWHERE):  # noqa: S104
        host = own_address()
        if from_outside and host == LOOPBACK:
            host = outward_address()
    return f"[{host}]" if ":" in host else host
