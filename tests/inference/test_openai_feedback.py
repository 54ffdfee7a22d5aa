"""Sessions of mode `serve`: opened, judged, dropped, grouped and kept over restarts. Without an engine."""

from __future__ import annotations

import asyncio
import json
import resource
import signal

import numpy as np
import pytest

from trinity_core.data.turns import Call
from trinity_core.inference.openai_api.book import SessionBook
from trinity_core.inference.openai_api.feedback import Feedback, Refusal
from trinity_core.inference.openai_api.gate import Gate
from trinity_core.inference.openai_api.journal import Journal
from trinity_core.inference.openai_api.live import EXCHANGE, SessionTerms
from trinity_core.inference.openai_api.reception import Reception
from trinity_core.inference.requests import Sample

HELLO = [{"role": "user", "content": "hello"}]


class Clock:
    now = 1000.0

    def __call__(self):
        return self.now


@pytest.fixture
def clock():
    return Clock()


@pytest.fixture
def open_book(tmp_path, clock):
    return lambda **how: SessionBook(Journal(tmp_path / "journal"), SessionTerms(), 60.0, clock=clock, **how)


def call(prompt=(1, 2), tokens=(3, 4), version=0):
    count = len(tokens)
    versions = np.full(count, version, np.int32)
    return Call(np.array(prompt, np.int32), Sample(np.array(tokens, np.int32), np.full(count, -0.3), versions, "stop"))


def answered(session, *calls, messages=HELLO):
    """The session has served a request with this answer."""
    for one in calls or (call(),):
        exchange = session.begin()
        exchange.messages, exchange.calls = messages, {("r", 0): one}
        exchange.keep({0: {"role": "assistant", "content": "hi"}})
        exchange.close()


def test_a_full_disk_leaves_what_is_there_readable(tmp_path):
    """Part of a line is taken back, so that what is written once there is room again is a line of its own."""
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


def judged(book, reward=1.0, task="", **how):
    session = book.begin(task)
    answered(session, call(**how))
    book.give({"session_id": session.name, "reward": reward})
    return session.name


def names(groups):
    return [[mine.name for mine in group.sessions] for group in groups]


def refusal(book, **given):
    with pytest.raises(Refusal) as caught:
        book.give(given)
    return caught.value.status, caught.value.code, caught.value.param


def test_feedback_ends_a_session_and_is_taken_once(open_book):
    book = open_book()
    session = book.begin()
    answered(session)
    given = {"session_id": session.name, "reward": 1, "metrics": {"stars": 4}, "comment": "good"}
    assert book.give(given) is session and session.begin() is None
    [group] = book.take(8, 0)
    assert group.sessions[0].feedback == Feedback(1.0, {"stars": 4.0}, "good") and not group.dropped
    book.stored()
    assert book.take(8, 0) == [] and not list(open_book().judged)


def test_feedback_that_makes_no_sense_is_refused(open_book):
    book = open_book()
    session = book.begin()
    empty = book.begin()
    answered(session)
    mine = {"session_id": session.name}
    assert refusal(book, reward=1) == (400, "missing_required_parameter", "session_id")
    assert refusal(book, **mine) == (400, "missing_required_parameter", "reward")
    for wrong in (float("nan"), float("inf"), True, "1", None, 10**400, -1e7):
        assert refusal(book, **mine, reward=wrong) == (400, "invalid_value", "reward")
    assert refusal(book, **mine, reward=1, metrics={"a": "b"}) == (400, "invalid_value", "metrics.a")
    assert refusal(book, **mine, reward=1, metrics=[]) == (400, "invalid_value", "metrics")
    for untold in ("", "a//b", "../a", "a" * 101, "a\n", "\ud800", "<b>"):
        assert refusal(book, **mine, reward=1, metrics={untold: 1}) == (400, "invalid_value", "metrics")
    for comment in (3, "a" * 10_001, "half a character: \ud800"):
        assert refusal(book, **mine, reward=1, comment=comment) == (400, "invalid_value", "comment")
    assert refusal(book, **mine, reward=1, rewards=2) == (400, "unknown_parameter", "rewards")
    assert refusal(book, session_id="nobody", reward=1) == (404, "session_not_found", "session_id")
    assert refusal(book, session_id=empty.name, reward=1) == (409, "nothing_sampled", "session_id")
    book.give({**mine, "reward": 1})
    assert refusal(book, **mine, reward=1) == (409, "feedback_already_given", "session_id")


