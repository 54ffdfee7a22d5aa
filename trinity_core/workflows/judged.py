"""Workflows whose answers are judged by models: a reward model, a judge with a rubric, a judge of whole groups."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from trinity_core.data.experience import Experience
from trinity_core.signatures import Arguments, arguments_model
from trinity_core.workflows.base import WORKFLOWS, SimpleWorkflow
from trinity_core.workflows.rewards import Reward, RewardItem
from trinity_core.workflows.rewards.base import INPUTS, VERIFIER_ERRORS
from trinity_core.workflows.rewards.judge import llm_judge
from trinity_core.workflows.rollout_model import Completion


@WORKFLOWS.register("math_rm_workflow")
class MathRewardModelWorkflow(SimpleWorkflow):
    """A problem whose answers a reward model scores: `reward_model` if the task set names no reward function."""

    arguments = Arguments
    default_reward = "reward_model"


@WORKFLOWS.register("rubric_judge_workflow")
class RubricJudgeWorkflow(SimpleWorkflow):
    """Answers that a judge rates by the row's rubric: `llm_judge` if the task set names no reward function.

    As in "Rubrics as Rewards" (Gunjal et al., arXiv 2507.17746), with one rating for all criteria.
    """

    arguments = Arguments
    default_reward = "llm_judge"


@WORKFLOWS.register("math_ruler_workflow")
class MathRulerWorkflow(SimpleWorkflow):
    """Answers that a judge scores beside each other (RULER). The task's reward function, by default `math_reward`, is
    measured beside it: the metric `gold_reward`."""

    arguments = arguments_model("RulerArguments", [llm_judge], INPUTS)
    asks_models = True
    default_reward = "math_reward"

    async def run(self) -> list[Experience]:
        """`repeat_times` experiences with the judge's rewards."""
        completions = await self.answers()
        gold = await self.rewards.score(self.reward_name, [self.reward_item(one) for one in completions])
        judged = await self.rewards.score("llm_judge", [self._shown(one) for one in completions])
        return [
            self.experience(completion, _measured(reward, known), run)
            for run, (completion, reward, known) in enumerate(zip(completions, judged, gold, strict=True))
        ]

    def _shown(self, completion: Completion) -> RewardItem:
        given: dict[str, Any] = {"mode": "group", **self.task.workflow_args}
        return replace(self.reward_item(completion), args=given)


def _measured(reward: Reward, gold: Reward) -> Reward:
    """A reward, with another one among its metrics. That the other could not be had is no error of this one."""
    known = {} if gold.value is None else {"gold_reward": gold.value, **(gold.parts or {})}
    return replace(reward, counts={**reward.counts, **known, f"gold_{VERIFIER_ERRORS}": float(gold.error is not None)})
