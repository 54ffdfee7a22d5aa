"""Bodies of requests within limits, and errors as OpenAI spells them. Without vLLM."""

from __future__ import annotations

import asyncio
import json

import pytest

from trinity_core.inference.openai_api import body
from trinity_core.inference.openai_api.body import again, json_body, whole_body
from trinity_core.inference.openai_api.error_bodies import SpelledErrors, openai_error
from trinity_core.inference.openai_api.feedback import Refusal
from trinity_core.inference.openai_api.gate import Gate
from trinity_core.inference.openai_api.live import RecordedSession


def receiving(*parts, ends=True):
    """A `receive` that gives these parts; one that does not end waits for ever."""
    messages = [{"type": "http.request", "body": part, "more_body": True} for part in parts]
    if ends:
        messages[-1]["more_body"] = False

    async def receive():
        return messages.pop(0) if messages else await asyncio.Event().wait()

    return receive


def refusal(coroutine):
    with pytest.raises(Refusal) as caught:
        asyncio.run(coroutine)
    return caught.value.status, caught.value.code


def test_a_body_comes_whole_and_is_given_again():
    assert asyncio.run(whole_body(receiving(b"ab", b"", b"c"))) == b"abc"

    async def twice():
        receive = again(b"abc", receiving(b"after"))
        return await receive(), await receive()

    first, second = asyncio.run(twice())
    assert first == {"type": "http.request", "body": b"abc", "more_body": False} and second["body"] == b"after"


def test_a_body_that_never_ends_or_is_too_long_is_refused(monkeypatch):
    assert refusal(whole_body(receiving(b"abc", b"d"), most=3)) == (413, "too_large")
    monkeypatch.setattr(body, "SECONDS", 0.05)
    assert refusal(whole_body(receiving(b"abc", ends=False))) == (408, "request_timeout")
    assert refusal(json_body({"method": "POST"}, receiving(b"{no json"))) == (400, "invalid_json")
    assert refusal(json_body({"method": "GET"}, receiving(b""))) == (405, "method_not_allowed")


async def served(scope, receive, send):
    """Answers with the body that it was sent."""
    await send({"type": "http.response.start", "status": 200, "headers": []})
    await send({"type": "http.response.body", "body": (await receive())["body"]})


def test_half_a_request_does_not_keep_its_session(monkeypatch):
    monkeypatch.setattr(body, "SECONDS", 0.05)
    gate, session, sent = Gate(served, "sk-1"), RecordedSession(), []
    gate.open(session)

    async def send(message):
        sent.append(message)

    async def ask(receive):
        sent.clear()
        path = f"/sessions/{session.name}/v1/chat/completions"
        scope = {"type": "http", "path": path, "headers": [(b"authorization", b"Bearer sk-1")], "method": "POST"}
        await gate(scope, receive, send)
        return sent[0]["status"], sent[1]["body"]

    status, said = asyncio.run(ask(receiving(b'{"messages', ends=False)))
    assert status == 408 and json.loads(said)["error"]["code"] == "request_timeout"
    assert session.in_flight == 0
    assert asyncio.run(ask(receiving(b"whole ", b"body"))) == (200, b"whole body")


def test_a_session_that_ends_amid_an_error_is_said_to_have_ended():
    session, sent = RecordedSession(), []

    async def failing(scope, receive, send):
        await send({"type": "http.response.start", "status": 500, "headers": []})
        session.end()
        await asyncio.sleep(0)  # here the request is given up
        await asyncio.Event().wait()

    async def send(message):
        sent.append(message)

    gate = Gate(failing, "sk-1")
    gate.open(session)
    path = f"/sessions/{session.name}/v1/chat/completions"
    scope = {"type": "http", "path": path, "headers": [(b"authorization", b"Bearer sk-1")], "method": "POST"}
    asyncio.run(gate(scope, receiving(b"{}"), send))
    assert sent[0]["status"] == 410 and json.loads(sent[1]["body"])["error"]["code"] == "session_ended"


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
        (405, "Method Not Allowed", "invalid_request_error", None, None),
        (429, "too many", "rate_limit_error", "rate_limit_exceeded", None),
        (500, "it broke", "server_error", None, None),
        (503, "no engine", "server_error", "service_unavailable", None),
    ],
)
def test_statuses_have_openais_types_and_codes(status, message, kind, code, param):
    given = {"message": message, "type": "BadRequestError", "code": status, "param": None if code else param}
    assert openai_error(status, given) == {"message": message, "type": kind, "param": param, "code": code}


def sent_through(*messages):
    sent = []

    async def send(message):
        sent.append(message)

    async def run():
        spelled = SpelledErrors(send)
        for message in messages:
            await spelled(message)

    asyncio.run(run())
    return sent


def test_error_responses_are_spelled_anew():
    start = {"type": "http.response.start", "status": 404, "headers": [(b"Content-Length", b"9"), (b"x-kept", b"1")]}
    parts = [json.dumps({"detail": "Not Found"}).encode()[:5], json.dumps({"detail": "Not Found"}).encode()[5:]]
    first, second = sent_through(
        start,
        {"type": "http.response.body", "body": parts[0], "more_body": True},
        {"type": "http.response.body", "body": parts[1]},
    )
    assert json.loads(second["body"])["error"]["message"] == "Not Found"
    headers = dict(first["headers"])
    assert headers[b"content-length"] == str(len(second["body"])).encode() and headers[b"x-kept"] == b"1"
    assert b"Content-Length" not in headers


def test_errors_within_a_stream_are_spelled_anew():
    start = {"type": "http.response.start", "status": 200, "headers": []}
    data = b'data: {"choices": []}\n\n'
    error = b'data: {"error": {"message": "it broke", "type": "InternalServerError", "code": 500, "param": null}}\n\n'
    sent = sent_through(
        start, *({"type": "http.response.body", "body": part, "more_body": True} for part in (data, error))
    )
    assert sent[1]["body"] == data
    assert sent[2]["body"].endswith(b"\n\n")
    said = json.loads(sent[2]["body"].removeprefix(b"data: "))
    assert said == {"error": {"message": "it broke", "type": "server_error", "param": None, "code": None}}
