"""Rewards that need models, with scripted judges; `tests/rollout/test_rollout_judges.py` has real ones."""

import asyncio
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace

import numpy as np
import pytest
from raising import raising
from workflow_helpers import ScriptedModel, completion, make_task

from trinity_core.base.errors import DataError, TrinityError, Unanswered
from trinity_core.workflows import RewardItem, run_workflow
from trinity_core.workflows.rewards.judge import rubric_text
from trinity_core.workflows.rewards.models import ModelRewards
from trinity_core.workflows.rewards.pool import RewardPool


class ScriptedJudge:
    """Answers with a function of the last message."""

    def __init__(self, says):
        self.says, self.asked = says, []

    async def chat(self, messages, n=1, **sampling):
        self.asked.append((messages, sampling))
        said = self.says(messages[-1]["content"])
        if isinstance(said, Exception):
            raise said
        return [completion(said)]


class ScriptedModels:
    """One judge under every name, and a reward model that scores by the length of the conversation's text."""

    def __init__(self, says):
        self.scripted = ScriptedJudge(says)

    def judge(self, name):
        if name == "other":
            raise TrinityError("no model is called 'other'")
        return self.scripted

    def endpoint(self, settings):
        return self.scripted

    async def rated(self, name, conversations):
        texts = ["".join(message["content"] for message in one) for one in conversations]
        return ["too long" if len(text) > 50 else float(len(text)) for text in texts]


def scored(name, items, says=str, models=None):
    async def main():
        rewards = ModelRewards(RewardPool(1), models or ScriptedModels(says))
        with ThreadPoolExecutor(1) as threads:
            rewarded = await asyncio.get_running_loop().run_in_executor(threads, rewards.score_sync, name, items)
        assert rewarded == await rewards.score(name, items)
        return rewarded

    return asyncio.run(main())


def item(response, prompt="Why?", **args):
    return RewardItem(response, "because", prompt, {"rubric": [{"description": "It is short.", "weight": 2}]}, args)


def rated(says):
    [reward] = scored("llm_judge", [item("So.")], lambda _: says)
    return reward


@pytest.mark.parametrize(
    "says, value",
    [
        ('{"rating": 10}', 1.0),
        ('It is fine.\n```json\n{"rating": 1}\n```', 0.0),
        ('{"rating": 2} on second thought {"rating": 5.5} {"other": 1}', 0.5),
    ],
)
def test_a_rating_becomes_a_reward_from_0_to_1(says, value):
    assert rated(says).parts == {"judge": value}


@pytest.mark.parametrize(
    "says",
    [
        "",
        "Great! 10/10",
        '{"rating": 11}',
        '{"rating": 0}',
        '{"rating": "7"}',
        '{"rating": true}',
        '{"rating": NaN}',
        '{"rating": 7',
        '{"rating": 1' + "0" * 400 + "}",
        '{"scores": ' + "[" * 100_000,
        '{"rating": ' + "[" * 100_000 + "}",
        Unanswered("HTTP 500"),
        DataError("a prompt has more than 9 tokens"),
    ],
    ids=lambda says: str(says)[:20],
)
def test_a_judge_that_answers_nonsense_is_an_error(says):
    reward = rated(says)
    assert reward.value is None and reward.error


def test_a_judge_sees_prompt_answer_and_rubric():
    models = ScriptedModels(lambda _: '{"rating": 4}')
    told = RewardItem(
        "So.", "because", messages=[{"role": "user", "content": "Why not?"}], args={"with_reference": True}
    )
    scored("llm_judge", [item("So.", rubric="Be kind."), told], models=models)
    first, second = (messages[-1]["content"] for messages, _ in models.scripted.asked[:2])
    assert (
        all(part in first for part in ("Why?", "So.", "Be kind.")) and "short" not in first and "because" not in first
    )
    assert "Why not?" in second and "because" in second and "Be kind." not in second
    assert models.scripted.asked[0][1]["temperature"] == 0.0


@pytest.mark.parametrize(
    "rubric, text",
    [
        (None, ""),
        ("a", "a"),
        (["a", "b"], "1. a\n2. b"),
        ([{"description": "a", "weight": 3}, {"description": "b"}], "1. a (weight 3)\n2. b"),
        ({"description": "a", "weight": 3}, "1. a (weight 3)"),
    ],
)
def test_rubrics_as_text(rubric, text):
    assert rubric_text(rubric) == text


def test_a_reference_that_is_missing_is_not_shown():
    with raising(DataError, key="format.response_key"):
        scored("llm_judge", [RewardItem("So.", args={"with_reference": True})], lambda _: '{"rating": 4}')


def test_a_group_is_scored_together_by_question():
    def says(text):
        return '{"scores": [0.2, 1]}' if text.count("<response ") == 2 else '{"scores": [0.5]}'

    items = [item("a", mode="group"), item("b", "What?", mode="group"), item("c", mode="group")]
    assert [reward.value for reward in scored("llm_judge", items, says)] == [0.2, 0.5, 1.0]


@pytest.mark.parametrize("says", ['{"scores": [1]}', '{"scores": [0, 2]}', '{"scores": "high"}', "[1, 0]", ""])
def test_scores_that_do_not_fit_are_errors_of_all(says):
    rewards = scored("llm_judge", [item("a", mode="group"), item("b", mode="group")], lambda _: says)
    assert [reward.value for reward in rewards] == [None, None]


