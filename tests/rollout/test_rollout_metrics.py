"""The metrics of a step, computed by hand."""

from __future__ import annotations

from itertools import count

import numpy as np
import pytest

from trinity_core.base.errors import Unanswered
from trinity_core.data.experience import Experience
from trinity_core.data.task import Task
from trinity_core.rollout.metrics import eval_numbers, scores_of, step_numbers, task_answers
from trinity_core.rollout.runner import OVER_ROLLOUT, Outcome

ROWS = count(100)


def experience(reward, length=2, prompt=3, **metrics) -> Experience:
    tokens = np.arange(prompt + length)
    return Experience(tokens, prompt, np.ones(length, bool), reward=reward, metrics=metrics)


def outcome(*experiences, error=None, retries=0, repeat_times=1, index=None) -> Outcome:
    index = next(ROWS) if index is None else index
    return Outcome(Task(index, {}, "set", "w", repeat_times), list(experiences), retries, error)


def test_rewards_lengths_parts_and_failures():
    numbers = step_numbers([
        outcome(experience(1.0, 2, accuracy=1.0), experience(0.0, 4, accuracy=0.0), retries=1),
        outcome(experience(1.0, 6), experience(None, 8, verifier_errors=1.0)),
        outcome(error=ValueError("no"), retries=2),
    ])  # fmt: skip
    assert (numbers["tasks"], numbers["failed_tasks"]) == (3, 1)
    assert numbers["retries"] == 3
    assert numbers["experiences"] == 4
    assert numbers["reward/mean"] == pytest.approx(2 / 3)
    assert (numbers["reward/min"], numbers["reward/max"]) == (0, 1)
    assert numbers["reward/zero_variance_groups"] == 0.0, "of the one group in which two were judged"
    assert numbers["response_length/mean"] == pytest.approx(5.0)
    assert numbers["response_length/max"] == 8
    assert numbers["accuracy/mean"] == pytest.approx(0.5)
    assert numbers["verifier_errors"] == 1


def test_truncated_prompt_is_not_a_sample():
    """An evaluation has no verdict on it: the model was not asked."""
    cut = [experience(0.0, accuracy=0.0), experience(0.0, accuracy=0.0)]
    for one in cut:
        one.action_mask[:] = False
        one.versions = np.full(one.response_length, -1)
    numbers = step_numbers([outcome(experience(1.0), experience(0.5)), outcome(*cut)])
    assert (numbers["reward/mean"], numbers["reward/zero_variance_groups"]) == (0.75, 0.0)
    scores = eval_numbers("set", [outcome(experience(1.0)), outcome(cut[0])])
    counted = [scores[f"eval/set/{name}"] for name in ("accuracy", "reward", "judged", "answers", "unsampled")]
    assert counted == [1, 1, 1, 2, 1]
    assert eval_numbers("set", [outcome(cut[0])]).keys().isdisjoint({"eval/set/accuracy", "eval/set/reward"})
    assert scores_of(outcome(cut[0])) == [] and task_answers([outcome(cut[0])])[0].scores == [None]


def test_a_rollout_of_several_experiences_counts_once():
    """Two rollouts, one of three experiences (the sequences of its session)."""
    rows = [experience(1.0, accuracy=1.0), experience(1.0, accuracy=1.0), experience(1.0, accuracy=1.0)]
    rows.append(experience(0.0, accuracy=0.0))
    for row, (run, turn) in zip(rows, [(0, 0), (0, 1), (0, 2), (1, 0)], strict=True):
        row.run, row.turn = run, turn
    numbers = step_numbers([outcome(*rows), outcome(*rows[:3])])
    assert (numbers["experiences"], numbers["reward/mean"]) == (7, pytest.approx(2 / 3))
    assert numbers["accuracy/mean"] == pytest.approx(2 / 3)
    assert (numbers["sequences_per_rollout/mean"], numbers["sequences_per_rollout/max"]) == (pytest.approx(7 / 3), 3)
    assert numbers["reward/zero_variance_groups"] == 0.0  # of groups of two rollouts or more
    assert eval_numbers("set", [outcome(*rows, repeat_times=2)])["eval/set/reward"] == 0.5


def test_a_part_of_the_reward_is_not_the_reward():
    """A reward function may name a part `reward`, a workflow a metric `response_length`."""
    one = experience(0.75, format=0.25, response_length=9.0)
    one.metrics["reward"] = 0.5
    numbers = step_numbers([outcome(one)])
    assert (numbers["reward/mean"], numbers["format/mean"], numbers["response_length/mean"]) == (0.75, 0.25, 2)


