"""A server of the OpenAI API for tests: pool and server in their own loop, as in an explorer."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import openai

from trinity_core.data.tokenizer import load_tokenizer
from trinity_core.rollout.inference.pool import EnginePool
from trinity_core.rollout.openai_api.recorded_session import RecordedSession, SessionTerms
from trinity_core.rollout.openai_api.served_model import ServedModel
from trinity_core.rollout.openai_api.server import ApiServer


@dataclass
class Api:
    server: ApiServer
    pool: EnginePool
    tokenizer: Any
    loop: asyncio.AbstractEventLoop
    http: Any = field(default_factory=lambda: openai.DefaultHttpxClient(verify=False))
    """Shared by all clients, as each takes 20 ms to make."""

    def client(self, session: RecordedSession | None = None, key: str | None = None, **args) -> openai.OpenAI:
        """An unmodified client, of a session or of the whole API, without retries."""
        args = {"http_client": self.http, "max_retries": 0} | args
        return openai.OpenAI(base_url=self.server.base_url(session), api_key=key or self.server.key, **args)

    def session(self, **terms) -> RecordedSession:
        session = RecordedSession(SessionTerms(**terms))
        self.server.open(session)
        return session


async def end_tasks() -> None:
    for task in asyncio.all_tasks() - {asyncio.current_task()}:
        task.cancel()
    await asyncio.sleep(0)


@contextmanager
def serving(folder, *engines, max_model_len=256, server=None, judge=False, **served) -> Iterator[Api]:
    """Serve the model in `folder` on these engines as `policy`, and optionally as the auxiliary model `judge`;
    `server`: further arguments of `ApiServer`."""
    loop = asyncio.new_event_loop()
    thread = threading.Thread(target=loop.run_forever, daemon=True)
    thread.start()
    do = lambda work: asyncio.run_coroutine_threadsafe(work, loop).result(120)  # noqa: E731

    async def start():
        pool = EnginePool(engines, str(folder))
        await pool.start()
        shared = {"path": str(folder), "pool": pool, "max_model_len": max_model_len}
        models = [ServedModel(("policy", str(folder)), **shared, sampling=(("temperature", 1.0),), **served)]
        if judge:
            models.append(ServedModel(("judge",), **shared, recorded=False))
        api = ApiServer(models, **(server or {}))
        await api.start()
        return Api(api, pool, load_tokenizer(str(folder)), loop)

    api = do(start())
    yield api
    api.server.stop()
    do(end_tasks())
    loop.call_soon_threadsafe(loop.stop)
    thread.join(10)
