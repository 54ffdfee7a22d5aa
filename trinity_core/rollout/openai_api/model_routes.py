"""The routes of chat completions, responses, completions and models, on vLLM's handlers.

A response is written over several turns of the event loop: log-probs can make it hundreds of megabytes, and writing it
in one turn would block all other requests.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable, Coroutine, Iterator
from functools import partial
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

from fastapi import APIRouter, Depends, FastAPI, Request
from fastapi.responses import JSONResponse, Response, StreamingResponse
from starlette.types import Message, Receive, Scope, Send
from vllm.entrypoints.openai.chat_completion.protocol import ChatCompletionRequest, ChatCompletionResponse
from vllm.entrypoints.openai.completion.protocol import CompletionRequest, CompletionResponse
from vllm.entrypoints.serve.engine.protocol import ErrorResponse
from vllm.entrypoints.serve.exception_handling.register import init_exception_handler
from vllm.entrypoints.serve.utils.api_utils import listen_for_disconnect, validate_json_request
from vllm.exceptions import VLLMNotFoundError

from trinity_core.rollout.openai_api.error_bodies import (
    error_response,
    refused,
    session_headers,
    streamed_error,
)
from trinity_core.rollout.openai_api.recorded_session import EXCHANGE, Exchange
from trinity_core.rollout.openai_api.request_limits import ModelRoute
from trinity_core.rollout.openai_api.session_auth import SESSION_ENDED, Refusal

if TYPE_CHECKING:
    from trinity_core.rollout.openai_api.application import InSession
    from trinity_core.rollout.openai_api.vllm_handlers import ServedModels

CLIENT_GONE = 499
NO_CHOICES = '"choices":[]'


def model_router(models: ServedModels, in_session: InSession | None = None) -> APIRouter:
    """Return the routes below `/v1`. `in_session`: dependency within which generation requests are served."""
    router = APIRouter(route_class=ModelRoute)
    session = [] if in_session is None else [Depends(in_session)]
    asks = {"dependencies": [*session, Depends(validate_json_request)], "response_model": None}

    @router.post("/chat/completions", **asks)  # type: ignore[arg-type]
    async def chat(request: ChatCompletionRequest, raw_request: Request) -> Response:
        return await _while_there(raw_request, models.create_chat_completion(request, raw_request))

    @router.post("/completions", **asks)  # type: ignore[arg-type]
    async def completion(request: CompletionRequest, raw_request: Request) -> Response:
        return await _while_there(raw_request, models.create_completion(request, raw_request))

    @router.post("/responses", **asks)  # type: ignore[arg-type]
    async def response(body: dict[str, Any], raw_request: Request) -> Response:
        return await _while_there(raw_request, models.create_response(body, raw_request))

    @router.get("/models")
    async def all_models() -> dict[str, Any]:
        return (await models.show_available_models()).model_dump()

    @router.get("/models/{name:path}")
    async def model(name: str) -> dict[str, Any]:
        for card in (await models.show_available_models()).data:
            if card.id == name:
                return card.model_dump()
        raise VLLMNotFoundError(f"The model `{name}` does not exist.")

    return router


def model_application(models: ServedModels) -> tuple[FastAPI, Callable[[InSession | None], APIRouter]]:
    """Return an application with vLLM's error handlers, and the factory of its model routes."""
    app = FastAPI(openapi_url=None, docs_url=None, redoc_url=None)
    init_exception_handler(app)
    app.state.args = SimpleNamespace(log_error_stack=False)  # read by vLLM's error handlers
    app.state.openai_serving_models = models

    @app.exception_handler(RecursionError)
    async def too_deep(request: Request, error: RecursionError) -> JSONResponse:
        """The arguments of a tool call are JSON within JSON, whose depth only its parser sees."""
        kind = {"type": "invalid_request_error", "param": None, "code": "invalid_json"}
        return JSONResponse({"error": {"message": f"JSON is nested too deeply: {error}", **kind}}, 400)

    return app, partial(model_router, models)


async def _while_there(request: Request, work: Coroutine[Any, Any, Any]) -> Response:
    """Return the response; cancel the work if the client leaves or the session ends."""
    exchange = EXCHANGE.get()
    answering = asyncio.ensure_future(work)
    gone = asyncio.ensure_future(listen_for_disconnect(request))
    if exchange is not None:
        exchange.runs_in(answering)
    try:
        await asyncio.wait({answering, gone}, return_when=asyncio.FIRST_COMPLETED)
        if answering.cancelled():
            raise Refusal(*SESSION_ENDED)
        response = (
            await _response(request, answering.result()) if answering.done() else Response(status_code=CLIENT_GONE)
        )
    finally:
        answering.cancel()
        gone.cancel()
    return response if exchange is None else RecordedResponse(request, response, exchange)


async def _response(request: Request, result: Any) -> Response:
    if isinstance(result, ErrorResponse):
        return error_response(request, result.error.code, result.error.model_dump())
    headers = session_headers(request)
    if isinstance(result, dict):
        return JSONResponse(result, headers=headers)
    if isinstance(result, ChatCompletionResponse | CompletionResponse):
        return Response(await asyncio.to_thread(_json, result), headers=headers, media_type="application/json")
    return StreamingResponse(_chunks(result), headers=headers, media_type="text/event-stream")


async def _chunks(chunks: AsyncIterator[str]) -> AsyncIterator[str]:
    async for chunk in chunks:
        yield streamed_error(chunk)


def _json(result: ChatCompletionResponse | CompletionResponse) -> bytes:
    """Serialise to one JSON object, a choice at a time, so that other threads can run in between."""
    head, _, end = result.model_copy(update={"choices": []}).model_dump_json().partition(NO_CHOICES)
    return f'{head}"choices":[{",".join(_dumped(result))}]{end}'.encode()


def _dumped(result: ChatCompletionResponse | CompletionResponse) -> Iterator[str]:
    for choice in result.choices:
        yield choice.model_dump_json()


class RecordedResponse(Response):
    """A response in a session, which ends with the session."""

    def __init__(self, request: Request, response: Response, exchange: Exchange) -> None:
        super().__init__()
        self._request, self._response, self._exchange = request, response, exchange

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        begun = False

        async def sending(message: Message) -> None:
            nonlocal begun
            begun = True
            await send(message)

        task = asyncio.ensure_future(self._response(scope, receive, sending))
        self._exchange.runs_in(task)
        try:
            await asyncio.wait({task})
            if not task.cancelled():
                task.result()
            elif not begun:
                await refused(self._request, Refusal(*SESSION_ENDED))(scope, receive, send)
        finally:
            task.cancel()
