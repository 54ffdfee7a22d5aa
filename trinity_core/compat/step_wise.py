"""Trinity-RFT's step-wise workflows: `step` asks the model as it likes, and each step's answers get a reward."""

from __future__ import annotations

from typing import Any, ClassVar

from trinity_core.compat.experience import Experience
from trinity_core.compat.model import ModelWrapper
from trinity_core.compat.workflow import Task, Workflow


class StepWiseRewardWorkflow(Workflow):
    """Write `step` and `reward`, or `step_async` and `reward_async`, and `max_step_num`.

    `step(step_num)` says whether another step follows; `reward(exps, step_num)` is the step's reward.
    """

    is_async = True
    max_step_num: Any = None
    each_step: ClassVar[bool] = True
    """Whether each step has a reward of its own."""

    def __init__(
        self, *, task: Task, model: ModelWrapper, auxiliary_models: Any = None, use_openai_client: bool = True
    ) -> None:
        super().__init__(task=task, model=model, auxiliary_models=auxiliary_models)
        self.client = model.get_openai_client() if use_openai_client else None

    async def step_async(self, **of: Any) -> bool:
        """One step; by default `step`."""
        return bool(self.step(**of))  # type: ignore[attr-defined]  # a subclass writes it

    async def reward_async(self, exps: list[Experience], **of: Any) -> float:
        """The reward; by default `reward`."""
        return float(self.reward(exps, **of))  # type: ignore[attr-defined]  # a subclass writes it

    async def run_async(self) -> list[Experience]:
        """The answers of all steps, numbered by step."""
        taken: list[Experience] = []
        for step in range(self.max_step_num):
            goes_on = await self.step_async(step_num=step)
            own = self.model.extract_experience_from_history()
            reward = await self.reward_async(own, step_num=step) if self.each_step else None
            for one in own:
                one.eid.step, one.reward = step, reward
            taken += own
            if not goes_on:
                break
        if not self.each_step:
            reward = await self.reward_async(taken)
            for one in taken:
                one.reward = reward
                one.metrics["actual_env_steps"] = float(step + 1)
        return taken


class RewardPropagationWorkflow(StepWiseRewardWorkflow):
    """All steps have one reward: `reward(exps)`, after the last."""

    each_step = False


AsyncStepWiseRewardWorkflow, AsyncRewardPropagationWorkflow = StepWiseRewardWorkflow, RewardPropagationWorkflow
