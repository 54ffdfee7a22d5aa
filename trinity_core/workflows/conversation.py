"""Workflows with several turns: their common base, and `multi_turn_workflow`."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any, ClassVar, Self

from pydantic import Field, field_validator, model_validator

from trinity_core.base.errors import InputError
from trinity_core.base.signatures import Arguments
from trinity_core.data.experience import Experience
from trinity_core.data.formats import Message, Tool
from trinity_core.workflows.base import WORKFLOWS, SimpleWorkflow, all_rollouts, plain
from trinity_core.workflows.rewards import Reward, RewardItem
from trinity_core.workflows.rollout_model import Completion
from trinity_core.workflows.tools import TOOLS, Toolbox
from trinity_core.workflows.trajectory import Trajectory


class ConversationArguments(Arguments):
    """`workflow_args` of all workflows with several turns."""

    max_turns: int = Field(8, ge=1)
    """Limit of the policy's turns."""
    step_wise: bool = False
    """One experience for each turn instead of one for all."""
    discount: float | None = Field(None, ge=0, le=1)
    """With `step_wise`: each turn also gets the rewards after it, discounted by this per turn; null: only its own, or
    that of the last turn if it has none."""

    @model_validator(mode="after")
    def _discounted_by_turn(self) -> Self:
        if self.discount is not None and not self.step_wise:
            raise ValueError("discount has no effect without step_wise: true")
        return self


class ConversationWorkflow(SimpleWorkflow):
    """Each rollout is a separate conversation. Subclass it and write `rollout`.

    All rollouts of a task run concurrently. One that raises is retried; the others are kept.
    """

    arguments: ClassVar[type[ConversationArguments]] = ConversationArguments

    def __init__(self, *args: Any, **options: Any) -> None:
        super().__init__(*args, **options)
        self._begun: Counter[int] = Counter()
        """Number of conversations so far, by rollout."""

    async def run(self) -> list[Experience]:
        """Return the experiences of the task's rollouts."""
        return await all_rollouts(self.task, self.rollout)

    async def rollout(self, run: int) -> list[Experience]:
        """Run one rollout and return its experiences."""
        raise NotImplementedError(f"{type(self).__name__} has no rollout()")

    def trajectory(
        self, run: int, messages: Sequence[Message] | None = None, tools: Sequence[Tool] | None = None
    ) -> Trajectory:
        """Begin a conversation, by default on the task's prompt, with the task's sampling.

        Further conversations of the same rollout draw their own noise.
        """
        task, number = self.task, self._begun[run]
        self._begun[run] += 1
        return Trajectory(
            self.model,
            task.messages if messages is None else messages,
            tools=task.tools if tools is None else tools,
            seed=lambda turn: task.rollout_seed(run, turn, f"trajectory {number}"),
            chat_template=task.format.chat_template,
            **task.sampling,
        )

    async def judged(self, answer: Completion, trajectory: Trajectory | None = None) -> Reward:
        """Return the verdict of the task's reward function on an answer, which is the newest one of `trajectory` if
        that is set.

        A judge or reward model then sees the whole conversation before it; otherwise only the task's prompt.
        """
        item = self.reward_item(answer)
        if trajectory is not None:
            item = replace(item, messages=[*map(dict, trajectory.messages[:-1])])
        [reward] = await self.rewards.score(self.reward_name, [item])
        return reward

    def experiences(
        self, trajectory: Trajectory, rewards: Sequence[Reward | float | None], run: int, metrics: dict[str, float]
    ) -> list[Experience]:
        """Return the experiences of a rollout from the reward of each turn, by `step_wise` and `discount`.

        Without `step_wise` the reward is that of the last turn.
        """
        arguments = self.arguments.model_validate(self.task.workflow_args)
        fields: dict[str, Any] = {
            "run": run,
            "metrics": {"turns": float(trajectory.turns), **metrics},
            "info": {"truth": plain(self.task.truth), "workflow": self.task.workflow},
        }
        if not arguments.step_wise:
            return [trajectory.experience(rewards[-1], **fields)]
        return trajectory.step_experiences(rewards, discount=arguments.discount, **fields)


class MultiTurnArguments(ConversationArguments):
    """`workflow_args` of `multi_turn_workflow`."""

    max_turns: int = Field(3, ge=1)
    """Limit of attempts."""
    feedback: str = "That is not right. Try again."
    """The message after an unsuccessful attempt."""
    enough: float = 1.0
    """Reward from which an attempt is successful."""