def test_sessions_without_feedback_are_dropped(open_book, clock):
    book = open_book()
    session, empty, busy = (book.begin() for _ in range(3))
    answered(session)
    request = busy.begin()
    clock.now += 59
    assert book.expire() == []
    clock.now += 2
    assert set(book.expire()) == {session, empty}
    assert refusal(book, session_id=session.name, reward=1)[:2] == (410, "session_ended")
    [group] = book.take(8, 0)
    assert names([group]) == [[session.name]] and group.dropped == "without_feedback"
    request.close()
    book.used(busy.name)
    assert book.expire() == []


def test_a_request_renews_the_time_of_its_session(open_book, clock):
    book = open_book()
    session = book.begin()
    answered(session)
    clock.now += 40
    book.used(session.name)
    clock.now += 40
    assert book.expire() == []


def test_sessions_of_one_task_are_a_group(open_book, clock):
    book = open_book(repeats=2)
    first, other = judged(book, task="a"), judged(book, task="b")
    assert book.complete()[0] == 0
    second, third = judged(book, task="a"), judged(book, task="a")
    assert names(book.take(8, 0)) == [[first, second]]
    book.stored()
    fourth = judged(book, task="b")
    clock.now += 100
    fifth = judged(book, task="c")
    book.expire()
    groups = book.take(8, 0)
    assert sorted(names(groups)) == sorted([[other, fourth], [third]])
    assert [group.dropped for group in groups if names([group]) == [[third]]] == ["without_group"]
    assert book.counts == (0, 1, 0) and fifth


def test_without_a_task_the_first_prompt_makes_the_group(open_book):
    book = open_book(repeats=2)
    one, two, three = (judged(book, prompt=prompt) for prompt in ((1, 2), (1, 3), (1, 2)))
    assert names(book.take(8, 0)) == [[one, three]] and two


def test_a_restart_loses_no_answer_and_no_feedback(open_book):
    book = open_book()
    session = book.begin("a")
    answered(session)
    done = judged(book)
    again = open_book(ended={done: "", "late": "without_feedback"})
    [mine] = again.sessions
    assert mine.name == session.name and again.judged[0].name == done
    assert refusal(again, session_id=done, reward=1)[1] == "feedback_already_given"
    assert refusal(again, session_id="late", reward=1)[:2] == (410, "session_ended")
    found, count = mine.continued("", [*HELLO, {"role": "assistant", "content": "hi"}, HELLO[0]])
    assert count == 2 and found.digest == call().digest
    assert mine.sequences()[0].logprobs.dtype == np.float32
    again.give({"session_id": mine.name, "reward": 0.5})
    assert sorted(names(again.take(8, 0))) == sorted([[session.name], [done]])


def test_a_step_that_was_not_stored_is_given_back(open_book):
    book = open_book()
    first = judged(book)
    book.take(8, 0)
    book.resume(())
    assert names(book.take(8, 0)) == [[first]]


def test_what_the_last_step_stored_is_not_taken_again(open_book):
    first = judged(open_book())
    book = open_book()
    second = judged(book)
    book.resume([first])
    assert names(book.take(8, 0)) == [[second]]
    book.resume(())
    assert [session.name for session in open_book().judged] == [second]


def test_tokens_of_weights_that_are_gone_are_dropped(open_book):
    book = open_book()
    old, new = judged(book, version=3), judged(book, version=1)
    groups = book.take(8, 2)
    assert {group.sessions[0].name: group.dropped for group in groups} == {old: "weights_taken_back", new: ""}


def test_weights_with_the_number_of_others_are_told_apart(open_book):
    book = open_book()
    gone, kept = judged(book, version=6), judged(book, version=5)
    mine, asking = book.begin(), book.begin()
    answered(mine, call(version=6))
    answered(asking, call(version=5))
    request = asking.begin()
    book.take_back(5)  # and the trainer makes another version 6, and a 7
    request.close()
    book = open_book()  # whatever is started again meanwhile
    for name in (mine.name, asking.name):
        book.give({"session_id": name, "reward": 1.0})
    after = judged(book, version=6)
    dropped = {group.sessions[0].name: group.dropped for group in book.take(8, 7)}
    taken_back = dict.fromkeys((gone, mine.name, asking.name), "weights_taken_back")
    assert dropped == taken_back | {kept: "", after: ""}


