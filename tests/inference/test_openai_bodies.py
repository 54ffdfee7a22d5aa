"""Request bodies within limits, and errors in OpenAI's format. Without vLLM."""

from __future__ import annotations

import asyncio
import json

import pytest

from trinity_core.rollout.openai_api import request_limits
from trinity_core.rollout.openai_api.error_bodies import openai_error, streamed_error
from trinity_core.rollout.openai_api.request_limits import LimitedRequest
from trinity_core.rollout.openai_api.session_auth import Refusal


def requested(*parts, ends=True):
    """A request whose body arrives in these parts; one without an end waits forever."""
    messages = [{"type": "http.request", "body": part, "more_body": True} for part in parts]
    if ends:
        messages[-1]["more_body"] = False

    async def receive():
        return messages.pop(0) if messages else await asyncio.Event().wait()

    return LimitedRequest({"type": "http", "headers": []}, receive)


def refusal(work):
    with pytest.raises(Refusal) as caught:
        work()
    return caught.value.status, caught.value.code


def read(request):
    return lambda: asyncio.run(request.body())


def test_a_body_within_limits_comes_whole():
    request = requested(b"ab", b"", b"c")
    assert read(request)() == read(request)() == b"abc"


def test_a_body_that_never_ends_or_is_too_long_is_refused(monkeypatch):
    request = requested(b"abc", b"d", ends=False)
    request.most_bytes = 3
    assert refusal(read(request)) == (413, "too_large"), "before it is read whole"
    monkeypatch.setattr(request_limits, "SECONDS", 0.05)
    assert refusal(read(requested(b"abc", ends=False))) == (408, "request_timeout")


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
    data = 'data: {"choices": []}\n\n'
    assert streamed_error(data) == data
    vllms = 'data: {"error": {"message": "it broke", "type": "InternalServerError", "code": 500, "param": null}}\n\n'
    chunk = streamed_error(vllms)
    assert chunk.endswith("\n\n")
    error = {"message": "it broke", "type": "server_error", "param": None, "code": None}
    assert json.loads(chunk.removeprefix("data: ")) == {"error": error}
