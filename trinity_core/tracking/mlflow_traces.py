"""A rollout as an MLflow trace: turns are spans, the reward and other numbers are assessments."""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial
from hashlib import sha256
from json import dumps
from typing import TYPE_CHECKING, Any

from trinity_core.tracking.mlflow_facts import LONGEST_KEY, shortened

if TYPE_CHECKING:
    from mlflow.entities import Assessment, Span

    from trinity_core.tracking.rollouts import SampledRollout

KINDS = {"assistant": "CHAT_MODEL", "tool": "TOOL"}
"""Role of a message → type of its span; messages of users and environments have type UNKNOWN."""
PREVIEW = 500
"""Characters of prompt and response shown in the list of traces."""


def send_trace(uri: str, experiment: str, run_id: str, name: str, rollout: SampledRollout, time_ns: int) -> str:
    """Write a rollout as a trace of the run and return the trace's id, derived from run and name.

    The trace and its turns get the time span of the task's workflow (`SampledRollout.span`); times of single turns are
    unknown. Without a span, it gets the time `time_ns` (ns since 1970). An existing trace with this id is replaced.
    """
    from mlflow.entities import TraceInfo, TraceLocation, TraceState
    from mlflow.tracing.client import TracingClient
    from mlflow.tracing.constant import TraceMetadataKey, TraceTagKey

    trace_id = f"tr-{sha256(f'{run_id} {name}'.encode()).hexdigest()[:32]}"
    client = TracingClient(uri)
    began, ended = (round(at * 1e9) for at in rollout.span) if rollout.span else (time_ns, time_ns)
    client.start_trace(
        TraceInfo(
            trace_id=trace_id,
            trace_location=TraceLocation.from_experiment_id(experiment),
            request_time=began // 1_000_000,
            state=TraceState.OK,
            request_preview=rollout.prompt[:PREVIEW],
            response_preview=rollout.response[:PREVIEW],
            execution_duration=(ended - began) // 1_000_000,
            trace_metadata={TraceMetadataKey.SOURCE_RUN: run_id},
            tags={TraceTagKey.TRACE_NAME: name, "task_index": str(rollout.task_index)},
            assessments=_assessments(trace_id, rollout),
        )
    )
    client.log_spans(experiment, list(_spans(trace_id, name, rollout, began, ended)))
    return trace_id


def _spans(trace_id: str, name: str, rollout: SampledRollout, began: int, ended: int) -> Iterator[Span]:
    """Yield the rollout's span, and a child span for each turn after the prompt."""
    root, span = _span_id(trace_id, 0), partial(_span, began=began, ended=ended)
    yield span(trace_id, root, None, name, "AGENT", rollout.prompt, rollout.response)
    turns = rollout.turns or [
        {"role": "user", "content": rollout.prompt}, {"role": "assistant", "content": rollout.response},
    ]  # fmt: skip
    before: Any = None
    for number, turn in enumerate(turns, 1):
        role = str(turn.get("role", ""))
        if role in KINDS or (number > 1 and role != "system"):
            kind = KINDS.get(role, "UNKNOWN")
            yield span(trace_id, _span_id(trace_id, number), root, role, kind, before, turn)
        before = turn


def _span(
    trace_id: str,
    span_id: str,
    parent: str | None,
    name: str,
    kind: str,
    inputs: Any,
    outputs: Any,
    began: int,
    ended: int,
) -> Span:
    from mlflow.entities import Span
    from mlflow.tracing.constant import SpanAttributeKey

    values = {
        SpanAttributeKey.REQUEST_ID: trace_id,
        SpanAttributeKey.SPAN_TYPE: kind,
        SpanAttributeKey.INPUTS: inputs,
        SpanAttributeKey.OUTPUTS: outputs,
    }
    return Span.from_dict(
        {
            "trace_id": trace_id,
            "span_id": span_id,
            "parent_span_id": parent,
            "name": name,
            "start_time_unix_nano": began,
            "end_time_unix_nano": ended,
            "status": {"code": "OK", "message": ""},
            "attributes": {key: dumps(value, default=str) for key, value in values.items() if value is not None},
            "events": [],
        }
    )


def _span_id(trace_id: str, number: int) -> str:
    return sha256(f"{trace_id} {number}".encode()).hexdigest()[:16]


def _assessments(trace_id: str, rollout: SampledRollout) -> list[Assessment]:
    from mlflow.entities import AssessmentSource, Expectation, Feedback

    source = AssessmentSource("CODE", "trinity")
    numbers = rollout.parts | ({} if rollout.reward is None else {"reward": rollout.reward})
    assessments: list[Assessment] = [
        Feedback(shortened(name, LONGEST_KEY), value, source=source, trace_id=trace_id)
        for name, value in sorted(numbers.items())
    ]
    if rollout.truth:
        assessments.append(Expectation("truth", rollout.truth, source=source, trace_id=trace_id))
    for assessment in assessments:  # the id makes it replace one sent before
        assessment.assessment_id = f"a-{sha256(f'{trace_id} {assessment.name}'.encode()).hexdigest()[:32]}"
    return assessments
