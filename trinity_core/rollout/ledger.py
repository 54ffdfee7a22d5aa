"""What an explore step tells the ledger of its tasks. Pure."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from trinity_core.rollout.runner import Outcome, cause
from trinity_core.store.ledger import DrawnTask

LONGEST_CAUSE = 300
"""Characters of a failure's cause that are kept."""


def drawn_tasks(outcomes: Sequence[Outcome], dropped: Mapping[str, Mapping[str, int]]) -> list[DrawnTask]:
    """The entries of a step's tasks, in order. `dropped`: group -> operator -> experiences it dropped."""
    return [
        DrawnTask(
            group=outcome.task.group,
            task=f"{outcome.task.taskset}/{outcome.task.index}",
            produced=len(outcome.experiences),
            tries=outcome.retries + 1,
            dropped=dropped.get(outcome.task.group, {}),
            failure=_failure(outcome),
        )
        for outcome in outcomes
    ]


def _failure(outcome: Outcome) -> str | None:
    """Why a task has no experience; None if it has some."""
    if outcome.failed:
        return " ".join(cause(outcome.error).split())[:LONGEST_CAUSE]
    return None if outcome.experiences else "its workflow returned no experience"
