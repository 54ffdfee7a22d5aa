"""Feedback on a session, as clients send it: checked field by field, and refused with the reason. Pure."""

from __future__ import annotations

import re
from collections.abc import Collection, Mapping
from dataclasses import dataclass, field
from typing import Any

LONGEST_TEXT = 10_000
"""Characters of a comment or of a task's name."""
HALF_CHARACTER = re.compile("[\ud800-\udfff]")
"""JSON can spell them alone; UTF-8 cannot."""
GREATEST = 1e6
"""Of a reward or a metric, up or down: squares of greater ones overflow in the trainer's float32."""
METRIC_NAME = re.compile(r"(?=.{1,100}$)\w[\w\-. ]*(/\w[\w\-. ]*)*")
"""Names that tracking systems take."""


class Refusal(Exception):
    """What a client is told of a request that cannot be served."""

    def __init__(self, status: int, code: str, message: str, param: str | None = None) -> None:
        super().__init__(message)
        self.status, self.code, self.param = status, code, param


@dataclass(frozen=True, slots=True)
class Feedback:
    """What a user says of a session."""

    reward: float
    metrics: Mapping[str, float] = field(default_factory=dict)
    comment: str = ""

    @classmethod
    def of(cls, given: Mapping[str, Any]) -> Feedback:
        """From JSON. Raises Refusal that names the field at fault."""
        fields = _only(given, ("reward", "metrics", "comment"))
        metrics, comment = fields.get("metrics", {}), checked_text(fields.get("comment", ""), "comment")
        if not isinstance(metrics, Mapping):
            raise Refusal(400, "invalid_value", "metrics must be an object of numbers.", "metrics")
        if "reward" not in fields:
            raise Refusal(400, "missing_required_parameter", "reward is missing: a number.", "reward")
        for name in metrics:
            if not METRIC_NAME.fullmatch(name):
                message = "names in metrics have at most 100 letters, digits and spaces, _, -, . and / between parts."
                raise Refusal(400, "invalid_value", message, "metrics")
        numbers = {name: _number(value, f"metrics.{name}") for name, value in metrics.items()}
        return cls(_number(fields["reward"], "reward"), numbers, comment)


def named_session(given: Any) -> tuple[str, Feedback]:
    """The id of the session and the feedback, from the JSON of a request. Raises Refusal."""
    if not isinstance(given, Mapping):
        raise Refusal(400, "invalid_value", "the body must be a JSON object.")
    name = given.get("session_id")
    if not isinstance(name, str) or not name:
        raise Refusal(400, "missing_required_parameter", "session_id is missing: a text.", "session_id")
    return name, Feedback.of({key: value for key, value in given.items() if key != "session_id"})


def task_of(given: Any) -> str:
    """The task that a request for a session names, "" if it names none. Raises Refusal."""
    if not isinstance(given, Mapping):
        raise Refusal(400, "invalid_value", "the body must be a JSON object, or empty.")
    return checked_text(_only(given, ("task",)).get("task", ""), "task")


def _only(given: Mapping[str, Any], known: Collection[str]) -> Mapping[str, Any]:
    for name in given:
        if name not in known:
            raise Refusal(400, "unknown_parameter", f"{name} is unknown; known are {', '.join(known)}.", str(name))
    return given


def _number(value: Any, name: str) -> float:
    if not isinstance(value, bool) and isinstance(value, int | float) and abs(value) <= GREATEST:
        return float(value)
    raise Refusal(400, "invalid_value", f"{name} must be a number from {-GREATEST:g} to {GREATEST:g}.", name)


def checked_text(value: Any, name: str) -> str:
    """A text that is not too long and can be written to a file. Raises Refusal."""
    if isinstance(value, str) and len(value) <= LONGEST_TEXT and not HALF_CHARACTER.search(value):
        return value
    raise Refusal(400, "invalid_value", f"{name} must be a text of at most {LONGEST_TEXT} characters.", name)
