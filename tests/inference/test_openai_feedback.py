"""Sessions of mode `serve`: opened, judged, dropped, grouped and kept over restarts. Without an engine."""

from __future__ import annotations

import asyncio
import json
import resource
import signal

import httpx
import numpy as np
import pytest
from fastapi import FastAPI

from trinity_core.data.turns import Call
from trinity_core.rollout.inference.requests import Sample
from trinity_core.rollout.openai_api.application import application
from trinity_core.rollout.openai_api.recorded_session import EXCHANGE, SessionTerms
from trinity_core.rollout.openai_api.served_sessions import Feedback, Journal, ServedSessions
from trinity_core.rollout.openai_api.session_auth import Refusal, SessionAuth

HELLO = [{"role": "user", "content": "hello"}]


class Clock:
    now = 1000.0

    def __call__(self):
        return self.now


@pytest.fixture
def clock():
    return Clock()


@pytest.fixture
def open_served(tmp_path, clock):
    return lambda **how: ServedSessions(Journal(tmp_path / "journal"), SessionTerms(), 60.0, clock=clock, **how)


def call(prompt=(1, 2), tokens=(3, 4), version=0):
    count = len(tokens)
    versions = np.full(count, version, np.int32)
    return Call(np.array(prompt, np.int32), Sample(np.array(tokens, np.int32), np.full(count, -0.3), versions, "stop"))


def answered(session, *calls, messages=HELLO):
    """Serve a request of the session with this answer."""
    for one in calls or (call(),):
        exchange = session.begin()
        exchange.messages, exchange.calls = messages, {("r", 0): one}
        exchange.keep({0: [{"role": "assistant", "content": "hi"}]})
        exchange.close()


def test_a_full_disk_leaves_what_is_there_readable(tmp_path):
    """A partial line is removed, so that the next one is on its own line."""
    journal = Journal(tmp_path / "journal")
    journal.begin("s", "task")
    [path] = (tmp_path / "journal").iterdir()
    before, most = path.stat().st_size, resource.getrlimit(resource.RLIMIT_FSIZE)
    ignored = signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    resource.setrlimit(resource.RLIMIT_FSIZE, (before + 10, most[1]))
    try:
        with pytest.raises(OSError):
            journal.feedback("s", {"reward": 1.0})
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, most)
        signal.signal(signal.SIGXFSZ, ignored)
    assert path.stat().st_size == before
    journal.feedback("s", {"reward": 0.5})
    [entry] = journal.read()
    assert (entry.task, entry.feedback) == ("task", {"reward": 0.5})


def judged(served, reward=1.0, task="", **how):
    session = served.begin(task)
    answered(session, call(**how))
    served.give(session.name, Feedback(reward=reward))
    return session.name


def names(groups):
    return [[mine.name for mine in group.sessions] for group in groups]


def refusal(served, name):
    with pytest.raises(Refusal) as caught:
        served.give(name, Feedback(reward=1))
    return caught.value.status, caught.value.error["code"], caught.value.error["param"]


def test_feedback_ends_a_session_and_is_taken_once(open_served):
    served = open_served()
    session = served.begin()
    answered(session)
    feedback = Feedback(reward=1, metrics={"stars": 4}, comment="good")
    assert served.give(session.name, feedback) is session and session.begin() is None
    [group] = served.take(8, 0)
    assert group.sessions[0].feedback == feedback and not group.dropped
    served.stored()
    assert served.take(8, 0) == [] and not list(open_served().judged)


def test_feedback_without_a_session_to_judge_is_refused(open_served):
    served = open_served()
    session, empty = served.begin(), served.begin()
    answered(session)
    assert refusal(served, "nobody") == (404, "session_not_found", "session_id")
    assert refusal(served, empty.name) == (409, "nothing_sampled", "session_id")
    served.give(session.name, Feedback(reward=1))
    assert refusal(served, session.name) == (409, "feedback_already_given", "session_id")


def test_sessions_without_feedback_are_dropped(open_served, clock):
    served = open_served()
    session, empty, busy = (served.begin() for _ in range(3))
    answered(session)
    request = busy.begin()
    clock.now += 59
    assert served.expire() == []
    clock.now += 2
    assert set(served.expire()) == {session, empty}
    assert refusal(served, session.name)[:2] == (410, "session_ended")
    [group] = served.take(8, 0)
    assert names([group]) == [[session.name]] and group.dropped == "without_feedback"
    request.close()
    served.used(busy.name)
    assert served.expire() == []


def test_a_request_renews_the_time_of_its_session(open_served, clock):
    served = open_served()
    session = served.begin()
    answered(session)
    clock.now += 40
    served.used(session.name)
    clock.now += 40
    assert served.expire() == []