def test_failed_tasks_count_as_wrong_in_the_accuracy():
    numbers = eval_numbers("easy", [
        outcome(experience(1.1, accuracy=1.0)),
        outcome(experience(0.1, accuracy=0.0)),
        outcome(experience(None, verifier_errors=1.0)),
        outcome(error=ValueError("no")),
    ])  # fmt: skip
    assert numbers["eval/easy/accuracy"] == pytest.approx(1 / 3)
    assert numbers["eval/easy/reward"] == pytest.approx(0.6)
    assert numbers["eval/easy/failed_tasks"] == 1
    assert numbers["eval/easy/verifier_errors"] == 1
    assert "eval/easy/best" not in numbers


def test_curricula_see_failed_rollouts_as_wrong():
    """Otherwise a task with one survivor would look easy, and one that always fails unknown."""
    survivor, failed = outcome(experience(1.0), repeat_times=4), outcome(error=ValueError("no"), repeat_times=4)
    survivor.failed_runs = (1, 2, 3)
    assert (scores_of(survivor), scores_of(failed)) == ([1.0, 0.0, 0.0, 0.0], [0.0] * 4)
    unanswered = outcome(error=Unanswered("busy"), repeat_times=4)
    left = Outcome(survivor.task, dropped=OVER_ROLLOUT)
    unjudged = outcome(experience(None, verifier_errors=1.0))
    assert [scores_of(one) for one in (unanswered, left, unjudged)] == [[], [], []]


def test_all_answers_of_a_failed_task_are_missing():
    right = [experience(1.0)] * 4
    numbers = eval_numbers("set", [outcome(*right), outcome(error=ValueError("no"), repeat_times=4)])
    assert numbers["eval/set/accuracy"] == numbers["eval/set/best"] == pytest.approx(0.5)


def test_pass_at_k_deviation_and_interval_of_repeats():
    right, wrong = experience(1.0, accuracy=1.0), experience(0.0, accuracy=0.0)
    numbers = eval_numbers("set", [
        outcome(right, wrong, wrong, wrong, index=0),
        outcome(right, right, wrong, wrong, index=1),
    ])  # fmt: skip
    assert numbers["eval/set/pass@1"] == numbers["eval/set/accuracy"] == pytest.approx(3 / 8)
    assert numbers["eval/set/pass@2"] == pytest.approx((3 / 6 + 5 / 6) / 2)
    assert numbers["eval/set/pass@4"] == numbers["eval/set/best"] == 1.0
    assert numbers["eval/set/accuracy_std"] == pytest.approx(np.std([1.0, 0.5, 0.0, 0.0], ddof=1))
    assert 0 < numbers["eval/set/accuracy_low"] < 3 / 8 < numbers["eval/set/accuracy_high"] < 1
    assert (numbers["eval/set/answers"], numbers["eval/set/judged"]) == (8, 8)


def test_scores_other_than_right_or_wrong_have_a_best():
    numbers = eval_numbers("set", [outcome(experience(0.2), experience(0.6))])
    assert numbers["eval/set/best@2"] == pytest.approx(0.6)
    assert numbers["eval/set/best@1"] == pytest.approx(0.4)
    assert not [name for name in numbers if "pass@" in name]


def test_unanswered_requests_are_missing_and_not_wrong():
    down = Unanswered("no answer")
    numbers = eval_numbers("set", [
        outcome(experience(1.0), index=0), outcome(error=down, index=0),
        outcome(experience(1.0), index=1), outcome(experience(0.0), index=1),
    ])  # fmt: skip
    assert numbers["eval/set/accuracy"] == pytest.approx(2 / 3)
    assert (numbers["eval/set/judged"], numbers["eval/set/answers"]) == (3, 4)
    assert (numbers["eval/set/failed_requests"], numbers["eval/set/failed_tasks"]) == (1, 0)
    assert numbers["eval/set/tasks"] == 2
    assert numbers["eval/set/pass@2"] == 1.0, "over the task that has two verdicts"


@pytest.mark.parametrize("metrics", [{"verifier_errors": 1.0}, {}])
def test_without_a_verdict_there_is_no_accuracy(metrics):
    numbers = eval_numbers("set", [outcome(experience(None, **metrics))])
    assert (numbers["eval/set/judged"], numbers["eval/set/answers"]) == (0, 1)
    assert not {"eval/set/accuracy", "eval/set/reward", "eval/set/accuracy_low"} & numbers.keys()