@WORKFLOWS.register("multi_turn_workflow")
class MultiTurnWorkflow(ConversationWorkflow):
    """The policy answers, gets feedback if its answer is wrong, and tries again; the last attempt's reward counts.

    `math_reward` if the task set names no reward function. A subclass may override `reply`, the user or environment.
    """

    arguments = MultiTurnArguments
    default_reward = "math_reward"

    async def reply(self, answer: Completion, reward: Reward, turn: int) -> list[Message]:
        """Return the reply to an answer; an empty one ends the conversation. `turn` counts from 0."""
        arguments = MultiTurnArguments.model_validate(self.task.workflow_args)
        if reward.value is None or reward.value >= arguments.enough:
            return []
        return [{"role": "user", "content": arguments.feedback}]

    async def rollout(self, run: int) -> list[Experience]:
        """Try until an attempt is successful, `max_turns` are used or the context is full."""
        most = self.arguments.model_validate(self.task.workflow_args).max_turns
        trajectory = self.trajectory(run)
        answer = await trajectory.act()
        reward = await self.judged(answer, trajectory)
        while trajectory.turns < most and not trajectory.finished:
            replies = await self.reply(answer, reward, trajectory.turns - 1)
            if not replies:
                break
            trajectory.add(*replies)
            answer = await trajectory.act()
            if answer.finish_reason != "prompt_too_long":
                reward = await self.judged(answer, trajectory)
        rewards = [*[None] * (trajectory.turns - 1), reward]
        return self.experiences(trajectory, rewards, run, {})


class ToolCallArguments(ConversationArguments):
    """`workflow_args` of `toolcall_workflow`."""

    tools: tuple[str, ...] = ()
    """Names in `TOOLS`, or dotted paths of functions. None: the row's tools, which are not executed."""
    time_limit: float = Field(10.0, gt=0)
    """Time limit of one call in seconds."""

    @field_validator("tools")
    @classmethod
    def _exist(cls, names: tuple[str, ...]) -> tuple[str, ...]:
        try:
            for name in names:
                if "." not in name:  # a dotted path is imported by the explorer
                    TOOLS.resolve(name)
        except InputError as error:
            raise ValueError(str(error)) from error
        return names

    @model_validator(mode="after")
    def _limits_of_calls(self) -> Self:
        unused = sorted({"max_turns", "time_limit"} & self.model_fields_set)
        if unused and not self.tools:
            raise ValueError(f"{' and '.join(unused)} without tools: calls are compared with the row's after one turn")
        return self


@WORKFLOWS.register("toolcall_workflow")
class ToolCallWorkflow(ConversationWorkflow):
    """The policy calls tools until it answers without one; `explorer.rollout_model.tool_call_parser` parses the calls.

    With `workflow_args.tools` the calls are executed, and the last answer is scored by the task's reward function
    (`math_reward` by default). Without, the policy sees the row's tools and has one turn, and its calls are compared
    with those in the row (`toolcall_reward`), whose columns are by default those of Tool-N1's data sets
    (`config/resolve.py`).
    """

    arguments = ToolCallArguments

    @classmethod
    def own_reward(cls, workflow_args: Mapping[str, Any]) -> str:
        """Return `math_reward` for an answer, `toolcall_reward` for calls."""
        return "math_reward" if workflow_args.get("tools") else "toolcall_reward"

    async def rollout(self, run: int) -> list[Experience]:
        """Continue until a turn calls no tool, `max_turns` are used or the context is full."""
        arguments = ToolCallArguments.model_validate(self.task.workflow_args)
        box = Toolbox(*arguments.tools, time_limit=arguments.time_limit)
        trajectory = self.trajectory(run, tools=box.schemas or None)
        answer = await trajectory.act()
        message = trajectory.messages[-1]
        while arguments.tools and trajectory.turns < arguments.max_turns and not trajectory.finished:
            results = await box.answers(message)
            if not results:
                break
            trajectory.add(*results)
            following = await trajectory.act()
            if following.finish_reason != "prompt_too_long":  # else the turn before was the last one
                answer, message = following, trajectory.messages[-1]
        reward = await (self.judged(answer, trajectory) if arguments.tools else self._calls_judged(message))
        return self.experiences(trajectory, [*[None] * (trajectory.turns - 1), reward], run, box.metrics)

    async def _calls_judged(self, message: Message) -> Reward:
        calls = json.dumps([call["function"] for call in message.get("tool_calls") or ()])
        item = RewardItem(calls, self.task.truth, self.prompt_text, self.task.raw, self.task.reward_fn_args)
        [reward] = await self.rewards.score(self.reward_name, [item])
        return reward