def test_a_line_that_was_cut_off_is_left_out(open_book, tmp_path):
    book = open_book()
    session = book.begin()
    answered(session, call(), call(tokens=(5,)))
    [path] = (tmp_path / "journal").iterdir()
    assert path.stat().st_mode & 0o777 == 0o600
    path.write_bytes(path.read_bytes()[:-5])
    [mine] = open_book().sessions
    assert mine.sampled_tokens == 2
    answered(mine, call(tokens=(6,)))
    assert open_book().sessions[0].sampled_tokens == 3


# ---- the doors ----


async def app(scope, receive, send):
    """Stands for vLLM's routes: each request is answered with two tokens, if it is in a session."""
    exchange = EXCHANGE.get()
    if exchange is not None and scope["path"].endswith("completions") and not scope.get("fails"):
        exchange.messages, exchange.calls = HELLO, {("r", 0): call()}
        exchange.keep({0: {"role": "assistant", "content": "hi"}})
    await send({"type": "http.response.start", "status": 200, "headers": []})
    await send({"type": "http.response.body", "body": scope["path"].encode()})


@pytest.fixture
def ask(open_book):
    book = open_book()
    gate = Gate(app, "key")
    reception = Reception(gate, book, gate.close)

    def ask(method, path, value=None, key="key", **more):
        sent, headers = [], {"authorization": f"Bearer {key}", "host": "here:1", **more.pop("headers", {})}
        body = value if isinstance(value, bytes) else b"" if value is None else json.dumps(value).encode()

        async def receive():
            return {"type": "http.request", "body": body}

        async def send(message):
            sent.append(message)

        scope = {
            "type": "http", "scheme": "http", "method": method, "path": path, "raw_path": path.encode(),
            "headers": [(name.encode(), text.encode()) for name, text in headers.items()], **more,
        }  # fmt: skip
        asyncio.run(reception(scope, receive, send))
        return sent[0]["status"], dict(sent[0]["headers"]), sent[1]["body"].decode()

    ask.book = book
    return ask


def test_a_session_is_opened_asked_and_judged(ask):
    status, _, body = ask("POST", "/sessions", {"task": "a"})
    given = json.loads(body)
    assert status == 200 and given["base_url"] == f"http://here:1/sessions/{given['session_id']}/v1"
    path = f"/sessions/{given['session_id']}/v1/chat/completions"
    assert ask("POST", path)[2] == "/v1/chat/completions"
    assert ask("POST", "/feedback", {"session_id": given["session_id"], "reward": 1})[0] == 200
    assert ask("POST", path)[0] == 410
    assert ask("POST", "/feedback", {"session_id": given["session_id"], "reward": 1})[0] == 409


def test_a_plain_client_gets_a_session_for_each_request(ask):
    status, headers, body = ask("POST", "/v1/chat/completions")
    name = headers[b"x-trinity-session"].decode()
    assert (status, body) == (200, "/v1/chat/completions")
    assert ask("POST", "/v1/chat/completions", headers={"x-trinity-session": name})[1][b"x-trinity-session"]
    assert json.loads(ask("POST", "/feedback", {"session_id": name, "reward": 0})[2])["sampled_tokens"] == 4
    assert ask("POST", "/v1/chat/completions", headers={"x-trinity-session": "unknown"})[0] == 404


def test_a_request_that_samples_nothing_leaves_no_session(ask):
    assert ask("POST", "/v1/chat/completions", fails=True)[0] == 200
    assert ask.book.counts == (0, 0, 0) and not ask.book._journal.read()


def test_nothing_is_served_without_the_key(ask):
    for path in ("/sessions", "/feedback", "/v1/chat/completions", "/v1/models"):
        assert ask("POST", path, {}, key="other")[0] == 401
    assert ask.book.counts == (0, 0, 0)


def test_requests_that_cannot_be_read_are_refused(ask):
    assert ask("GET", "/feedback")[0] == 405
    assert ask("POST", "/feedback", b"{")[0] == 400 and ask("POST", "/feedback", [])[0] == 400
    assert ask("POST", "/sessions", {"tusk": 1})[0] == 400 and ask("POST", "/sessions", {"task": 1})[0] == 400
    assert ask("POST", "/sessions", b" " * (1 << 21))[0] == 413
    assert ask("GET", "/v1/models")[2] == "/v1/models"