def test_the_last_turn_of_a_run_is_its_answer():
    def turn(run, number, **metrics):
        one = experience(1.1, **metrics)
        one.run, one.turn = run, number
        return one

    numbers = eval_numbers("set", [outcome(turn(0, 0), turn(0, 1, accuracy=0.0), turn(1, 0), turn(1, 1, accuracy=1.0))])
    assert numbers["eval/set/accuracy"] == pytest.approx(0.5)
    assert numbers["eval/set/answers"] == 2


def test_token_rewards_and_turns_are_rewards():
    rows = []
    for run, total in enumerate((1.0, 1.0, 0.0, 1.0)):
        row = experience(None)
        row.token_rewards, row.run = np.array([0, total], np.float32), run
        rows.append(row)
    numbers = step_numbers([outcome(*rows)])
    assert (numbers["reward/mean"], numbers["reward/zero_variance_groups"]) == (0.75, 0.0)
    scores = eval_numbers("set", [outcome(*rows, repeat_times=4)])
    assert (scores["eval/set/accuracy"], scores["eval/set/judged"]) == (0.75, 4)
    unjudged, half = [experience(None) for _ in range(4)], [experience(reward) for reward in (1.0, None)]
    groups = [outcome(*rows), outcome(*unjudged), outcome(*half)]
    assert step_numbers(groups)["reward/zero_variance_groups"] == 0.0, "a group without verdicts says nothing"
    turns = [experience(reward) for reward in (0.5, 1.0, 0.5, 1.0)]
    for place, row in enumerate(turns):
        row.run, row.turn = divmod(place, 2)
    assert step_numbers([outcome(*turns)])["reward/zero_variance_groups"] == 1.0


def numbered(*runs):
    rows = [experience(1.0) for _ in runs]
    for row, run in zip(rows, runs, strict=True):
        row.run, row.info = run, {"response": str(run)}
    return rows


@pytest.mark.parametrize(
    ("runs", "failed", "answers"),
    [
        ((0, 2), (), ["0", "", "2", ""]),
        ((3, 1), (0,), ["", "1", "", "3"]),
        ((0, 0), (), ["0", "0", "", ""]),
        ((0, 0, 0), (1,), ["0", "", "0", "0"]),
        ((1, 2, 3, 4), (), ["1", "2", "3", "4"]),
        ((0, 0, 0, 0, 0), (), ["0"] * 5),
    ],
)
def test_rollouts_that_were_not_returned_count_as_wrong(runs, failed, answers):
    """Answers that have different numbers below `repeat_times` stand at these."""
    short = outcome(*numbered(*runs), repeat_times=4)
    short.failed_runs = failed
    [stored] = task_answers([short])
    assert (stored.answers, stored.scores) == (answers, [float(answer != "") for answer in answers])
    numbers = eval_numbers("set", [short])
    assert numbers["eval/set/accuracy"] == pytest.approx(len(runs) / len(answers))
    assert f"eval/set/pass@{len(answers)}" in numbers


def test_rollouts_in_groups_of_their_own_are_not_missing():
    own, further = numbered(0, 1)
    own.group, further.group = "g", "g/other"
    task = Task(0, {}, "set", "w", 2, group="g")
    assert task_answers([Outcome(task, [own, further])])[0].scores == [1.0]
    assert task_answers([Outcome(task, [further])])[0].scores == []


def test_answers_of_a_task_are_stored_together():
    """Two repeats that were separate tasks, one of which failed; another task that was judged."""
    told = experience(1.0)
    told.info.update(prompt="How many?", response="x" * 1000 + "#### 9")
    first, second = task_answers([
        outcome(told, index=3), outcome(error=ValueError("no"), index=3), outcome(experience(0.5), index=4),
    ])  # fmt: skip
    assert (first.task, first.scores, first.prompt) == (3, [1.0, 0.0], "How many?")
    assert first.answers[0].endswith("#### 9") and len(first.answers[0]) == 400
    assert first.answers[1:] == [""], "as many answers as scores"
    assert second.scores == [0.5]
    assert outcome(error=Unanswered("away"), index=5).failed
    assert task_answers([outcome(error=Unanswered("away"), index=5)])[0].scores == [None]
