"""`toolcall_workflow`: a policy that calls tools."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any, Self

from pydantic import Field, field_validator, model_validator

from trinity_core.data.experience import Experience
from trinity_core.data.formats import Message
from trinity_core.errors import InputError
from trinity_core.workflows.base import WORKFLOWS
from trinity_core.workflows.conversation import ConversationArguments, ConversationWorkflow
from trinity_core.workflows.rewards import Reward, RewardItem
from trinity_core.workflows.tools import TOOLS, Toolbox


class ToolCallArguments(ConversationArguments):
    """`workflow_args` of `toolcall_workflow`."""

    tools: tuple[str, ...] = ()
    """Names in `TOOLS`, or dotted paths of functions. None: the tools of the row, which are not called."""
    time_limit: float = Field(10.0, gt=0)
    """Seconds that one call may take."""

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
    """The policy calls tools until it answers without one; `explorer.rollout_model.tool_call_parser` reads the calls.

    With `workflow_args.tools` the calls are carried out, and the last answer is scored by the task's reward function
    (`math_reward` if it names none). Without, the tools of the row are shown, the policy has one turn, and its calls
    are compared with those in the row (`toolcall_reward`), whose columns are by default those of Tool-N1's data sets
    (`config/tool_call_rows.py`).
    """

    arguments = ToolCallArguments

    @classmethod
    def own_reward(cls, workflow_args: Mapping[str, Any]) -> str:
        """`math_reward` for an answer, `toolcall_reward` for calls."""
        return "math_reward" if workflow_args.get("tools") else "toolcall_reward"

    async def rollout(self, run: int) -> list[Experience]:
        """Turns until one calls no tool, `max_turns` are made or the context is full."""
        given = ToolCallArguments.model_validate(self.task.workflow_args)
        box = Toolbox(*given.tools, time_limit=given.time_limit)
        trajectory = self.trajectory(run, tools=box.schemas or None)
        answer = await trajectory.act()
        said = trajectory.messages[-1]
        while given.tools and trajectory.turns < given.max_turns and not trajectory.finished:
            results = await box.answers(said)
            if not results:
                break
            trajectory.add(*results)
            following = await trajectory.act()
            if following.finish_reason != "prompt_too_long":  # else the turn before was the last one
                answer, said = following, trajectory.messages[-1]
        reward = await (self.judged(answer) if given.tools else self._calls_judged(said))
        return self.experiences(trajectory, [*[None] * (trajectory.turns - 1), reward], run, box.metrics)

    async def _calls_judged(self, said: Message) -> Reward:
        calls = json.dumps([call["function"] for call in said.get("tool_calls") or ()])
        item = RewardItem(calls, self.task.truth, self.prompt_text, self.task.raw, self.task.reward_fn_args)
        [reward] = await self.rewards.score(self.reward_name, [item])
        return reward
