"""Answers that could not be judged carry no reward and no loss: a broken verifier is never a wrong answer.

`run_workflow` passes every workflow's experiences through `exclude_unscored`.
"""

from __future__ import annotations

import logging
from collections import defaultdict
from collections.abc import Sequence

import numpy as np

from trinity_core.data.experience import Experience
from trinity_core.workflows.rewards.base import VERIFIER_ERRORS, Reward, RewardItem
from trinity_core.workflows.rewards.pool import RewardRunner

log = logging.getLogger(__name__)


def exclude_unscored(experiences: Sequence[Experience]) -> None:
    """Mask every experience that was not judged, in place, and count it in the metric `verifier_errors`.

    An experience is judged if it has a reward, token rewards or a teacher's log-probs, and its metrics report no
    verifier error. The last turn of a run judges the run: an earlier turn without a reward gets the last turn's, and
    all turns are excluded if the last one was not judged. Expert data is unchanged.
    """
    for turns in runs_of([one for one in experiences if not one.is_expert]):
        final = turns[-1]
        for one in turns:
            if not _is_judged(final) or _failed(one):
                _exclude(one)
            elif not _is_judged(one):
                one.reward = final.total_reward
                if one.reward is None:
                    _exclude(one)


def runs_of(experiences: Sequence[Experience]) -> list[list[Experience]]:
    """Return the turns of each run in order. Experiences that share both run and turn are separate runs."""
    by_run: dict[tuple[str, int], list[Experience]] = defaultdict(list)
    for one in experiences:
        by_run[one.group, one.run].append(one)
    runs: list[list[Experience]] = []
    for members in by_run.values():
        numbered = len({one.turn for one in members}) == len(members)
        runs += [sorted(members, key=lambda one: one.turn)] if numbered else [[one] for one in members]
    return runs


def _failed(one: Experience) -> bool:
    return one.metrics.get(VERIFIER_ERRORS, 0.0) > 0


def _is_judged(one: Experience) -> bool:
    scores = (one.reward, one.token_rewards, one.teacher_logprobs)
    return not _failed(one) and any(score is not None for score in scores)


def _exclude(one: Experience) -> None:
    one.reward = one.token_rewards = None
    one.action_mask = np.zeros_like(one.action_mask)
    one.metrics = {**one.metrics, VERIFIER_ERRORS: 1.0}


class CountedRewards:
    """A `RewardRunner` that counts the errors it returns to a workflow, to detect a workflow that ignores them."""

    def __init__(self, rewards: RewardRunner) -> None:
        self._rewards = rewards
        self.errors = 0

    async def score(self, name: str, items: Sequence[RewardItem]) -> list[Reward]:
        return self._count_errors(await self._rewards.score(name, items))

    def score_sync(self, name: str, items: Sequence[RewardItem]) -> list[Reward]:
        return self._count_errors(self._rewards.score_sync(name, items))

    def warn_if_ignored(self, workflow: str, experiences: Sequence[Experience]) -> None:
        """Log a warning if verifiers failed and no metric of an experience shows it (`…verifier_errors`)."""
        counted = any(
            value > 0 for one in experiences for name, value in one.metrics.items() if name.endswith(VERIFIER_ERRORS)
        )
        if self.errors and not counted:
            log.warning(
                "workflow '%s' got %d rewards with an error and returned none of its answers as unscored; pass the "
                "Reward itself (`answer.experience(reward=reward)`), so that a broken verifier is no wrong answer",
                workflow,
                self.errors,
            )

    def _count_errors(self, rewards: list[Reward]) -> list[Reward]:
        self.errors += sum(reward.error is not None for reward in rewards)
        return rewards
