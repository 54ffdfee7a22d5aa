"""`on_policy_distill_math_workflow`: the policy answers, and a teacher gives its log-probs of each sampled token."""

from __future__ import annotations

import asyncio

import numpy as np

from trinity_core.data.experience import Experience
from trinity_core.errors import InputError, TrinityError
from trinity_core.workflows.base import WORKFLOWS
from trinity_core.workflows.boxed import MathBoxedWorkflow
from trinity_core.workflows.rewards import Reward
from trinity_core.workflows.rewards.base import VERIFIER_ERRORS
from trinity_core.workflows.rollout_model import Completion, RolloutModel


@WORKFLOWS.register("on_policy_distill_math_workflow")
class DistillMathWorkflow(MathBoxedWorkflow):
    """For the algorithm `on_policy_distill`. The teacher is the first auxiliary model; it has the policy's tokenizer.

    Its log-probs are at temperature 1, so the policy's should be too. The accuracy is measured and no part of the loss.
    """

    asks_models = True

    async def run(self) -> list[Experience]:
        """`repeat_times` experiences with the teacher's log-probs."""
        teacher = self.teacher
        completions = await self.answers()
        taught = await asyncio.gather(*(self._taught(teacher, one) for one in completions))
        rewards = await self.rewards.score(self.reward_name, [self.reward_item(one) for one in completions])
        return [
            self._distilled(completion, given, reward, run)
            for run, (completion, given, reward) in enumerate(zip(completions, taught, rewards, strict=True))
        ]

    @property
    def teacher(self) -> RolloutModel:
        """The first auxiliary model. Raises TrinityError without one."""
        if not self.auxiliary:
            raise TrinityError(f"workflow '{self.task.workflow}' needs a teacher: add one to explorer.auxiliary_models")
        return self.auxiliary[0]

    async def _taught(self, teacher: RolloutModel, completion: Completion) -> np.ndarray | str:
        """The teacher's log-probs of the sampled tokens, or why it gives none. Raises TrinityError for other tokens."""
        tokens = [int(token) for token in (*completion.prompt_tokens, *completion.tokens)]
        words, known = (one.tokenizer.convert_ids_to_tokens(tokens) for one in (self.model, teacher))
        if words != known:
            raise TrinityError("the teacher's tokenizer is not the policy's: the same token ids stand for other tokens")
        try:
            taught = (await teacher.logprobs(tokens))[len(completion.prompt_tokens) - 1 :]
        except InputError as error:
            return str(error)
        return taught if np.isfinite(taught).all() else "some are not finite"

    def _distilled(self, completion: Completion, taught: np.ndarray | str, reward: Reward, run: int) -> Experience:
        if isinstance(taught, str):
            return self.experience(completion, Reward(error=f"the teacher gave no log-probs: {taught}"), run)
        mask = np.ones(len(taught), dtype=np.bool_)
        one = self.experience(completion, reward, run)
        one.action_mask = mask if completion.finish_reason != "prompt_too_long" else ~mask
        one.teacher_logprobs = taught
        one.metrics[f"accuracy_{VERIFIER_ERRORS}"] = one.metrics.pop(VERIFIER_ERRORS, 0.0)
        one.metrics["kl_divergence"] = float(np.sum(completion.logprobs - taught))
        return one
