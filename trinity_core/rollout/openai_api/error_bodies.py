"""Converts errors of ours, FastAPI's and vLLM's to OpenAI's format: clients distinguish them by type and code.

https://platform.openai.com/docs/guides/error-codes lists the statuses; types and codes are those of its answers.
"""

from __future__ import annotations

import json
from collections.abc import Awaitable, Callable, Mapping
from http import HTTPStatus
from inspect import isawaitable
from typing import Any

import fastapi
from fastapi import FastAPI, Request, Response
from fastapi.exceptions import RequestValidationError
from fastapi.responses import JSONResponse
from starlette.exceptions import HTTPException

from trinity_core.rollout.openai_api.session_auth import Refusal

SESSION_HEADER = "x-trinity-session"
STREAMED = 'data: {"error"'
KINDS = {
    HTTPStatus.UNAUTHORIZED: ("authentication_error", "invalid_api_key"),
    HTTPStatus.NOT_FOUND: ("invalid_request_error", "not_found"),
    HTTPStatus.METHOD_NOT_ALLOWED: ("invalid_request_error", "method_not_allowed"),
    HTTPStatus.TOO_MANY_REQUESTS: ("rate_limit_error", "rate_limit_exceeded"),
    HTTPStatus.SERVICE_UNAVAILABLE: ("server_error", "service_unavailable"),
}
TOO_LONG = "maximum context length"
"""Part of the message about a prompt, or a prompt and `max_tokens`, beyond the context length."""
NO_MODEL = "The model `"
VALIDATION_CODES = {
    "missing": "missing_required_parameter",
    "extra_forbidden": "unknown_parameter",
    "json_invalid": "invalid_json",
}
"""Error codes by pydantic's error types; all others are `invalid_value`."""


def openai_error(status: int, error: Mapping[str, Any]) -> dict[str, Any]:
    """Return the fields of an error: `message`, `type`, `param` and `code`. An error with a code in words is
    unchanged."""
    message, param = str(error.get("message") or HTTPStatus(status).phrase), error.get("param")
    if isinstance(error.get("code"), str):
        return dict(error)
    kind, code = KINDS.get(HTTPStatus(status), ("server_error" if status >= 500 else "invalid_request_error", None))
    if status == HTTPStatus.NOT_FOUND and message.startswith(NO_MODEL):
        code = "model_not_found"
    elif status == HTTPStatus.BAD_REQUEST and TOO_LONG in message:
        code, param = "context_length_exceeded", param or "messages"
    return {"message": message, "type": kind, "param": param, "code": code}


def error_response(request: Request, status: int, error: Mapping[str, Any]) -> JSONResponse:
    """Return the response. If the server opened a session for the request, it names the session."""
    return JSONResponse({"error": openai_error(status, error)}, status, session_headers(request))


def session_headers(request: Request) -> dict[str, str]:
    """Return the header that names the session of a request sent to the address without one."""
    name = request.scope.get("state", {}).get(SESSION_HEADER)
    return {} if name is None else {SESSION_HEADER: name}


def refused(request: Request, refusal: Refusal) -> JSONResponse:
    error = {"message": str(refusal), "type": refusal.kind, "param": refusal.param, "code": refusal.code}
    return error_response(request, refusal.status, error)


def streamed_error(chunk: str) -> str:
    if not chunk.startswith(STREAMED):
        return chunk
    data, blank, rest = chunk.removeprefix("data: ").partition("\n\n")
    error = _error_in(data.encode())
    status = code if isinstance(code := error.get("code"), int) else HTTPStatus.INTERNAL_SERVER_ERROR
    return f"data: {json.dumps({'error': openai_error(status, error)})}{blank}{rest}"


def add_error_handlers(app: FastAPI) -> None:
    """Convert all errors of an application, including those of its existing (vLLM's) handlers."""
    for kind, handler in list(app.exception_handlers.items()):
        app.add_exception_handler(kind, _spelled(handler))
    validation = app.exception_handlers[RequestValidationError]
    app.exception_handlers.pop(fastapi.HTTPException, None)  # vLLM's handler, so that `http_error` handles these too

    @app.exception_handler(Refusal)
    async def refusal(request: Request, error: Refusal) -> Response:
        return refused(request, error)

    @app.exception_handler(HTTPException)
    async def http_error(request: Request, error: HTTPException) -> Response:
        """An unknown path or method; requires the key like any other request."""
        try:
            request.app.state.auth.check_key(request)
        except Refusal as without_key:
            return refused(request, without_key)
        if error.status_code == HTTPStatus.BAD_REQUEST:  # FastAPI's, for invalid UTF-8 or a number too long
            return refused(request, Refusal(400, "invalid_json", f"{error.detail}."))
        return error_response(request, error.status_code, {"message": error.detail})

    @app.exception_handler(RequestValidationError)
    async def invalid(request: Request, error: RequestValidationError) -> Response:
        """Our own routes name the invalid field; vLLM's routes answer as vLLM does, unless the body is not JSON."""
        first = error.errors()[0]
        is_json = not isinstance(first, Mapping) or first["type"] != "json_invalid"  # vLLM's errors may be strings
        if "/v1/" in request.url.path and is_json:
            return await validation(request, error)  # type: ignore[no-any-return, misc]
        path = [str(part) for part in first["loc"][1:]]
        if path and path[-1] == "[key]":  # a wrong name in an object
            path = path[:-2]
        code = VALIDATION_CODES.get(first["type"], "invalid_value")
        where = ".".join(path) if code != "invalid_json" else ""
        message = f"{where or 'the body'}: {first['msg']}."
        return refused(request, Refusal(400, code, message, where or None))


def _spelled(handler: Callable[..., Any]) -> Callable[[Request, Exception], Awaitable[Response]]:
    async def spelled(request: Request, error: Exception) -> Response:
        response = handler(request, error)
        if isawaitable(response):
            response = await response
        return error_response(request, response.status_code, _error_in(response.body))

    return spelled


def _error_in(body: bytes) -> Mapping[str, Any]:
    """Return the error in a body, in vLLM's or FastAPI's form; else its text."""
    try:
        content = json.loads(body)
    except ValueError:
        return {"message": body.decode(errors="replace")}
    error = content.get("error", content) if isinstance(content, Mapping) else content
    if isinstance(error, Mapping):
        return {"message": error.get("detail"), **error}
    return {"message": str(error)}
