"""Workflows of several turns: what the built-in ones share, and `multi_turn_workflow`."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, ClassVar, Self

from pydantic import Field, model_validator

from trinity_core.data.experience import Experience
from trinity_core.data.formats import Message, Tool
from trinity_core.signatures import Arguments
from trinity_core.workflows.base import WORKFLOWS, SimpleWorkflow, all_of
from trinity_core.workflows.rewards import Reward
from trinity_core.workflows.rollout_model import Completion
from trinity_core.workflows.trajectory import Trajectory


class ConversationArguments(Arguments):
    """`workflow_args` of every workflow of several turns."""

    max_turns: int = Field(8, ge=1)
    """Turns of the policy."""
    step_wise: bool = False
    """One experience for each turn in place of one for all of them."""
    discount: float | None = Field(None, ge=0, le=1)
    """With `step_wise`: each turn gets the rewards after it too, discounted by this per turn; null: its own alone, or
    that of the last turn where it has none."""

    @model_validator(mode="after")
    def _discounted_by_turn(self) -> Self:
        if self.discount is not None and not self.step_wise:
            raise ValueError("discount has no effect without step_wise: true")
        return self


class ConversationWorkflow(SimpleWorkflow):
    """Each rollout is a conversation of its own. Subclass it and write `rollout`.

    All rollouts of a task run at once. If one of them raises, the others are ended too, and the task is tried again.
    """

    arguments: ClassVar[type[ConversationArguments]] = ConversationArguments

    async def run(self) -> list[Experience]:
        """The experiences of all `task.repeat_times` rollouts."""
        rollouts = await all_of([self.rollout(run) for run in range(self.task.repeat_times)])
        return [one for experiences in rollouts for one in experiences]

    async def rollout(self, run: int) -> list[Experience]:
        """One rollout, from its first turn to its experiences."""
        raise NotImplementedError(f"{type(self).__name__} has no rollout()")

    def trajectory(
        self, run: int, messages: Sequence[Message] | None = None, tools: Sequence[Tool] | None = None
    ) -> Trajectory:
        """A new conversation, by default about the task's prompt, sampled as the task says."""
        task = self.task
        return Trajectory(
            self.model,
            task.messages if messages is None else messages,
            tools=task.tools if tools is None else tools,
            seed=lambda turn: task.rollout_seed(run, turn),
            chat_template=task.format.chat_template,
            **task.sampling,
        )

    async def judged(self, answer: Completion) -> Reward:
        """The verdict of the task's reward function on an answer."""
        [reward] = await self.rewards.score(self.reward_name, [self.reward_item(answer)])
        return reward

    def experiences(
        self, trajectory: Trajectory, rewards: Sequence[Reward | float | None], run: int, metrics: dict[str, float]
    ) -> list[Experience]:
        """The experiences of a rollout, with the reward of each turn, by `step_wise` and `discount`.

        Without `step_wise` the reward is that of the last turn.
        """
        given = self.arguments.model_validate(self.task.workflow_args)
        fields: dict[str, Any] = {
            "run": run,
            "metrics": {"turns": float(trajectory.turns), **metrics},
            "info": {"truth": str(self.task.truth), "workflow": self.task.workflow},
        }
        if not given.step_wise:
            return [trajectory.experience(rewards[-1], **fields)]
        return trajectory.step_experiences(rewards, discount=given.discount, **fields)


class MultiTurnArguments(ConversationArguments):
    """`workflow_args` of `multi_turn_workflow`."""

    max_turns: int = Field(3, ge=1)
    """Attempts."""
    feedback: str = "That is not right. Try again."
    """What the policy is told after an attempt that is not good enough."""
    enough: float = 1.0
    """The reward with which an attempt is."""


@WORKFLOWS.register("multi_turn_workflow")
class MultiTurnWorkflow(ConversationWorkflow):
    """The policy answers, is told if its answer is wrong, and tries again; the last attempt's reward counts.

    `math_reward` if the task set names no reward function. A subclass may write `reply`, the user or environment.
    """

    arguments = MultiTurnArguments
    default_reward = "math_reward"

    async def reply(self, answer: Completion, reward: Reward, turn: int) -> list[Message]:
        """What is said to an answer; nothing ends the conversation. `turn`: from 0."""
        given = MultiTurnArguments.model_validate(self.task.workflow_args)
        if reward.value is None or reward.value >= given.enough:
            return []
        return [{"role": "user", "content": given.feedback}]

    async def rollout(self, run: int) -> list[Experience]:
        """Attempts until one is good enough, `max_turns` are made or the context is full."""
        most = self.arguments.model_validate(self.task.workflow_args).max_turns
        trajectory = self.trajectory(run)
        answer = await trajectory.act()
        reward = await self.judged(answer)
        while trajectory.turns < most and not trajectory.finished:
            replies = await self.reply(answer, reward, trajectory.turns - 1)
            if not replies:
                break
            trajectory.add(*replies)
            answer = await trajectory.act()
            if answer.finish_reason != "prompt_too_long":
                reward = await self.judged(answer)
        rewards = [*[None] * (trajectory.turns - 1), reward]
        return self.experiences(trajectory, rewards, run, {})
