"""The server of the OpenAI API: vLLM's routes, in a thread of the explorer's process with an event loop of its own.

Nothing here imports vLLM before a server is started.
"""

from __future__ import annotations

import asyncio
import logging
import os
import secrets
import socket
import threading
from collections.abc import Mapping, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

from trinity_core.addresses import LOOPBACK, own_address
from trinity_core.data.session_log import SessionLog
from trinity_core.data.task_queue import TaskQueue
from trinity_core.errors import TransientFault, TrinityError
from trinity_core.imports import lean_imports
from trinity_core.inference.openai_api.asgi import App
from trinity_core.inference.openai_api.book import SessionBook
from trinity_core.inference.openai_api.gate import PREFIX, Gate
from trinity_core.inference.openai_api.live import RecordedSession
from trinity_core.inference.openai_api.reception import Reception
from trinity_core.inference.openai_api.task_door import TaskDoor
from trinity_core.inference.settings import EngineSettings

if TYPE_CHECKING:
    from uvicorn import Server
    from vllm.config import VllmConfig

    from trinity_core.inference.openai_api.client import Streams

log = logging.getLogger(__name__)

START_SECONDS = 600.0
"""For vLLM's server code to be imported, which takes long on a busy machine, and to listen."""
STOP_SECONDS = 5.0
EVERYWHERE = "::"
"""All addresses of this machine, of IPv4 too."""
QUIET = {"VLLM_LOGGING_LEVEL": "WARNING", "VLLM_NO_USAGE_STATS": "1"}
"""Read by vLLM when it is imported."""


@dataclass(frozen=True, slots=True)
class ModelOnPool:
    """A model to serve: its engines, and what they were started with."""

    served: dict[str, Any]
    """The fields of `ServedModel`."""
    settings: EngineSettings
    pool: Streams
    stop_token_ids: tuple[int, ...] = ()


@dataclass(eq=False)
class ApiServer:
    """Serves models. Used in the event loop of their pools; `open` and `close` from any thread."""

    models: Sequence[ModelOnPool]
    host: str = LOOPBACK
    port: int = 0
    """0: any free port."""
    sessions: SessionLog | None = None
    """Where ended sessions are noted."""
    queues: Mapping[str, TaskQueue] = field(default_factory=dict)
    """Queues of tasks that programs may add to, by the names of their task sets."""
    key: str = field(default_factory=lambda: "sk-" + secrets.token_urlsafe(24), repr=False)
    book: SessionBook | None = None
    """Of mode `serve`: clients open sessions themselves, and give feedback."""
    _gate: Gate | None = None
    _server: Server | None = None
    _thread: threading.Thread | None = None
    _socket: socket.socket | None = None

    async def start(self) -> None:
        """Returns when requests are answered. Raises `TransientFault` if the address is taken."""
        self._socket = _listening(self.host, self.port)
        self.port = self._socket.getsockname()[1]
        started: Future[None] = Future()
        there = asyncio.get_running_loop()
        self._thread = threading.Thread(target=self._run, args=(there, started), name="openai-api", daemon=True)
        self._thread.start()
        await asyncio.wait_for(asyncio.wrap_future(started), START_SECONDS)
        log.info("the OpenAI API listens on %s:%d", self.host, self.port)

    def open(self, session: RecordedSession) -> None:
        """Serve a session."""
        self._opened.open(session)

    def note(self, session: RecordedSession, why: str = "") -> None:
        """Note in the log what was sampled in a session that has ended, and why it did unless as usual."""
        if self.sessions is not None:
            self.sessions.add(session.name, session.digests, why)

    def close(self, session: RecordedSession, why: str = "") -> None:
        """End a session, and note it in the log."""
        if self._opened.close(session):
            self.note(session, why)

    def base_url(self, session: RecordedSession | None = None) -> str:
        """The address of the API, or of a session, as clients take it."""
        return f"http://{_reached_at(self.host)}:{self.port}{PREFIX + session.name if session else ''}/v1"

    def stop(self) -> None:
        """End the server and its connections."""
        if self._server is not None:
            self._server.should_exit = self._server.force_exit = True
        if self._thread is not None:
            self._thread.join(STOP_SECONDS)
        if self.sessions is not None:
            self.sessions.close()

    @property
    def _opened(self) -> Gate:
        assert self._gate is not None, "start() comes first"
        return self._gate

    # ---- in the server's thread ----

    def _run(self, there: asyncio.AbstractEventLoop, started: Future[None]) -> None:
        try:
            asyncio.run(self._serve(there, started))
        except BaseException as error:
            if started.done():
                log.exception("the OpenAI API ended")
            else:
                started.set_exception(error)

    async def _serve(self, there: asyncio.AbstractEventLoop, started: Future[None]) -> None:
        for name, value in QUIET.items():
            os.environ.setdefault(name, value)
        from uvicorn import Config, Server

        try:
            with lean_imports():
                app = _app([_served(model, there) for model in self.models])
        except (TypeError, ValueError) as error:
            raise TrinityError(f"the OpenAI API cannot be served as configured: {error}") from error
        self._gate = Gate(app, self.key)
        door: App = self._gate if self.book is None else self._reception(self.book)
        if self.queues:
            door = TaskDoor(self._gate, door, self.queues)
        self._server = Server(Config(door, log_config=None, access_log=False, lifespan="off"))
        assert self._socket is not None
        serving = asyncio.ensure_future(self._server.serve(sockets=[self._socket]))
        while not self._server.started and not serving.done():
            await asyncio.sleep(0.01)
        started.set_result(None)
        await serving

    def _reception(self, book: SessionBook) -> Reception:
        """What clients of mode `serve` come to first; the sessions of an earlier process are open again."""
        for session in book.sessions:
            self.open(session)
        for session in book.judged:
            self.note(session)
        return Reception(self._opened, book, self.close)


