"""The task `ask`: pauses the flow, shows answers of an earlier run, and collects a person's verdicts."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any
from uuid import uuid4

from prefect.artifacts import create_markdown_artifact
from prefect.client.orchestration import get_client
from prefect.exceptions import Abort, FlowPauseTimeout
from prefect.flow_runs import pause_flow_run
from prefect.input import RunInput
from prefect.logging import get_run_logger
from prefect.runtime import flow_run
from prefect.states import Running
from prefect.utilities.urls import url_for
from pydantic import Field, create_model

from tasks.reports import artifact_key, show_if_possible
from tasks.retries import named_task
from trinity_core.data.experience import Experience
from trinity_core.errors import TrinityError
from trinity_core.runtime.stage import Stage
from trinity_core.runtime.verdicts import (
    ShownTask,
    TaskVerdict,
    Verdict,
    keep_verdicts,
    shown_tasks,
)
from trinity_core.tracking.rollouts import markdown_text

POLL_SECONDS = 5
WIDTH = 4000
"""Characters shown of an answer; the middle of a longer one is cut out."""
TYPED: Mapping[str, Verdict] = {"keep": "keep", "drop": "drop", "": "no verdict"}
"""Text of a field → verdict. It is typed, because a select on Prefect's page closes at the click that opens it."""
PATTERN = rf"^\s*({'|'.join(TYPED)})\s*$"


@named_task("ask")
def ask(stage: Stage) -> bool:
    """Pause the flow until a person has given verdicts, and save them. Return False if the run continues without.

    Raises TrinityError if the run must end without them.
    """
    log, config = get_run_logger(), stage.config
    buffer = config.buffer.trainer_input.experience_buffer
    wanted, shown = buffer.human_verdicts, shown_tasks(buffer)
    text = as_markdown(shown)
    key = artifact_key(config, "verdicts")
    show_if_possible(lambda: create_markdown_artifact(text, key=key, description="Answers to judge"))
    where = url_for("flow-run", obj_id=flow_run.id) or "Prefect's page of this flow run"
    log.info("A person is asked about %d tasks, for %g s: resume this run at %s", len(shown), wanted.timeout, where)
    try:
        # Prefect's own key is the same in each attempt: a later one would take the earlier one's answer instead of
        # pausing.
        form = pause_flow_run(verdict_form(shown), math.ceil(wanted.timeout), POLL_SECONDS, key=uuid4().hex)
        rows = keep_verdicts(config, shown, verdicts_of(form, shown))
    except FlowPauseTimeout:
        _set_running()
        rows = 0
    if rows:
        log.info("A person's verdicts make %d rows", rows)
    elif wanted.on_timeout == "end":
        raise TrinityError(
            f"no verdict was given within {wanted.timeout:g} s; the run asks again when it is started again"
        )
    else:
        log.warning("No verdict was given within %g s: the run continues with the rewards", wanted.timeout)
    return rows > 0


def _set_running() -> None:
    """Set the run to Running, because after a timed-out pause Prefect would only let it fail.

    Raises Abort, which ends the run in its current state, if it was cancelled during the pause.
    """
    with get_client(sync_client=True) as client:
        state = client.read_flow_run(flow_run.id).state
        if state is not None and (state.is_cancelled() or state.is_cancelling()):
            raise Abort("The run was cancelled while it waited for a person")
        client.set_flow_run_state(flow_run.id, Running(), force=True)


def as_markdown(shown: Sequence[ShownTask]) -> str:
    """Format the tasks with their answers; model output is escaped."""
    parts = []
    for number, item in enumerate(shown, 1):
        parts.append(f"### {number}. {markdown_text(item.prompt, WIDTH)}\n")
        for letter, answer in zip(_letters(item), item.answers, strict=True):
            parts.append(f"**{number}{letter}** {_answer(answer)}\n")
    return "\n".join(parts)


def _answer(answer: Experience) -> str:
    reward = "no reward" if answer.reward is None else f"reward {answer.reward:g}"
    return f"({reward})\n\n> {markdown_text(answer.info['response'], WIDTH)}"


def verdict_form(shown: Sequence[ShownTask]) -> type[RunInput]:
    """Return the form that Prefect shows: a verdict for each answer, and room for a better answer for each task.

    Task and answers are shown at their fields, because a form's description has no room next to many fields.
    """
    fields: dict[str, Any] = {}
    for number, item in enumerate(shown, 1):
        heading = f"**{number}. {markdown_text(item.prompt, WIDTH)}**\n\n"
        for letter, answer in zip(_letters(item), item.answers, strict=True):
            text = (heading if answer is item.answers[0] else "") + _answer(answer)
            field = Field("", title=f"Answer {number}{letter}: keep or drop?", description=text, pattern=PATTERN)
            fields[f"answer_{number}{letter}"] = (str, field)
        fields[f"better_{number}"] = (str, Field("", title=f"A better answer to {number}"))
    form: type[RunInput] = create_model("HumanVerdicts", __base__=RunInput, **fields)
    form._description = "Type keep or drop, or write better answers; answers without a verdict are left out."
    return form


def verdicts_of(form: RunInput, shown: Sequence[ShownTask]) -> list[TaskVerdict]:
    entries = form.model_dump()
    return [
        TaskVerdict(
            [TYPED[entries[f"answer_{number}{letter}"].strip()] for letter in _letters(item)],
            entries[f"better_{number}"],
        )
        for number, item in enumerate(shown, 1)
    ]


def _letters(task: ShownTask) -> Sequence[str]:
    return [chr(ord("a") + place) if place < 26 else f"_{place}" for place in range(len(task.answers))]
