"""An external endpoint that is slow, busy, broken or refuses requests, over real HTTP."""

from __future__ import annotations

import asyncio
import threading
import time
from typing import Any

import pytest
from endpoint_server import Asked, Reply, completion, serving
from hypothesis import given
from hypothesis import strategies as st
from ports import free_port

from trinity_core.base.errors import EndpointError, TransientFault, Unanswered
from trinity_core.base.timing import BusyTimer
from trinity_core.config import ExternalModelConfig
from trinity_core.rollout.inference.external_model import GIVE_UP, Answer, Endpoint, ExternalModel, RateLimit

KEY = "sk-very-secret-4711"
BODY = {"model": "m", "messages": [{"role": "user", "content": "3 + 4?"}]}


def endpoint(url: str, **options: Any) -> Endpoint:
    budget = options.pop("budget", 60.0)
    settings = ExternalModelConfig(base_url=url, model_name="m", **options)
    return Endpoint(settings, KEY, budget)


def ask(asked: Endpoint, times: int = 1) -> list[Any]:
    async def main() -> list[Any]:
        return await asyncio.gather(*(asked.ask(BODY) for _ in range(times)), return_exceptions=True)

    return asyncio.run(main())


SOON = {"Retry-After-Ms": "10"}
FAULTS = {
    "busy": Reply("slow down", 429, SOON),
    "broken": Reply("oops", 500, SOON),
    "behind a broken gateway": Reply("<html>", 502, SOON),
    "cut off": Reply(cut=True),
    "hangs": Reply(seconds=1.5),
}
NO_ANSWERS = {
    "no JSON": Reply("<html>hello</html>"),
    "half of a JSON": Reply('{"choices": [{"mess'),
    "no choices": Reply({"choices": []}),
    "an error with status 200": Reply({"error": {"message": "overloaded"}}),
}


def patience(fault: str) -> float:
    """Seconds for an attempt: few if the server hangs."""
    return 0.7 if fault == "hangs" else 30.0


@pytest.mark.parametrize("fault", FAULTS)
def test_a_passing_fault_is_retried(fault: str) -> None:
    with serving(lambda number, _: Reply() if number else FAULTS[fault]) as server:
        assert ask(endpoint(server.url, timeout=patience(fault))) == [Answer("#### 7", "stop", 9, 5)]
    assert {(request.path, request.authorization) for request in server.asked} == {
        ("/v1/chat/completions", f"Bearer {KEY}")
    }
    assert len(server.asked) == 2


