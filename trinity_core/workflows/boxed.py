"""`math_boxed_workflow`: problems whose answer stands in a box."""

from __future__ import annotations

from dataclasses import replace

from trinity_core.data.formats import Message
from trinity_core.signatures import Arguments
from trinity_core.workflows.base import WORKFLOWS, SimpleWorkflow
from trinity_core.workflows.rewards import RewardItem
from trinity_core.workflows.rollout_model import Completion

BOX_PROMPT = "Please reason step by step, and put your final answer within \\boxed{}."
THINK_PROMPT = (
    "Solve the problem. First write down your reasoning as <think> … </think>, then give the final answer in closed "
    "form within \\boxed{}."
)
BASE_TEMPLATE = (
    "{% for message in messages %}"
    "{% if message.role == 'system' %}System:{{ message.content }}\n"
    "{% elif message.role == 'user' %}User:\n{{ message.content }}\n"
    "{% else %}Assistant:\n{{ message.content }}\n{% endif %}"
    "{% endfor %}Assistant:\n"
)
"""The prompt of a base model, which knows no chat template."""


class BoxedArguments(Arguments):
    """`workflow_args` of `math_boxed_workflow`."""

    use_base: bool = False
    """The policy is a base model: it is asked in plain text."""
    with_think: bool = False
    """Ask for a `<think>` part, and take `format_score_coef` from a response without one."""
    format_score_coef: float = 0.1


@WORKFLOWS.register("math_boxed_workflow")
class MathBoxedWorkflow(SimpleWorkflow):
    """A problem whose answer is asked for, and looked for, in a box: `math_boxed_reward` unless another is named."""

    arguments = BoxedArguments
    default_reward = "math_boxed_reward"

    @property
    def messages(self) -> list[Message]:
        """The task's, after a system prompt of our own if it has none."""
        given = self.task.messages
        if any(message["role"] == "system" for message in given):
            return given
        return [{"role": "system", "content": THINK_PROMPT if self._given.with_think else BOX_PROMPT}, *given]

    @property
    def chat_template(self) -> str | None:
        """That of a base model is plain text."""
        own = self.task.format.chat_template
        return BASE_TEMPLATE if self._given.use_base and own is None else own

    def reward_item(self, completion: Completion) -> RewardItem:
        """The workflow's own reward function knows of `with_think`."""
        item = super().reward_item(completion)
        if self.reward_name != self.default_reward:
            return item
        known = {"with_think": self._given.with_think, "format_score_coef": self._given.format_score_coef}
        return replace(item, args={**known, **item.args})

    @property
    def _given(self) -> BoxedArguments:
        return BoxedArguments.model_validate(self.task.workflow_args)
