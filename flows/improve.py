"""Make the next model from the feedback that users and people have given since the last one."""

from __future__ import annotations

from typing import Annotated, Any

from prefect import flow
from prefect.states import Completed
from pydantic import Field

from flows.loaded import NOT_PROMOTED
from flows.parameters import NO_OVERRIDES, ConfigFile, Overrides, shown
from tasks.frontend import PREFECT
from tasks.retries import retry_only_transient_faults
from trinity_core.run.improve import improve as run_improve
from trinity_core.run.promotion import PROMOTED

TOO_LITTLE = "Completed, too little feedback"
Feedback = Annotated[
    list[Annotated[str, Field(min_length=1)]],
    Field(min_length=1),
    shown("Feedback", "Folders of runs that serve users or asked a person, URLs of stores, or .jsonl files"),
]
AtLeast = Annotated[int, Field(ge=1), shown("New feedback", "Fewest new judged rollouts with which a round begins")]


@flow(name="improve", flow_run_name="improve {config}", persist_result=False)
def improve(
    config: ConfigFile, feedback: Feedback, overrides: Overrides = NO_OVERRIDES, at_least: AtLeast = 64
) -> dict[str, Any]:
    """Collect feedback, train from the champion, evaluate, and promote the model if the gate finds it better.

    A round that was interrupted is continued first.
    """
    with retry_only_transient_faults():
        result = run_improve(config, overrides, feedback, at_least, PREFECT)
    if lacking := result.get("lacking"):
        return Completed(name=TOO_LITTLE, message=lacking, data=result)  # type: ignore[return-value]
    if result["verdict"] != PROMOTED:
        message = f"{result['verdict']}: {result['gate']['candidate']}"
        return Completed(name=NOT_PROMOTED, message=message, data=result)  # type: ignore[return-value]
    return result
