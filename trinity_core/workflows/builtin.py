"""The built-in workflows with one answer: plain, boxed, and judged by models."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any, ClassVar

from trinity_core.base.signatures import Arguments, arguments_model
from trinity_core.data.experience import Experience
from trinity_core.workflows.base import WORKFLOWS, SimpleWorkflow, all_of
from trinity_core.workflows.rewards import Reward, RewardItem
from trinity_core.workflows.rewards.base import VERIFIER_ERRORS
from trinity_core.workflows.rewards.functions import INPUTS
from trinity_core.workflows.rewards.judge import llm_judge
from trinity_core.workflows.rollout_model import Completion

THINK_PROMPT = (
    "A conversation between User and Assistant. The user asks a question, and the Assistant solves it. The assistant "
    "first thinks about the reasoning process in the mind and then provides the user with the answer. The reasoning "
    "process and answer are enclosed within <think> </think> and <answer> </answer> tags, respectively, i.e.,\n"
    "<think> reasoning process here </think>\n<answer> answer here </answer>.\n"
)
"""DeepSeek-R1's (arXiv 2501.12948, table 1), as in Trinity-RFT's `math_workflow`."""
THINK_SCORE = 0.1
"""Score of Trinity-RFT's `math_reward` for that form; its negative without the form."""


@WORKFLOWS.register("simple_workflow")
class SimpleChatWorkflow(SimpleWorkflow):
    """One question, one answer, scored by the task set's `default_reward_fn_type`."""

    arguments = Arguments


class MathArguments(Arguments):
    """`workflow_args` of `math_workflow`."""

    with_think: bool = False
    """Request `<think>` and `<answer>` in a system prompt if the task has none, and score that form, like Trinity-RFT's
    workflow of this name, unless another reward function is set."""


@WORKFLOWS.register("async_math_workflow")
@WORKFLOWS.register("math_workflow")
class MathWorkflow(SimpleWorkflow):
    """A problem with a checkable answer: `math_reward` if the task set names no reward function."""

    arguments = MathArguments
    default_reward = "math_reward"

    @classmethod
    def own_system_prompt(cls, workflow_args: Mapping[str, Any]) -> str | None:
        return THINK_PROMPT if MathArguments.model_validate(workflow_args).with_think else None

    def reward_item(self, completion: Completion) -> RewardItem:
        """With `with_think`, the workflow's own reward function also scores the form."""
        item = super().reward_item(completion)
        thinks = MathArguments.model_validate(self.task.workflow_args).with_think
        if not thinks or self.reward_name != self.default_reward:
            return item
        return replace(item, args={"think_score": THINK_SCORE, **item.args})


BOX_PROMPT = "Please reason step by step, and put your final answer within \\boxed{}."
BOX_THINK_PROMPT = (
    "Solve the problem. First write down your reasoning as <think> … </think>, then give the final answer in closed "
    "form within \\boxed{}."
)
BASE_TEMPLATE = (
    "{{ written_bos }}{% for message in messages %}"
    "{% if message.role == 'system' %}System:{{ message.content }}\n"
    "{% elif message.role == 'user' %}User:\n{{ message.content }}\n"
    "{% else %}Assistant:\n{{ message.content }}\n{% endif %}"
    "{% endfor %}Assistant:{{ '\\n' }}"  # Jinja drops a newline that ends a template
)
"""The prompt of a base model without a chat template: its own tokenizer's tokens of this text."""


class BoxedArguments(Arguments):
    """`workflow_args` of `math_boxed_workflow`."""

    use_base: bool = False
    """The policy is a base model and gets a plain-text prompt."""
    with_think: bool = False
    """Request a `<think>` part, and subtract `format_score_coef` from a response without one."""
    format_score_coef: float = 0.1


@WORKFLOWS.register("math_boxed_workflow")
class MathBoxedWorkflow(SimpleWorkflow):
    """A problem whose answer is expected in a box: `math_boxed_reward` unless another is named."""

    arguments: ClassVar[type[BoxedArguments]] = BoxedArguments
    default_reward = "math_boxed_reward"

    @classmethod
    def own_system_prompt(cls, workflow_args: Mapping[str, Any]) -> str | None:
        return BOX_THINK_PROMPT if cls.arguments.model_validate(workflow_args).with_think else BOX_PROMPT

    @property
    def chat_template(self) -> str | None:
        template = self.task.format.chat_template
        return BASE_TEMPLATE if self._arguments.use_base and template is None else template

    def reward_item(self, completion: Completion) -> RewardItem:
        """Pass `with_think` to the workflow's own reward function."""
        item = super().reward_item(completion)
        if self.reward_name != self.default_reward:
            return item
        defaults = {"with_think": self._arguments.with_think, "format_score_coef": self._arguments.format_score_coef}
        return replace(item, args={**defaults, **item.args})

    @property
    def _arguments(self) -> BoxedArguments:
        return self.arguments.model_validate(self.task.workflow_args)


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
    """Answers that a judge scores together (RULER). The task's reward function, by default `math_reward`, is only
    measured, as the metric `gold_reward`."""

    arguments = arguments_model("RulerArguments", [llm_judge], INPUTS)
    asks_models = True
    default_reward = "math_reward"

    async def run(self) -> list[Experience]:
        """Return `repeat_times` experiences with the judge's rewards."""
        completions = await self.answers()
        gold = await self.rewards.score(self.reward_name, [self.reward_item(answer) for answer in completions])
        judged = await self.rewards.score("llm_judge", [self._judge_item(answer) for answer in completions])
        return [
            self.experience(completion, _with_gold(reward, gold_reward), run)
            for run, (completion, reward, gold_reward) in enumerate(zip(completions, judged, gold, strict=True))
        ]

    def _judge_item(self, completion: Completion) -> RewardItem:
        return replace(self.reward_item(completion), args={"mode": "group", **self.task.workflow_args})


def _with_gold(reward: Reward, gold: Reward) -> Reward:
    """Add another reward to the metrics of a reward. An error of the other reward does not affect this one."""
    parts = {} if gold.value is None else {"gold_reward": gold.value, **(gold.parts or {})}
    return replace(reward, counts={**reward.counts, **parts, f"gold_{VERIFIER_ERRORS}": float(gold.error is not None)})


@WORKFLOWS.register("greedy_baseline_workflow")
class GreedyBaselineWorkflow(MathWorkflow):
    """For the algorithm `remax`: one more answer, at temperature 0, whose reward is the metric `greedy_reward` of the
    rollouts. It is not trained on."""

    async def run(self) -> list[Experience]:
        task = self.task
        greedy = self.model.chat(
            self.messages, tools=task.tools, chat_template=self.chat_template, **task.sampling | {"temperature": 0.0}
        )
        completions, [baseline] = await all_of([self.answers(), greedy])
        items = [self.reward_item(completion) for completion in (*completions, baseline)]
        *rewards, of_greedy = await self.rewards.score(self.reward_name, items)
        if of_greedy.value is None:
            rewards = [Reward(error=f"the greedy answer was not judged: {of_greedy.error}")] * len(completions)
        counts = {} if of_greedy.value is None else {"greedy_reward": of_greedy.value}
        return [
            self.experience(completion, replace(reward, counts={**reward.counts, **counts}), run)
            for run, (completion, reward) in enumerate(zip(completions, rewards, strict=True))
        ]
