"""Files next to a run's metrics: `config.yaml`, its configuration, and `run.json`, its state.

They are for people and pages that show runs, with or without a tracking system. Secrets are masked. A run can be
started from its `config.yaml`, whose literal `${` is escaped.
"""

from __future__ import annotations

import logging
import os
import socket
import sys
import time
from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass, field, fields
from enum import Enum
from pathlib import Path
from typing import Any

import yaml

from trinity_core.base.errors import DataError, TrinityError
from trinity_core.base.files import private_folder, read_json, write_atomically, write_json
from trinity_core.base.processes import start_mark, still_runs
from trinity_core.config.load import escaped, unescaped
from trinity_core.config.secrets import without_password, without_secrets
from trinity_core.exchange.tracking.metrics_file import read_metrics, stream_of
from trinity_core.exchange.tracking.writers import RunOutcome, leaves

log = logging.getLogger(__name__)


class RunState(Enum):
    """State of a run."""

    WAITING = "waiting"
    STARTING = "starting"
    """Its command has been started, and does not work on it yet."""
    RUNNING = "running"
    STOPPING = "stopping"
    FINISHED = "finished"
    PAUSED = "paused"
    """It has saved, and waits for a person's decision."""
    FAILED = "failed"
    CANCELLED = "cancelled"
    KILLED = "killed"
    """Its process has ended without recording why."""
    UNKNOWN = "unknown"
    """A run of an older release without a state, or of a newer release with an unknown one."""

    @classmethod
    def _missing_(cls, value: object) -> RunState:
        return cls.UNKNOWN

    @property
    def is_over(self) -> bool:
        """True if no process works on it any more."""
        return self not in (RunState.WAITING, RunState.STARTING, RunState.RUNNING, RunState.STOPPING)


@dataclass(frozen=True, slots=True)
class RunRecord:
    """The latest attempt at a run. Times are Unix seconds."""

    state: str
    began: float
    ended: float | None = None
    stage: str = ""
    pid: int = 0
    host: str = ""
    mark: str = ""
    earlier: float = 0.0
    """Seconds that earlier attempts took; a killed attempt counts until its last metrics."""
    software: dict[str, str] = field(default_factory=dict)
    """Software versions, see `run.nodes.software`; empty in records of older releases."""
    error: str = ""
    """Why it failed; empty for other states and in records of older releases."""
    first_began: float | None = None
    """When the first attempt began; None if this is the first, or unknown (older releases)."""

    @property
    def present_state(self) -> RunState:
        """The state, or `KILLED` if its process on this machine has ended without recording that."""
        state = RunState(self.state)
        gone = not state.is_over and self.host == socket.gethostname() and not self.works_here
        return RunState.KILLED if gone else state

    @property
    def run_began(self) -> float:
        """When the run's first attempt began, if known, else its latest."""
        return self.began if self.first_began is None else self.first_began

    @property
    def seconds(self) -> float | None:
        """Duration of all attempts; None if the latest has not recorded its end."""
        return None if self.ended is None else self.earlier + max(self.ended - self.began, 0.0)

    @property
    def works_here(self) -> bool:
        is_here = not RunState(self.state).is_over and self.host == socket.gethostname()
        return is_here and still_runs(self.pid, self.began, self.mark)


def config_path(job_dir: Path) -> Path:
    return job_dir / "monitor" / "config.yaml"


def record_path(job_dir: Path) -> Path:
    return job_dir / "monitor" / "run.json"


def record_start(
    job_dir: Path, config: Mapping[str, Any], stage: str, keeps: bool = False, software: Mapping[str, str] | None = None
) -> RunRecord | None:
    """Record that this process works on a run, and return the record.

    With `keeps`, an existing record is left unchanged and None returned: an evaluation may run during training.
    """
    if keeps and record_path(job_dir).exists():
        return None
    pid, host, previous = os.getpid(), socket.gethostname(), read_record(job_dir)
    earlier = (previous.seconds or previous.earlier) if previous else 0.0
    record = RunRecord(
        RunState.RUNNING.value, time.time(), None, stage, pid, host, start_mark(pid), earlier, dict(software or {}),
        first_began=previous.run_began if previous else None,
    )  # fmt: skip
    text = _as_yaml(config)
    private_folder(record_path(job_dir).parent)
    write_atomically(config_path(job_dir), text.encode(), durable=False)
    write_json(record_path(job_dir), asdict(record), durable=False)
    return record


