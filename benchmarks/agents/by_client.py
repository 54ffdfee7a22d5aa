"""The word problems of the quick start, answered through the `openai` client."""

from __future__ import annotations

from trinity_core.workflows import WORKFLOWS, AgentWorkflow, Reward, RewardItem, RolloutSession

LONGEST = 40


@WORKFLOWS.register("by_client")
class ByClient(AgentWorkflow):
    """One question, one answer."""

    async def rollout(self, session: RolloutSession, run: int) -> Reward:
        """The verdict on the answer."""
        answer = await session.openai_async_client.chat.completions.create(
            model=session.model_name, messages=self.task.messages, max_tokens=LONGEST
        )
        text = answer.choices[0].message.content or ""
        [reward] = await self.rewards.score("math_reward", [RewardItem(text, self.task.truth)])
        return reward