def test_the_organisation_of_another_key_is_not_told(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OPENAI_ORG_ID", "org")
    monkeypatch.setenv("OPENAI_PROJECT_ID", "project")
    with serving(lambda *_: Reply()) as server:
        assert ask(endpoint(server.url)) == [Answer("#### 7", "stop", 9, 5)]
    assert not {"openai-organization", "openai-project"} & server.asked[0].headers


@pytest.mark.parametrize("fault", ["broken", "cut off", "hangs", *NO_ANSWERS])
async def test_a_lasting_fault_of_one_request_costs_its_answer(fault: str) -> None:
    with serving(lambda number, _: (FAULTS | NO_ANSWERS)[fault] if number else Reply()) as server:
        asked = endpoint(server.url, max_retry_times=1, timeout=patience(fault))

        with pytest.raises(Unanswered):
            await asked.ask(BODY)
            await asked.ask(BODY)
    assert len(server.asked) == 2 + (fault in FAULTS)


@pytest.mark.parametrize(
    ("reply", "budget"),
    [
        (Reply({"error": {"message": "maximum context length is 64"}}, 400), 60.0),
        (Reply("slow down", 429, {"Retry-After": "60"}), 1.0),
        (Reply(seconds=1.2), 0.7),
    ],
    ids=["bad request", "pause beyond the budget", "answer beyond the budget"],
)
def test_what_cannot_be_answered_in_time_is_not_retried(reply: Reply, budget: float) -> None:
    """An endpoint that is slow or asks for long pauses looks neither down nor like a slow workflow."""
    with serving(lambda *_: reply) as server:
        [error] = ask(endpoint(server.url, budget=budget))
    assert isinstance(error, Unanswered)
    assert len(server.asked) == 1


@pytest.mark.parametrize("status", [401, 402, 403, 404])
def test_an_endpoint_that_refuses_us_ends_the_evaluation(status: int) -> None:
    with serving(lambda *_: Reply({"error": {"message": f"bad key {KEY}"}}, status)) as server:
        [error] = ask(endpoint(server.url))
    assert isinstance(error, EndpointError)
    assert KEY not in str(error), "some endpoints repeat the key in their error"


@given(
    st.lists(st.tuples(st.floats(0, 5), st.integers(0, 400)), min_size=1, max_size=30),
    st.integers(1, 100), st.integers(50, 1000),
)  # fmt: skip
def test_no_minute_has_more_requests_or_tokens_than_allowed(
    arrivals: list[tuple[float, int]], requests: int, tokens: int
) -> None:
    """Of requests one after the other: any minute has at most its number and one, and its tokens and one answer's."""
    now, begun = 0.0, []

    async def sleep(seconds: float) -> None:
        nonlocal now
        now += max(seconds, 0.0)

    async def main() -> None:
        limit = RateLimit(requests, tokens, clock=lambda: now, sleep=sleep)
        for pause, count in arrivals:
            await sleep(pause)
            await limit.turn()
            begun.append((now, count))
            limit.count(count)

    asyncio.run(main())
    for start, _ in begun:
        within = [count for when, count in begun if start <= when < start + 60 - 1e-6]
        assert len(within) <= requests + 1
        assert sum(within) <= tokens + max(within)


async def test_requests_are_spaced() -> None:
    """600 a minute are one each 0.1 s, whatever is free; the wait is the queue's, not the workflow's."""
    queueing = BusyTimer()
    with serving(lambda *_: Reply()) as server:
        asked = endpoint(server.url, requests_per_minute=600)

        began = time.monotonic()
        await asyncio.gather(*(asked.ask({"model": "m", "messages": []}, queueing) for _ in range(6)))
        seconds = time.monotonic() - began
    assert seconds >= 0.5 and queueing.seconds >= 0.4


def test_a_moderated_request_costs_one_answer() -> None:
    with serving(lambda number, _: Reply("flagged", 403) if number else Reply()) as server:
        asked = endpoint(server.url, requests_at_once=1)
        first, second = ask(asked, 2)
    assert isinstance(first, Answer)
    assert isinstance(second, Unanswered)


@pytest.mark.parametrize("limit", [{"max_retry_times": 2}, {"budget": 1.0}])
def test_an_endpoint_that_is_down_is_named(limit: dict[str, Any]) -> None:
    url = f"http://127.0.0.1:{free_port()}/v1"
    [error] = ask(endpoint(url, **limit))
    assert isinstance(error, TransientFault)
    assert url in str(error)


def test_an_endpoint_that_never_answers_is_given_up() -> None:
    with serving(lambda *_: Reply("oops", 500)) as server:
        errors = ask(endpoint(server.url, max_retry_times=0, requests_at_once=1), GIVE_UP)
    assert all(isinstance(error, Unanswered) for error in errors[:-1])
    assert isinstance(errors[-1], TransientFault)


def test_an_endpoint_that_answers_no_longer_is_given_up() -> None:
    with serving(lambda number, _: Reply() if number in (0, GIVE_UP) else Reply("oops", 500)) as server:
        answers = ask(endpoint(server.url, max_retry_times=0, requests_at_once=1), 2 * GIVE_UP + 1)
    answered = [number for number, answer in enumerate(answers) if isinstance(answer, Answer)]
    given_up = [number for number, answer in enumerate(answers) if isinstance(answer, TransientFault)]
    assert (answered, given_up) == ([0, GIVE_UP], [2 * GIVE_UP])


def test_failures_beside_an_answer_do_not_add_up() -> None:
    """Failures of requests that are too hard for an endpoint that answers others."""
    asked_at_once, answered = threading.Barrier(2 * GIVE_UP), threading.Event()

    def script(number: int, _: Asked) -> Reply:
        asked_at_once.wait(60)
        return Reply("oops", 500) if number and answered.wait(60) else Reply()

    async def main(asked: Endpoint) -> list[Any]:
        asks = [asyncio.ensure_future(asked.ask(BODY)) for _ in range(2 * GIVE_UP)]
        await asyncio.wait(asks, return_when=asyncio.FIRST_COMPLETED)
        answered.set()
        return await asyncio.gather(*asks, return_exceptions=True)

    with serving(script) as server:
        answers = asyncio.run(main(endpoint(server.url, max_retry_times=0, requests_at_once=2 * GIVE_UP)))
    assert sorted(type(one).__name__ for one in answers) == ["Answer"] + ["Unanswered"] * (2 * GIVE_UP - 1)


def test_no_more_requests_in_flight_than_allowed() -> None:
    with serving(lambda *_: Reply(seconds=0.05)) as server:
        answers = ask(endpoint(server.url, requests_at_once=3), 12)
    assert [type(answer) for answer in answers] == [Answer] * 12
    assert server.most_at_once <= 3


async def test_a_model_sends_messages_and_sampling() -> None:
    with serving(lambda *_: Reply(completion("so", "length"))) as server:
        asked = endpoint(server.url, request_args={"reasoning_effort": "low", "user": None})

        model = ExternalModel(asked, {"temperature": 1.0, "top_k": -1, "max_tokens": 64})
        first, second = await model.chat(BODY["messages"], n=2, seeds=[5, 6], temperature=0.2, top_p=None)
    expected = {**BODY, "temperature": 0.2, "max_tokens": 64, "reasoning_effort": "low"}
    bodies = sorted((request.body for request in server.asked), key=lambda body: body["seed"])
    assert bodies == [expected | {"seed": seed} for seed in (5, 6)], "each answer has its own"
    assert (first.text, first.finish_reason, len(first.prompt_tokens), len(first.tokens)) == ("so", "length", 9, 5)
    assert second.experience(reward=1.0).response_length == 5


async def test_arguments_of_tool_calls_are_sent_as_text() -> None:
    """As in OpenAI's API; chat templates have objects."""
    call = {"id": "c", "type": "function", "function": {"name": "add", "arguments": {"a": 2}}}
    messages = [{"role": "user", "content": "?"}, {"role": "assistant", "content": "", "tool_calls": [call]}]
    with serving(lambda *_: Reply()) as server:
        asked = endpoint(server.url)

        await ExternalModel(asked).chat(messages)
    [one] = server.asked
    assert one.body["messages"][1]["tool_calls"] == [{**call, "function": {"name": "add", "arguments": '{"a": 2}'}}]