def changes_since(job_dir: Path, config: Mapping[str, Any], stage: str, software: Mapping[str, str]) -> str:
    """Describe how a stage's start differs from the previous attempt, in software and in settings known to both. Empty
    without differences or without a previous attempt. Call it before `record_start`."""
    previous = read_record(job_dir)
    if previous is None or previous.stage != stage:
        return ""
    parts = []
    if other := [name for name in software if previous.software.get(name, "") != software[name]]:
        was = ", ".join(f"{name} {previous.software.get(name) or '–'}" for name in other)
        now = ", ".join(f"{name} {software[name] or '–'}" for name in other)
        parts = [f"the run was begun by {was if previous.software else 'an older release'}, this is {now}"]
    recorded, present = dict(leaves(known_config(job_dir))), leaves(_parse(_as_yaml(config)))
    if differ := [
        f"{key} ({recorded[key]}, now {value})" for key, value in present if recorded.get(key, value) != value
    ]:
        parts.append(f"settings whose value differs: {', '.join(differ)}")
    return "; ".join(parts)


def _as_yaml(config: Mapping[str, Any]) -> str:
    return yaml.safe_dump(escaped(without_secrets(dict(config))), sort_keys=False, allow_unicode=True)


def _parse(text: str) -> dict[str, Any]:
    tree: dict[str, Any] = yaml.load(text, yaml.CSafeLoader) or {}
    return unescaped(tree) if "${" in text else tree


def record_kill(job_dir: Path, stages: Iterable[Path] = ()) -> None:
    """Record that a killed attempt ended with the last metrics of its training.

    Call it before the metrics are rewound. A pipeline's metrics are in the folders of its `stages`. Evaluations do not
    count, because they may have run later.
    """
    record = read_record(job_dir)
    if record is None or record.ended is not None or record.works_here:
        return
    lines = (line for folder in (job_dir, *stages) for line in read_metrics(folder))
    ended = max((line.time for line in lines if stream_of(line.source) != "eval"), default=record.began)
    write_json(record_path(job_dir), asdict(record) | {"ended": ended}, durable=False)


def record_end(job_dir: Path, record: RunRecord | None, outcome: RunOutcome) -> None:
    """Record how the work recorded in `record` ended; if it failed, with the error that is being handled. Another's
    record is left unchanged, even of this same process."""
    if record is not None and record == read_record(job_dir):
        error = sys.exception() if outcome is RunOutcome.FAILED else None
        name = "" if error is None or isinstance(error, TrinityError) else f"{type(error).__name__}: "
        text = "" if error is None else without_password(f"{name}{error}")
        ended = {"state": RunState(outcome.value).value, "ended": time.time(), "error": text}
        write_json(record_path(job_dir), asdict(record) | ended)


def read_record(job_dir: Path) -> RunRecord | None:
    names = {entry.name for entry in fields(RunRecord)}
    record = read_json(record_path(job_dir))
    return RunRecord(**{name: value for name, value in record.items() if name in names}) if record else None


def read_config(job_dir: Path) -> dict[str, Any]:
    """Read the configuration as a tree; empty if the run has not recorded one. Raises DataError if it is damaged."""
    path = config_path(job_dir)
    if not path.exists():
        return {}
    try:
        return _parse(path.read_text(encoding="utf-8"))
    except (yaml.YAMLError, UnicodeDecodeError) as error:
        again = "remove it: the run's next start writes it again"
        raise DataError(f"{path} is damaged ({' '.join(str(error).split())}); {again}", key=str(path)) from None


def known_config(job_dir: Path) -> dict[str, Any]:
    """Like `read_config`; empty, with a warning, if it is damaged."""
    try:
        return read_config(job_dir)
    except DataError as error:
        log.warning("%s", error)
        return {}
