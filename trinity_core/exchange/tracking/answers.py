"""The score of every answer of an evaluation: `<job_dir>/monitor/answers/<eval set>_step_<n>.jsonl`, a line per task.

Two evaluations of the same tasks are compared answer by answer with them (`trinity_core.results.compare`).
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass
from hashlib import sha256
from pathlib import Path
from typing import Any

from trinity_core.exchange.tracking.rollouts import read_stored_rows, write_rows

SHOWN = 400
"""Characters of a prompt's beginning and an answer's end that are kept for people."""


@dataclass(frozen=True, slots=True)
class TaskAnswers:
    """A task of an eval set with the scores of its answers, in the order of repeats."""

    task: int
    """Row of the eval set."""
    digest: str
    """Digest of the row's content."""
    location: str
    """File and line of the row."""
    scores: Sequence[float | None]
    """None: no verdict."""
    prompt: str = ""
    answers: Sequence[str] = ()


def row_digest(row: Mapping[str, Any]) -> str:
    """Return 16 hexadecimal digits of the SHA-256 of a task's row."""
    return sha256(json.dumps(row, sort_keys=True, default=str).encode(errors="replace")).hexdigest()[:16]


def answers_file(job_dir: Path, taskset: str, step: int) -> Path:
    return job_dir / "monitor" / "answers" / f"{taskset.replace('/', '-')}_step_{step}.jsonl"


def save_answers(job_dir: Path, taskset: str, step: int, tasks: Iterable[TaskAnswers]) -> None:
    """Write the file of one evaluation, replacing an earlier one of the same step."""
    write_rows(answers_file(job_dir, taskset, step), map(asdict, tasks))


def read_answers(job_dir: Path, taskset: str, step: int) -> list[TaskAnswers]:
    """Read the answers of one evaluation; empty if the run has stored none, as in older releases."""
    path = answers_file(job_dir, taskset, step)
    return [TaskAnswers(**row) for row in read_stored_rows(path)] if path.exists() else []
