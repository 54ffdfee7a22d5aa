"""With a broken verifier, every workflow's answer has no reward, no loss, and is counted."""

from __future__ import annotations

import itertools
import logging
import re
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np
import pytest
from chatting import END, Turns
from raising import raising
from workflow_helpers import ScriptedModel, make_task, run

from trinity_core.base.errors import TrinityError
from trinity_core.data.experience import Experience
from trinity_core.workflows import WORKFLOWS, Reward, RewardItem, RewardPool, Workflow

PLUGIN = """
import time
from trinity_core.workflows import REWARD_FNS

@REWARD_FNS.register("fragile")
def fragile(*, prompt, response, truth, task, **args):
    if response == "slow":
        time.sleep(60)
    if response == "raise":
        raise RuntimeError("no idea")
    return {"nan": float("nan"), "none": None}.get(response, {"accuracy": float(response == "right")})
"""
DOCS = Path(__file__).parents[2] / "docs" / "workflows.md"


@pytest.fixture(scope="module")
def pool(tmp_path_factory):
    folder = tmp_path_factory.mktemp("plugins")
    (folder / "fragile_rewards.py").write_text(PLUGIN)
    pool = RewardPool(workers=2, timeout=1.0, plugin_dir=str(folder))
    yield pool
    pool.close()


@pytest.fixture
def workflow(monkeypatch):
    """Register a class and run a task of it with these answers."""

    def use(cls, *texts, rewards=None, model=None, **fields):
        monkeypatch.setitem(WORKFLOWS, "mine", cls)
        task = make_task("mine", **{"repeat_times": len(texts), **fields})
        with ThreadPoolExecutor(1) as threads:
            return run(task, model or ScriptedModel(*texts), rewards, threads=threads)

    return use


class Failing:
    """A reward runner whose verifiers all fail, except for the answers with the numbers `judged`."""

    def __init__(self, judged=()):
        self.judged, self.numbers = judged, itertools.count()

    async def score(self, name, items):
        return self.score_sync(name, items)

    def score_sync(self, name, items):
        verdicts = [next(self.numbers) in self.judged for _ in items]
        return [Reward({"accuracy": 0.0}) if judged else Reward(error="too slow") for judged in verdicts]


class PassesTheReward(Workflow):
    async def run(self):
        answers = await self.model.chat(self.task.messages, n=self.task.repeat_times)
        rewards = await self.rewards.score("fragile", [RewardItem(answer.text) for answer in answers])
        return [answer.experience(reward=reward) for answer, reward in zip(answers, rewards, strict=True)]


class PassesItsValue(Workflow):
    async def run(self):
        answers = await self.model.chat(self.task.messages, n=self.task.repeat_times)
        rewards = await self.rewards.score("fragile", [RewardItem(answer.text) for answer in answers])
        return [
            answer.experience(reward=reward.value, run=run, metrics=reward.metrics)
            for run, (answer, reward) in enumerate(zip(answers, rewards, strict=True))
        ]


class TakesZeroForNothing(Workflow):
    def run(self):
        answers = self.model.chat_sync(self.task.messages, n=self.task.repeat_times)
        rewards = self.rewards.score_sync("fragile", [RewardItem(answer.text) for answer in answers])
        return [
            answer.experience(reward=reward.value or 0.0, metrics=reward.metrics)
            for answer, reward in zip(answers, rewards, strict=True)
        ]


def is_unscored(one: Experience) -> bool:
    return (
        one.reward is None
        and one.token_rewards is None
        and not one.action_mask.any()
        and one.metrics["verifier_errors"] == 1
        and "accuracy" not in one.metrics
    )


BROKEN = ("slow", "raise", "nan", "none")


@pytest.mark.parametrize("cls", [PassesTheReward, PassesItsValue, TakesZeroForNothing])
def test_verifier_failure_is_never_a_wrong_answer(cls, workflow, pool):
    experiences = workflow(cls, "right", *BROKEN, "wrong", rewards=pool)
    assert [one.reward for one in experiences] == [1.0, None, None, None, None, 0.0]
    assert [is_unscored(one) for one in experiences] == [False, True, True, True, True, False]
    assert experiences[0].action_mask.all() and experiences[-1].action_mask.all()


