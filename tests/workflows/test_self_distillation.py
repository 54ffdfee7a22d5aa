"""Who shows whom which demonstration, and the greedy answer as a baseline, with a scripted policy."""

from __future__ import annotations

import numpy as np
import pytest
from pydantic import ValidationError
from raising import raising
from workflow_helpers import ScriptedModel, completion, make_task, run

from trinity_core.base.errors import DataError
from trinity_core.workflows import Reward

RIGHT, WRONG = "#### 2", "#### 3"


class SelfTeacher(ScriptedModel):
    """A token's log-prob after a prompt is minus the prompt's number of tokens."""

    max_model_len = 400

    def prompt_tokens(self, messages, tools=None, *, chat_template=None):
        self.asked.append(messages)
        return self.tokenizer.encode(messages[-1]["content"])

    async def logprobs(self, tokens):
        self.scored = tokens
        return -np.arange(1.0, len(tokens))


def played(*texts, reward="math_reward", **workflow_args):
    model = SelfTeacher(*texts)
    task = make_task(
        "self_distill_workflow", reward_fn=reward, workflow_args={"hint": "{demonstration}?", **workflow_args},
        repeat_times=len(texts),
    )  # fmt: skip
    return run(task, model), [messages[-1]["content"] for messages in model.asked[1:]]


def test_the_rows_answer_is_shown_to_the_teacher():
    rows, shown = played(RIGHT, WRONG, reward=None)
    truth = "1+1=<<1+1=2>>2\n#### 2"
    assert shown == [f"{truth}?"] * 2
    first = -float(len(shown[0]))
    for row in rows:
        assert row.reward is None and row.teacher_logprobs[0] == first and row.action_mask.all()


def test_the_trainer_gets_the_teachers_prompt():
    rows, shown = played(RIGHT, WRONG, reward=None, teacher="trainer")
    for row in rows:
        assert row.teacher_prompt.tolist() == SelfTeacher().tokenizer.encode(shown[0]) and row.action_mask.all()
        assert row.teacher_logprobs is None
    [right, wrong] = played(RIGHT, WRONG, demonstration="group", teacher="trainer")[0]
    assert wrong.action_mask.all() and not right.action_mask.any() and not right.is_unscored
    [long] = played("a" * 400, reward=None, teacher="trainer")[0]
    assert long.is_unscored and "max_model_len" in long.info["verifier_error"]


def test_a_rollout_of_a_truncated_prompt_carries_no_loss_and_is_no_verifier_error():
    model = SelfTeacher(RIGHT, WRONG, reason="prompt_too_long")
    rows = run(make_task("self_distill_workflow", reward_fn="math_reward", repeat_times=2), model)
    assert len(model.asked) == 1, "the teacher is not asked"
    for row in rows:
        assert not row.action_mask.any() and row.info.keys().isdisjoint({"verifier_error"})
        assert row.metrics["accuracy_verifier_errors"] == 0 and "kl_divergence" not in row.metrics


def test_a_column_that_does_not_exist_is_named():
    with raising(DataError, key="workflow_args.demonstration_key"):
        played(RIGHT, reward=None, demonstration_key="solution")
    with pytest.raises(ValidationError):
        played(RIGHT, reward=None, hint="{question} {answer}")


def test_a_question_that_names_a_place_of_the_hint_is_text():
    model = SelfTeacher(RIGHT)
    hint = {"hint": "{question}|{demonstration}"}
    raw = {"question": "{demonstration}", "answer": "7"}
    run(make_task("self_distill_workflow", repeat_times=1, workflow_args=hint, raw=raw), model)
    assert model.asked[1][-1]["content"] == "{demonstration}|7"


def test_a_right_rollout_is_shown_to_the_others():
    rows, shown = played(WRONG, RIGHT, WRONG, demonstration="group")
    assert shown == [f"{RIGHT}?"] * 2
    assert [row.metrics["has_demonstration"] for row in rows] == [1, 0, 1]
    assert [bool(row.action_mask.any()) for row in rows] == [True, False, True]
    assert ["kl_divergence" in row.metrics for row in rows] == [True, False, True]
    assert [row.reward for row in rows] == [0, 1, 0] and not any(row.is_unscored for row in (rows[0], rows[2]))


@pytest.mark.parametrize("texts", [(RIGHT, RIGHT), (WRONG, WRONG), (RIGHT,)])
def test_equal_rollouts_show_each_other_nothing(texts):
    rows, shown = played(*texts, demonstration="group")
    assert shown == [] and not any(row.action_mask.any() for row in rows)


class Verdicts:
    def __init__(self, *values):
        self.values = values

    async def score(self, name, items):
        return [Reward(error="timed out") if value is None else Reward({"accuracy": value}) for value in self.values]


@pytest.mark.parametrize(
    ("verdicts", "taught"),
    [((0.0, 0.0, None), [0, 0, 0]), ((1.0, 0.0, None), [0, 1, 1]), ((None, 1.0, None), [0, 0, 0])],
)
def test_a_rollout_without_a_verdict_is_no_worse_than_a_judged_one(verdicts, taught):
    task = make_task(
        "self_distill_workflow", reward_fn="math_reward", workflow_args={"demonstration": "group"}, repeat_times=3
    )
    rows = run(task, SelfTeacher("a", "b", "c"), Verdicts(*verdicts))
    assert [row.metrics["has_demonstration"] for row in rows] == taught


class Greedy(ScriptedModel):
    """Right at temperature 0 alone."""

    async def chat(self, messages, n=1, tools=None, **args):
        self.asked.append((messages, n, tools, args))
        return [completion(RIGHT if args["temperature"] == 0 else text) for text in self.texts[:n]]


@pytest.mark.parametrize(("answer", "baseline"), [("#### 2", 1.0), ("#### 9", 0.0)])
def test_the_greedy_answers_reward_is_a_metric_of_all_rollouts(answer, baseline):
    model = Greedy(WRONG, RIGHT)
    rows = run(make_task("greedy_baseline_workflow", repeat_times=2, raw={"question": "1+1?", "answer": answer}), model)
    assert len(rows) == 2 and {row.metrics["greedy_reward"] for row in rows} == {baseline}
    assert [args["temperature"] for *_, args in model.asked] == [0.7, 0.0]


def test_without_a_verdict_on_the_greedy_answer_no_rollout_is_trained_on():
    rows = run(make_task("greedy_baseline_workflow", repeat_times=2), Greedy(WRONG, WRONG), Verdicts(1.0, 1.0, None))
    assert all(row.is_unscored and not row.action_mask.any() for row in rows)
