"""The rollouts of an explore step after the experience operators, with further tasks in place of what is gone."""

from __future__ import annotations

import logging
from dataclasses import dataclass

from trinity_core.data.experience import Experience
from trinity_core.pipelines.operators import Operators
from trinity_core.rollout.metrics import dropped_whole
from trinity_core.rollout.operated import operated
from trinity_core.rollout.runner import FailureWatch, Outcome
from trinity_core.rollout.step_source import StepSource
from trinity_core.timing import BusyTimer

log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class FilledStep:
    """The tasks of a step, with those that were drawn in place of others."""

    outcomes: list[Outcome]
    experiences: list[Experience]
    """What the operators left."""
    dropped: dict[str, dict[str, int]]
    """Group -> operator or reason -> experiences that it dropped."""
    operator_seconds: float
    """For which the step waited for the operators."""


async def filled(
    steps: StepSource, operators: Operators, step: int, version: int, rounds: int, failures: FailureWatch
) -> FilledStep:
    """The rollouts of a step. As often as `rounds`, tasks of which nothing is left to train on are replaced by further
    ones (DAPO's dynamic sampling, arXiv 2503.14476, section 3.2).

    Raises `TrinityError` if all its first tasks fail, and not just a few.
    """
    outcomes = await steps.outcomes(step, version)
    failures.check(step, outcomes)
    wanted = len(outcomes)
    timer = BusyTimer()
    with timer:
        experiences, dropped = await operated(operators, outcomes, failures.rejected_rows)
    missing = wanted - _groups(experiences)
    for _ in range(rounds):
        further = await steps.further(step, missing) if missing > 0 else []
        if not further:
            break
        failures.note(further)
        with timer:
            kept, by_operator = await operated(operators, further, failures.rejected_rows)
        outcomes, experiences, dropped = outcomes + further, experiences + kept, dropped | by_operator
        missing = wanted - _groups(experiences)
    if rounds and missing > 0:
        log.warning(
            "explore step %d has %d of %d groups after %d tasks (explorer.max_refill_rounds: %d)",
            step, wanted - missing, wanted, len(outcomes), rounds,
        )  # fmt: skip
    return FilledStep(outcomes, experiences, dropped | dropped_whole(outcomes), timer.seconds)


def _groups(experiences: list[Experience]) -> int:
    """Groups of which there is something to train on."""
    return len({one.group for one in experiences if not one.is_unscored})