def turns(rewards):
    """A run with as many turns as `rewards`, the last one first in the list."""

    class Turns(Workflow):
        async def run(self):
            (answer,) = await self.model.chat(self.task.messages)
            made = [answer.experience(reward=reward, run=2, turn=turn) for turn, reward in enumerate(rewards)]
            return made[::-1]

    return Turns


def test_turn_without_reward_takes_that_of_the_last(workflow):
    experiences = workflow(turns([None, 0.25, Reward({"accuracy": 0.75})]), "a", repeat_times=1)
    assert [(one.turn, one.reward) for one in experiences] == [(2, 0.75), (1, 0.25), (0, 0.75)]
    assert all(one.action_mask.all() for one in experiences)


@pytest.mark.parametrize(
    ("rewards", "unscored"),
    [((None, 0.5, Reward(error="died")), [True] * 3), ((0.0, Reward(error="died"), 1.0), [False, True, False])],
)
def test_an_unscored_turn_excludes_itself_and_the_last_one_its_whole_run(rewards, unscored, workflow):
    experiences = workflow(turns(rewards), "a", repeat_times=1)
    assert [is_unscored(one) for one in experiences] == unscored


@pytest.mark.parametrize("given", ["token_rewards", "teacher_logprobs"])
def test_token_scores_count_as_a_judgement(given, workflow):
    class PerToken(Workflow):
        async def run(self):
            (answer,) = await self.model.chat(self.task.messages)
            return [answer.experience(**{given: np.ones(len(answer.tokens))})]

    (one,) = workflow(PerToken, "a")
    assert one.reward is None and one.action_mask.all()


def test_ignored_verifier_errors_are_logged(workflow, caplog):
    class Ignores(Workflow):
        async def run(self):
            (answer,) = await self.model.chat(self.task.messages)
            (reward,) = await self.rewards.score("fragile", [RewardItem(answer.text)])
            return [answer.experience(reward=reward.value or 0.0)]

    with caplog.at_level(logging.WARNING):
        workflow(Ignores, "a", rewards=Failing())
    assert any("'mine'" in message for message in caplog.messages)


def test_failed_reward_has_no_parts_to_add_up():
    reward = Reward(error="too slow")
    assert reward.parts is None and reward.value is None
    for given in ({}, {"parts": {"accuracy": 1.0}, "error": "both"}):
        with raising(TrinityError, key="error"):
            Reward(**given)


def test_accuracy_is_a_share():
    """Pass rates and selectors read it: with a score of -1, two right of four would give a pass rate of 0."""
    for accuracy in (-1.0, 1.5, 1.00001, float("nan")):
        with raising(TrinityError, key="accuracy"):
            Reward({"accuracy": accuracy, "format": 0.1})
    assert Reward({"accuracy": 1 / 3 * 3 + 2e-10, "format": 0.1}).parts == {"accuracy": 1.0, "format": 0.1}


@pytest.fixture
def example():
    """The workflow in the docs."""
    (code,) = re.findall(r"```python\n(.*?class TwoTurns.*?)```", DOCS.read_text(), re.DOTALL)
    names: dict = {}
    exec(code, names)
    WORKFLOWS.pop("two_turns")
    return names["TwoTurns"]


def test_docs_example_takes_two_turns(example, workflow):
    model = Turns("2", "#### 3")
    [one] = workflow(example, model=model, repeat_times=1)
    assert one.reward == 0.0 and one.action_mask.sum() == len("2>") + len("#### 3>")
    (first, _), (again, _) = model.asked
    assert again[: len(first) + 2] == [*first, ord("2"), END] and len(again) > len(first) + 2


def test_docs_example_excludes_unscored_runs(example, workflow):
    model = Turns("2", "2", "#### 2", "#### 3")
    experiences = workflow(example, model=model, repeat_times=2, rewards=Failing(judged=[1]))
    assert [is_unscored(one) for one in experiences] == [True, False]
    assert [one.reward for one in experiences] == [None, 0.0]
