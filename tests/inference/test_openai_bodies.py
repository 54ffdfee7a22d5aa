"""Request bodies within limits, and errors in OpenAI's format. Without vLLM."""

from __future__ import annotations

import asyncio
import json

import pytest

from trinity_core.rollout.openai_api import middleware
from trinity_core.rollout.openai_api.middleware import SessionMiddleware, openai_error, streamed_error
from trinity_core.rollout.openai_api.session_auth import SessionAuth


def ask(*parts, ends=True):
    """The status and body of the answer to a request whose body arrives in these parts; one without an end waits
    forever. Its application answers with the body."""
    incoming = [{"type": "http.request", "body": part, "more_body": True} for part in parts]
    if ends:
        incoming[-1]["more_body"] = False
    sent = []

    async def receive():
        return incoming.pop(0) if incoming else await asyncio.Event().wait()

    async def send(message):
        sent.append(message)

    async def app(scope, receive, send):
        await send({"type": "http.response.start", "status": 200, "headers": []})
        await send({"type": "http.response.body", "body": (await receive())["body"]})

    scope = {"type": "http", "path": "/v1/models", "headers": [(b"authorization", b"Bearer key")]}
    asyncio.run(SessionMiddleware(app, SessionAuth("key", "session"))(scope, receive, send))
    return sent[0]["status"], sent[1]["body"]


def test_a_body_within_limits_comes_whole():
    assert ask(b"ab", b"", b"c") == (200, b"abc")


def test_a_body_that_never_ends_or_is_too_long_is_refused(monkeypatch):
    monkeypatch.setattr(middleware, "MOST_BYTES", 3)
    status, body = ask(b"abc", b"d", ends=False)
    assert (status, json.loads(body)["error"]["code"]) == (413, "too_large"), "before it is read whole"
    monkeypatch.setattr(middleware, "BODY_SECONDS", 0.05)
    status, body = ask(b"abc", ends=False)
    assert (status, json.loads(body)["error"]["code"]) == (408, "request_timeout")


@pytest.mark.parametrize(
    ("status", "message", "kind", "code", "param"),
    [
        (400, "temperature must be at least 0", "invalid_request_error", None, "temperature"),
        (
            400,
            "The maximum context length is 256 tokens",
            "invalid_request_error",
            "context_length_exceeded",
            "messages",
        ),
        (404, "The model `gpt-4` does not exist.", "invalid_request_error", "model_not_found", None),
        (404, "Not Found", "invalid_request_error", "not_found", None),
        (405, "Method Not Allowed", "invalid_request_error", "method_not_allowed", None),
        (429, "too many", "rate_limit_error", "rate_limit_exceeded", None),
        (500, "it broke", "server_error", None, None),
        (503, "no engine", "server_error", "service_unavailable", None),
    ],
)
def test_statuses_have_openais_types_and_codes(status, message, kind, code, param):
    error = {"message": message, "type": "BadRequestError", "code": status, "param": None if code else param}
    assert openai_error(status, error) == {"message": message, "type": kind, "param": param, "code": code}


def test_errors_within_a_stream_are_spelled_anew():
    data = b'data: {"choices": []}\n\n'
    assert streamed_error(data) == data
    vllms = b'data: {"error": {"message": "it broke", "type": "InternalServerError", "code": 500, "param": null}}\n\n'
    chunk = streamed_error(vllms)
    assert chunk.endswith(b"\n\n")
    error = {"message": "it broke", "type": "server_error", "param": None, "code": None}
    assert json.loads(chunk.removeprefix(b"data: ")) == {"error": error}