def test_sessions_of_one_task_are_a_group(open_served, clock):
    served = open_served(repeats=2)
    first, other = judged(served, task="a"), judged(served, task="b")
    assert served.complete()[0] == 0
    second, third = judged(served, task="a"), judged(served, task="a")
    assert names(served.take(8, 0)) == [[first, second]]
    served.stored()
    fourth = judged(served, task="b")
    clock.now += 100
    fifth = judged(served, task="c")
    served.expire()
    groups = served.take(8, 0)
    assert sorted(names(groups)) == sorted([[other, fourth], [third]])
    assert [group.dropped for group in groups if names([group]) == [[third]]] == ["without_group"]
    assert served.counts == (0, 1, 0) and fifth


def test_without_a_task_the_first_prompt_makes_the_group(open_served):
    served = open_served(repeats=2)
    one, two, three = (judged(served, prompt=prompt) for prompt in ((1, 2), (1, 3), (1, 2)))
    assert names(served.take(8, 0)) == [[one, three]] and two


def test_a_restart_loses_no_answer_and_no_feedback(open_served):
    served = open_served()
    session = served.begin("a")
    answered(session)
    done = judged(served)
    again = open_served(ended={done: "", "late": "without_feedback"})
    [mine] = again.sessions
    assert mine.name == session.name and again.judged[0].name == done
    assert refusal(again, done)[1] == "feedback_already_given"
    assert refusal(again, "late")[:2] == (410, "session_ended")
    position, count = mine.continued("", [*HELLO, {"role": "assistant", "content": "hi"}, HELLO[0]])
    assert count == 2 and position.digest == call().digest
    assert mine.sequences()[0].logprobs.dtype == np.float32
    again.give(mine.name, Feedback(reward=0.5))
    assert sorted(names(again.take(8, 0))) == sorted([[session.name], [done]])


def test_a_step_that_was_not_stored_is_given_back(open_served):
    served = open_served()
    first = judged(served)
    served.take(8, 0)
    served.resume(())
    assert names(served.take(8, 0)) == [[first]]


def test_what_the_last_step_stored_is_not_taken_again(open_served):
    first = judged(open_served())
    served = open_served()
    second = judged(served)
    served.resume([first])
    assert names(served.take(8, 0)) == [[second]]
    served.resume(())
    assert [session.name for session in open_served().judged] == [second]


def test_tokens_of_weights_that_are_gone_are_dropped(open_served):
    served = open_served()
    old, new = judged(served, version=3), judged(served, version=1)
    groups = served.take(8, 2)
    assert {group.sessions[0].name: group.dropped for group in groups} == {old: "weights_taken_back", new: ""}


def test_weights_with_the_number_of_others_are_told_apart(open_served):
    served = open_served()
    gone, kept = judged(served, version=6), judged(served, version=5)
    mine, asking = served.begin(), served.begin()
    answered(mine, call(version=6))
    answered(asking, call(version=5))
    request = asking.begin()
    served.take_back(5)  # and the trainer makes another version 6, and a 7
    request.close()
    served = open_served()  # whatever is started again meanwhile
    for name in (mine.name, asking.name):
        served.give(name, Feedback(reward=1.0))
    after = judged(served, version=6)
    dropped = {group.sessions[0].name: group.dropped for group in served.take(8, 7)}
    taken_back = dict.fromkeys((gone, mine.name, asking.name), "weights_taken_back")
    assert dropped == taken_back | {kept: "", after: ""}


def test_a_line_that_was_cut_off_is_left_out(open_served, tmp_path):
    served = open_served()
    session = served.begin()
    answered(session, call(), call(tokens=(5,)))
    [path] = (tmp_path / "journal").iterdir()
    assert path.stat().st_mode & 0o777 == 0o600
    path.write_bytes(path.read_bytes()[:-5])
    [mine] = open_served().sessions
    assert mine.sampled_tokens == 2
    answered(mine, call(tokens=(6,)))
    assert open_served().sessions[0].sampled_tokens == 3


# ---- routes ----


def no_answer() -> FastAPI:
    """Replaces vLLM's application: each chat completion gets two tokens; a completion gets none."""
    app = FastAPI()

    @app.post("/v1/chat/completions")
    async def chat():
        exchange = EXCHANGE.get()
        exchange.messages, exchange.calls = HELLO, {("r", 0): call()}
        exchange.keep({0: [{"role": "assistant", "content": "hi"}]})
        return "answered"

    @app.post("/v1/completions")
    async def nothing(): ...

    return app


@pytest.fixture
def ask(open_served):
    served = open_served()
    auth = SessionAuth("key", "session")
    app = application(no_answer(), auth, served, {}, auth.close)

    def ask(method, path, value=None, key="key", headers=None):
        async def main():
            async with httpx.AsyncClient(transport=httpx.ASGITransport(app), base_url="http://here:1") as client:
                body = {"content": value} if isinstance(value, bytes) else {} if value is None else {"json": value}
                return await client.request(
                    method, path, headers={"authorization": f"Bearer {key}", **(headers or {})}, **body
                )

        return asyncio.run(main())

    ask.served_sessions = served
    return ask