def test_pairs_are_compared_in_both_orders():
    def says(text):
        a, b = text.split("<response_a>\n")[1][0], text.split("<response_b>\n")[1][0]
        return f'{{"better": "{"A" if a > b else "B" if b > a else "tie"}"}}'

    rewards = scored("llm_judge", [item(text, mode="pairwise") for text in "aabc"], says)
    assert [reward.value for reward in rewards] == pytest.approx([1 / 6, 1 / 6, 2 / 3, 1.0])
    biased = scored("llm_judge", [item(text, mode="pairwise") for text in "ab"], lambda _: '{"better": "A"}')
    assert [reward.value for reward in biased] == [0.5, 0.5]


def test_comparisons_without_a_verdict_are_left_out():
    def says(text):
        return "I cannot." if "z" in text else '{"better": "a"}'

    rewards = scored("llm_judge", [item(text, mode="pairwise") for text in ("x", "y", "z")], says)
    assert [reward.value for reward in rewards] == [0.5, 0.5, None] and rewards[2].error
    [alone] = scored("llm_judge", [item("x", mode="pairwise")], says)
    assert alone.value is None and alone.error


def test_a_reward_model_scores_the_whole_conversation():
    items = [item("So."), item("So." * 30), item("So.", scale=2.0, offset=-1.0)]
    first, long, scaled = scored("reward_model", items)
    assert first.parts == {"reward_model": 7.0} and scaled.value == 13.0 and long.error == "too long"


def workflow(name, model, says=None, **fields):
    async def main():
        models = ScriptedModels(says)
        rows = await run_workflow(make_task(name, **fields), model, rewards=ModelRewards(RewardPool(1), models))
        return rows, models.scripted

    return asyncio.run(main())


def test_rubric_workflow_leaves_out_what_has_no_rating():
    def says(text):
        return '{"rating": 10}' if "good" in text else "hm"

    raw = {"question": "1+1?", "answer": "2", "rubric": ["The answer is good."]}
    rows, judge = workflow(
        "rubric_judge_workflow", ScriptedModel("good", "bad", "good"), lambda t: says(t[-30:]), raw=raw
    )
    assert [row.reward for row in rows] == [1.0, None, 1.0] and rows[1].is_unscored
    assert [row.metrics["verifier_errors"] for row in rows] == [0, 1, 0]
    assert "The answer is good." in judge.asked[0][0][-1]["content"]


def test_truncated_judge_answer_is_not_a_verdict():
    """It may have quoted a verdict."""

    class Cut(ScriptedModels):
        def judge(self, name):
            judge, whole = self.scripted, self.scripted.chat

            async def chat(messages, n=1, **sampling):
                return [replace(one, finish_reason="length") for one in await whole(messages, n, **sampling)]

            judge.chat = chat
            return judge

    [reward] = scored("llm_judge", [item("So.")], models=Cut(lambda _: 'It says {"rating": 10}, but'))
    assert reward.value is None and reward.error


def test_ruler_workflow_measures_the_known_verdict_beside(caplog):
    rows, _ = workflow(
        "math_ruler_workflow", ScriptedModel("#### 2", "#### 3", "2"), lambda _: '{"scores": [0.1, 0.9, 0]}'
    )
    assert [row.reward for row in rows] == [0.1, 0.9, 0.0]
    assert [row.metrics["gold_reward"] for row in rows] == [1.0, 0.0, 0.0]
    rows, _ = workflow("math_ruler_workflow", ScriptedModel("#### 2", "#### 3", "2"), lambda _: "nonsense")
    assert all(row.is_unscored and row.metrics["gold_reward"] in (0.0, 1.0) for row in rows)
    raw = {"question": "1+1?", "answer": "$$"}  # nothing to compare with: the metric is missing, and said to be
    rows, _ = workflow(
        "math_ruler_workflow",
        ScriptedModel("#### 2", "#### 3", "#### 4"),
        lambda _: '{"scores": [0.1, 0.9, 0]}',
        raw=raw,
    )
    assert [row.reward for row in rows] == [0.1, 0.9, 0.0] and {
        row.metrics["gold_verifier_errors"] for row in rows
    } == {1}
    assert not caplog.records


def test_distillation_needs_a_teacher():
    with raising(TrinityError, key="explorer.auxiliary_models"):
        workflow("on_policy_distill_math_workflow", ScriptedModel("\\boxed{2}"))


def test_a_teacher_without_a_number_teaches_nothing():
    class Names:
        def convert_ids_to_tokens(self, tokens):
            return tokens

    class Teaches(ScriptedModel):
        tokenizer = Names()

        async def logprobs(self, tokens):
            return np.array([-1.0] * (len(tokens) - 2) + [-np.inf if len(tokens) == 12 else -1.0])

    task = make_task("on_policy_distill_math_workflow", repeat_times=2)
    model = Teaches("\\boxed{2}", "\\boxed{2")
    good, bad = asyncio.run(run_workflow(task, model, [model], rewards=RewardPool(1)))
    assert not good.is_unscored and good.action_mask.all()
    assert bad.is_unscored and not bad.action_mask.any() and bad.info["verifier_error"]


def test_an_unreadable_rubric_ends_the_run():
    for rubric in ([{"weight": 1}], {"short": "yes"}, 5):
        with raising(TrinityError, key="rubric"):
            rubric_text(rubric)
