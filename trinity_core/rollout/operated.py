"""The experience operators of a step, beside the explorer's loop."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from functools import partial

from trinity_core.data.experience import Experience
from trinity_core.data.rejected import RejectedRows
from trinity_core.errors import TrinityError
from trinity_core.pipelines.operators import FailedGroup, Operators
from trinity_core.rollout.metrics import experiences_of
from trinity_core.rollout.runner import Outcome, cause, rejected_row
from trinity_core.threads import DaemonThreads

OPERATOR_SECONDS = 3600.0
"""For the operators of a step. A model as a judge may be among them."""


async def operated(
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