def _listening(host: str, port: int) -> socket.socket:
    try:
        family = socket.AF_INET6 if ":" in host else socket.AF_INET
        both = host == EVERYWHERE and socket.has_dualstack_ipv6()
        return socket.create_server((host, port), family=family, backlog=2048, dualstack_ipv6=both)
    except OSError as error:
        raise TransientFault(f"the OpenAI API cannot listen on {host}:{port}: {error}") from error


def _reached_at(host: str) -> str:
    """The host of the URL of a server that listens at `host`, which may stand for all addresses of this machine."""
    if host in ("", "0.0.0.0", EVERYWHERE):  # noqa: S104
        host = own_address()
    return f"[{host}]" if ":" in host else host


def _served(model: ModelOnPool, there: asyncio.AbstractEventLoop) -> Any:
    from trinity_core.inference.openai_api.client import PoolClient
    from trinity_core.inference.openai_api.serving import Served, ServedModel

    served = ServedModel(**model.served)
    front = _front(model.settings)
    client = PoolClient(front, model.pool, there, model.stop_token_ids, served.names[0], served.recorded)
    return Served(served, client)


def _front(settings: EngineSettings) -> VllmConfig:
    """vLLM's configuration of a process that renders prompts and decodes answers but computes nothing."""
    from vllm import AsyncEngineArgs
    from vllm.config import VllmConfig

    arguments = AsyncEngineArgs(
        model=settings.model_path,
        max_model_len=settings.max_model_len,
        dtype=settings.compute_dtype,  # type: ignore[arg-type]
        trust_remote_code=settings.trust_remote_code,
        generation_config="vllm",
    )
    model = arguments.create_model_config()
    model.quantization = None
    return VllmConfig(model_config=model)


def _app(served: Sequence[Any]) -> Any:
    """vLLM's routes for chat completions, completions and models, and that of one model, which vLLM has not."""
    from fastapi import FastAPI
    from vllm.entrypoints.openai.chat_completion.api_router import attach_router as chat
    from vllm.entrypoints.openai.completion.api_router import attach_router as completion
    from vllm.entrypoints.openai.models.api_router import attach_router as models
    from vllm.entrypoints.serve.exception_handling.register import init_exception_handler
    from vllm.exceptions import VLLMNotFoundError

    from trinity_core.inference.openai_api.serving import ServedModels

    app = FastAPI(openapi_url=None, docs_url=None, redoc_url=None)
    for attach in (chat, completion, models):
        attach(app)

    @app.get("/v1/models/{name:path}")
    async def model(name: str) -> Any:
        known = {card.id: card for card in (await app.state.openai_serving_models.show_available_models()).data}
        if name not in known:
            raise VLLMNotFoundError(f"The model `{name}` does not exist.")
        return known[name].model_dump()

    init_exception_handler(app)
    state = app.state
    state.openai_serving_chat = state.openai_serving_completion = ServedModels(served)
    state.openai_serving_models = state.openai_serving_chat
    state.openai_serving_chat_batch = None
    state.args = SimpleNamespace(log_error_stack=False, sse_keep_alive_interval=0)
    return app
