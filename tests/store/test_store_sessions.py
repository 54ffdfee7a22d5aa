"""The audit of sessions: each stored token with a loss was sampled, with its log-prob, once, and its session ended."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

from trinity_core.base.layout import JobLayout
from trinity_core.data.experience import Experience
from trinity_core.data.session_log import ANSWERS, SESSION, SessionLog, answer_digest, session_log_path
from trinity_core.exchange.store.audit import Audit
from trinity_core.exchange.store.ledger import DrawnTask
from trinity_core.exchange.store.store import ExperienceStore
from trinity_core.results.audit import audit_runs, audit_text


def experience(session="s", first=0, **changes) -> Experience:
    """Two answers of two tokens each, with a token of a tool between."""
    fields = {
        "tokens": np.arange(first, first + 8, dtype=np.int32),
        "prompt_length": 3,
        "action_mask": np.array([1, 1, 0, 1, 1], bool),
        "logprobs": np.array([-1, -2, 0, -3, -4], np.float32),
        "versions": np.array([0, 0, -1, 1, 1], np.int32),
        "reward": 1.0,
        "group": "g",
        "info": {SESSION: session, ANSWERS: [[3, 5], [6, 8]]},
    } | changes
    return Experience(**fields)


def answers(one: Experience) -> list[str]:
    places = [(start, end, slice(start - 3, end - 3)) for start, end in one.info[ANSWERS]]
    return [answer_digest(one.tokens[:end], start, one.logprobs[at], one.versions[at]) for start, end, at in places]


@pytest.fixture
def audited(server_url: str, tmp_path: Path) -> Callable[..., Audit]:
    """The audit of a run that stored these experiences and in which these sessions ended with these answers."""

    def audited(*rows: Experience, **ended: list[str]) -> Audit:
        layout = JobLayout(tmp_path / "project" / "run").create()
        url = server_url or f"sqlite:///{layout.buffer}/explorer_output.db"
        with ExperienceStore.open(url, str(layout.root)) as store:
            store.put("e", 1, {"step": 1}, list(rows), 1, drawn=[DrawnTask("g", "train/0", len(rows))])
        log = SessionLog(session_log_path(layout.buffer, "e"))
        for session, digests in ended.items():
            log.add(session, digests)
        [audit] = audit_runs(layout.root, url=server_url or None).values()
        return audit

    return audited


def test_sampled_tokens_are_accounted_for(audited):
    one, other = experience(), experience("t", first=20)
    audit = audited(one, other, s=answers(one), t=[*answers(other), "dropped"])
    assert audit.clean and audit.sampled_tokens == 8
    assert "sampled 8 tokens" in audit_text("run", audit)


def test_masked_tokens_need_no_proof(audited):
    audit = audited(experience(action_mask=np.zeros(5, bool), reward=None))
    assert audit.clean and audit.sampled_tokens == 0


def test_an_answer_in_two_experiences_is_noticed(audited):
    audit = audited(experience(), experience(), s=answers(experience()))
    assert not audit.clean and "has 2 answers that the session did not sample, or once only" in audit.problems[0]


@pytest.mark.parametrize(
    "changes",
    [
        {"logprobs": np.array([-1, -2, 0, -3, -4.0001], np.float32)},
        {"versions": np.array([0, 0, -1, 1, 0], np.int32)},
        {"tokens": np.array([0, 1, 2, 3, 4, 9, 6, 7], np.int32)},
    ],
)
def test_other_tokens_logprobs_or_versions_are_noticed(audited, changes):
    audit = audited(experience(**changes), s=answers(experience()))
    assert not audit.clean and "has 1 answers that the session did not sample" in audit.problems[0]


def test_a_loss_on_tokens_of_a_tool_is_noticed(audited):
    one = experience(action_mask=np.ones(5, bool))
    audit = audited(one, s=answers(one))
    assert not audit.clean and "has 1 tokens with a loss outside of answers" in audit.problems[0]


def test_a_session_that_has_not_ended_is_noticed(audited):
    audit = audited(experience())
    assert not audit.clean and "the session has not ended" in audit.problems[0]
