"""The rollouts of an explore step after the experience operators, with further tasks in place of what is gone."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial

from trinity_core.data.experience import Experience
from trinity_core.data.rejected import RejectedRows
from trinity_core.errors import TrinityError
from trinity_core.pipelines.operators import FailedGroup, Operators
from trinity_core.rollout.metrics import dropped_whole, experiences_of
from trinity_core.rollout.runner import FailureWatch, Outcome, cause, rejected_row
from trinity_core.rollout.step_source import StepSource
from trinity_core.threads import DaemonThreads
from trinity_core.timing import BusyTimer

log = logging.getLogger(__name__)
OPERATOR_SECONDS = 3600.0
"""For the operators of a step. A model as a judge may be among them."""


@dataclass(frozen=True, slots=True)
class SampledStep:
    """The tasks of a step, with those that were drawn in place of others."""

    outcomes: list[Outcome]
    experiences: list[Experience]
    """What the operators left."""
    dropped: dict[str, dict[str, int]]
    """Group -> operator or reason -> experiences that it dropped."""
    operator_seconds: float
    """For which the step waited for the operators."""


async def sample_step(
    steps: StepSource, operators: Operators, step: int, version: int, rounds: int, failures: FailureWatch
) -> SampledStep:
    """The rollouts of a step. As often as `rounds`, tasks of which nothing is left to train on are replaced by further
    ones (DAPO's dynamic sampling, arXiv 2503.14476, section 3.2).

    Raises `TrinityError` if all its first tasks fail, and not just a few, or all tasks of the run.
    """
    outcomes = await steps.outcomes(step, version)
    failures.check(step, outcomes, is_last=step == steps.total_steps or steps.is_exhausted)
    wanted = len(outcomes)
    timer = BusyTimer()
    with timer:
        experiences, dropped = await run_operators(operators, outcomes, failures.rejected_rows)
    missing = wanted - _groups(experiences)
    for _ in range(rounds):
        further = await steps.further(step, missing) if missing > 0 else []
        if not further:
            break
        failures.note(further)
        with timer:
            kept, by_operator = await run_operators(operators, further, failures.rejected_rows)
        outcomes, experiences, dropped = outcomes + further, experiences + kept, dropped | by_operator
        missing = wanted - _groups(experiences)
    if rounds and missing > 0:
        log.warning(
            "explore step %d has %d of %d groups after %d tasks (explorer.max_refill_rounds: %d)",
            step, wanted - missing, wanted, len(outcomes), rounds,
        )  # fmt: skip
    return SampledStep(outcomes, experiences, dropped | dropped_whole(outcomes), timer.seconds)


def _groups(experiences: list[Experience]) -> int:
    """Groups of which there is something to train on."""
    return len({one.group for one in experiences if one.action_mask.any()})


async def run_operators(
    operators: Operators, outcomes: Sequence[Outcome], rejected_rows: RejectedRows
) -> tuple[list[Experience], dict[str, dict[str, int]]]:
    """What the operators leave of the outcomes' experiences, and what they dropped.

    They run beside the explorer's loop, as plugins may take their time: in a thread, or in a process of their own. Rows
    with which one fails are noted in `rejected_rows`.
    """
    failed: list[FailedGroup] = []
    run = partial(operators.run, experiences_of(outcomes), failed.append)
    work = asyncio.get_running_loop().run_in_executor(DaemonThreads("operators"), run)
    try:
        left = await asyncio.wait_for(work, OPERATOR_SECONDS)
    except TimeoutError:
        names, missing = ", ".join(operators.names), operators.running or "the process of their own"
        raise TrinityError(
            f"the experience operators ({names}) took longer than {OPERATOR_SECONDS:g} s: no answer from {missing}"
        ) from None
    tasks = {outcome.task.group: outcome.task for outcome in outcomes}
    rows = [
        rejected_row(tasks[each.group], f"experience operator '{each.operator}' fails: {cause(each.error)}")
        for each in failed
        if each.group in tasks  # an operator may have added it
    ]
    rejected_rows.append("experience_operators", rows)
    return left