def test_a_session_is_opened_asked_and_judged(ask):
    opened = ask("POST", "/sessions", {"task": "a"}).json()
    assert opened["base_url"] == f"http://here:1/sessions/{opened['session_id']}/v1"
    path = f"/sessions/{opened['session_id']}/v1/chat/completions"
    assert ask("POST", path).json() == "answered"
    verdict = {"session_id": opened["session_id"], "reward": 1}
    assert [ask("POST", "/feedback", verdict).status_code for _ in range(2)] == [200, 409]
    assert ask("POST", path).json()["error"]["code"] == "session_ended"


@pytest.mark.parametrize("body", [None, b"", b" \r\n"])
def test_a_session_needs_no_body(ask, body):
    assert ask("POST", "/sessions", body).status_code == 200


def test_a_plain_client_gets_a_session_for_each_request(ask):
    answer = ask("POST", "/v1/chat/completions")
    name = answer.headers["x-trinity-session"]
    assert answer.json() == "answered"
    assert ask("POST", "/v1/chat/completions", headers={"x-trinity-session": name}).headers["x-trinity-session"] == name
    assert ask("POST", "/feedback", {"session_id": name, "reward": 0}).json()["sampled_tokens"] == 4
    assert ask("POST", "/v1/chat/completions", headers={"x-trinity-session": "unknown"}).status_code == 404


def test_a_request_that_samples_nothing_leaves_no_session(ask):
    assert ask("POST", "/v1/completions").status_code == 200
    assert ask.served_sessions.counts == (0, 0, 0) and not ask.served_sessions._journal.read()


def test_nothing_is_served_without_the_key(ask):
    for path in ("/sessions", "/feedback", "/v1/chat/completions", "/v1/models", "/unknown"):
        assert ask("POST", path, {}, key="other").status_code == 401
    assert ask.served_sessions.counts == (0, 0, 0)


JUDGED = {"session_id": "s", "reward": 1}


@pytest.mark.parametrize(
    ("method", "path", "value", "status", "code", "param"),
    [
        ("GET", "/feedback", None, 405, "method_not_allowed", None),
        ("POST", "/unknown", {}, 404, "not_found", None),
        ("POST", "/sessions/", {}, 404, "not_found", None),
        ("POST", "/v1/chat/completions/", {}, 404, "not_found", None),
        ("POST", "/sessions", b"\xff", 400, "invalid_json", None),
        ("POST", "/sessions", b'{"task": ' + b"1" * 5_000 + b"}", 400, "invalid_json", None),
        ("POST", "/feedback", b" ", 400, "missing_required_parameter", None),
        ("POST", "/feedback", b"{", 400, "invalid_json", None),
        ("POST", "/feedback", [], 400, "invalid_value", None),
        ("POST", "/sessions", {"tusk": 1}, 400, "unknown_parameter", "tusk"),
        ("POST", "/sessions", {"task": 1}, 400, "invalid_value", "task"),
        ("POST", "/feedback", {"reward": 1}, 400, "missing_required_parameter", "session_id"),
        ("POST", "/feedback", {"session_id": "s"}, 400, "missing_required_parameter", "reward"),
        *(
            ("POST", "/feedback", JUDGED | {"reward": wrong}, 400, "invalid_value", "reward")
            for wrong in ("1", True, None, 10**400, -1e7)
        ),
        ("POST", "/feedback", b'{"session_id": "s", "reward": NaN}', 400, "invalid_value", "reward"),
        ("POST", "/feedback", JUDGED | {"metrics": {"a": "b"}}, 400, "invalid_value", "metrics.a"),
        ("POST", "/feedback", JUDGED | {"metrics": []}, 400, "invalid_value", "metrics"),
        *(
            ("POST", "/feedback", JUDGED | {"metrics": {name: 1}}, 400, "invalid_value", "metrics")
            for name in ("", "a//b", "../a", "a" * 101, "a\n", "\ud800", "<b>")
        ),
        *(
            ("POST", "/feedback", JUDGED | {"comment": comment}, 400, "invalid_value", "comment")
            for comment in (1, "c" * 10_001, "\ud83d")
        ),
        ("POST", "/feedback", JUDGED | {"rewards": 2}, 400, "unknown_parameter", "rewards"),
        ("POST", "/feedback", JUDGED, 404, "session_not_found", "session_id"),
    ],
)
def test_requests_that_make_no_sense_are_refused(ask, method, path, value, status, code, param):
    response = ask(method, path, value if isinstance(value, bytes | None) else json.dumps(value).encode())
    error = response.json()["error"]
    assert (response.status_code, error["code"], error["param"]) == (status, code, param)
