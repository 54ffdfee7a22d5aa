"""The interface of tracking systems, shared helpers, and the writers of TensorBoard and Weights & Biases."""

from __future__ import annotations

import os
import shlex
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from enum import Enum
from pathlib import Path
from typing import TYPE_CHECKING, Any
from uuid import uuid4

from trinity_core.base.errors import Paused, TrinityError
from trinity_core.base.files import private_folder, read_json, write_json
from trinity_core.base.registry import Registry
from trinity_core.config.secrets import without_secrets
from trinity_core.exchange.tracking.metrics_file import MetricLine, stream_of

if TYPE_CHECKING:
    from trinity_core.exchange.tracking.rollouts import SampledRollout


class RunOutcome(Enum):
    """The end of a run or of one attempt at it."""

    FINISHED = "finished"
    PAUSED = "paused"
    """It has saved, and waits for a person's decision."""
    FAILED = "failed"
    CANCELLED = "cancelled"
    """Ended by a person or by SIGTERM; it may be resumed."""

    @property
    def is_success(self) -> bool:
        return self in (RunOutcome.FINISHED, RunOutcome.PAUSED)

    @classmethod
    def of(cls, error: BaseException | None) -> RunOutcome:
        """Derive the outcome from the error that ended the run; cancellation, as with Ctrl+C, is not an `Exception`."""
        if error is None:
            return cls.FINISHED
        if isinstance(error, Paused):
            return cls.PAUSED
        return cls.FAILED if isinstance(error, Exception) else cls.CANCELLED


@dataclass(frozen=True, slots=True)
class RunInfo:
    """Facts about a run for a tracking system."""

    project: str
    """Experiment (MLflow) or project (W&B)."""
    name: str
    job_dir: Path
    config: Mapping[str, Any] = field(default_factory=dict)
    """The whole configuration; secrets are masked before they leave this process."""
    parent_dir: Path | None = None
    """Job dir of the pipeline that this run is a stage of."""
    args: Mapping[str, Any] = field(default_factory=dict)
    tags: Mapping[str, str] = field(default_factory=dict)
    keeps_status: bool = False
    """True for an evaluation or an explorer: it leaves an existing run's status unchanged, because training may still
    use the run."""
    explorer: str = ""
    """The explorer's name, if this flow only explores alongside other flows of the run."""
    identity: str = ""
    """Unique id of the run, not shared by a copy of its folder. Empty if not known yet."""

    def is_own(self, note: Mapping[str, Any]) -> bool:
        """True if the tracked run recorded in the job dir belongs to this run, not to the folder it was copied from."""
        return not self.identity or note.get("identity", self.identity) == self.identity


class Writer:
    """Sends a run's records to a tracking system. A call that raised one of `faults` may be repeated later."""

    faults: tuple[type[Exception], ...] = ()
    """Exceptions of the tracking system while it cannot be reached."""
    run_id = ""
    """Id that the tracking system gives the run, if any. A new run is sent all lines from the first one."""
    per_explorer = False
    """True if each explorer in a separate flow has its own run."""
    evals_id = ""
    """With `per_explorer`, shared by all flows of a job that forward evaluations, so that each evaluation is sent once,
    to the first flow's run."""
    closes_before_files = False
    """True if an ended run still accepts files."""
    takes_traces = False
    """True if `traces` stores rollouts."""

    @property
    def link(self) -> str:
        """The run's address, or the command that opens it."""
        raise NotImplementedError

    def log(self, lines: Sequence[MetricLine]) -> None:
        """Forward these metrics."""
        raise NotImplementedError

    def artifact(self, path: Path, folder: str = "") -> None:
        """Store a small file with the run, if the tracking system supports files."""

    def traces(self, source: str, step: int, rollouts: Sequence[SampledRollout], time_ns: int) -> None:
        """Store rollouts of a step, sampled at `time_ns` (since 1970), if `takes_traces`. A repeated call replaces
        them."""

    def checkpoint(self, step: int, path: Path) -> None:
        """Register a complete checkpoint, if the tracking system supports models."""

    def score(self, step: int, value: float) -> bool:
        """Record the eval score of a checkpoint. Return False if the checkpoint is not registered yet."""
        return True

    def best(self, step: int) -> None:
        """Mark a registered checkpoint, whose score has been recorded, as the best of the scores that count."""

    def close(self, outcome: RunOutcome) -> None:
        """Mark the run as ended; it may be reopened."""


MONITORS: Registry[Callable[..., Writer]] = Registry("monitor", leading=2)
"""Name → (info, checkpoint_root_dir, **monitor_args) → Writer. Libraries are imported when a writer opens."""


AWAY = (
    "locked", "unable to open", "refused", "Max retries exceeded", "timed out", "Temporary failure", "is full",
    "No space left", "Connection aborted", "does not answer", "Current state is deleted",
)  # fmt: skip
"""Parts of error messages of a tracking system that is away, or in which the run was deleted. Later attempts, possibly
with a new run, succeed."""


def is_away(error: BaseException) -> bool:
    """True if an error means that the tracking system is away, not that it is broken or refuses access."""
    return isinstance(error, ConnectionError | TimeoutError) or any(sign in str(error) for sign in AWAY)


def full_names(line: MetricLine) -> dict[str, float]:
    """Return the line's metrics by names that are unique across sources.

    Trainer and evals keep their names (`response_length/mean`, `eval/…`). An explorer's metrics, many of which the
    trainer has too, and names without a group are prefixed with their source.
    """
    below = stream_of(line.source) == "explorer"
    names = {name: f"{line.source}/{name}" if below or "/" not in name else name for name in line.metrics}
    return {names[name]: value for name, value in line.metrics.items()}


def flatten(config: Mapping[str, Any]) -> dict[str, Any]:
    """Flatten `{"a": {"b": 1}}` to `{"a.b": 1}`, with secrets masked and empty values left out."""
    empty: tuple[Any, ...] = (None, "", [], {})
    return {key: value for key, value in leaves(without_secrets(dict(config))) if value not in empty}


def leaves(value: Any, prefix: str = "", entry: str = ".{}") -> Iterator[tuple[str, Any]]:
    """Yield each value that is neither a section nor a list of sections, with its dotted key, in which `entry` is the
    form of a position in a list."""
    if isinstance(value, Mapping) and (value or not prefix):
        for name, part in value.items():
            yield from leaves(part, f"{prefix}.{name}" if prefix else str(name), entry)
    elif isinstance(value, list) and any(isinstance(part, Mapping) for part in value):
        for position, part in enumerate(value):
            yield from leaves(part, prefix + entry.format(position), entry)
    else:
        yield prefix, value


@MONITORS.register("tensorboard")
class TensorBoardWriter(Writer):
    """Event files in `<job_dir>/monitor/tensorboard`. A resumed run adds another file."""

    def __init__(self, info: RunInfo, _checkpoint_root_dir: Path) -> None:
        # Not torch's SummaryWriter: the flow does not otherwise need torch, which takes seconds to import.
        from tensorboard.summary.writer.event_file_writer import EventFileWriter

        self.faults: tuple[type[Exception], ...] = (OSError,)
        self._folder = info.job_dir / "monitor" / "tensorboard"
        self._writer = EventFileWriter(str(self._folder))

    @property
    def link(self) -> str:
        return shlex.join([sys.executable, "-m", "tensorboard.main", "--logdir", str(self._folder)])

    def log(self, lines: Sequence[MetricLine]) -> None:
        for line in lines:
            for name, value in full_names(line).items():
                self._add(line.step, line.time, tag=name, simple_value=value)
        self._writer.flush()

    def artifact(self, path: Path, folder: str = "") -> None:
        """Keep Markdown, text and YAML files as text; ignore others."""
        if path.suffix in (".md", ".txt", ".yaml"):
            name = f"{folder}/{path.name}" if folder else path.name
            text = {"dtype": "DT_STRING", "string_val": [path.read_bytes()], "tensor_shape": {"dim": [{"size": 1}]}}
            metadata = {"plugin_data": {"plugin_name": "text"}}
            self._add(0, time.time(), tag=f"{name}/text_summary", tensor=text, metadata=metadata)

    def score(self, step: int, value: float) -> bool:
        self._add(step, time.time(), tag="eval/score", simple_value=value)
        return True

    def close(self, outcome: RunOutcome) -> None:
        self._writer.close()

    def _add(self, step: int, seconds: float, **value: Any) -> None:
        """Queue one value (fields of `Summary.Value`) of `step` at the Unix time `seconds`."""
        from tensorboard.compat.proto.event_pb2 import Event
        from tensorboard.compat.proto.summary_pb2 import Summary

        summary = Summary(value=[Summary.Value(**value)])
        self._writer.add_event(Event(wall_time=seconds, step=step, summary=summary))


@MONITORS.register("wandb")
class WandbWriter(Writer):
    """A W&B run in `<job_dir>/monitor/wandb`; `mode: offline` in `monitor_args` (or WANDB_MODE) needs no network.

    An explorer in a separate flow has its own W&B run, in the run's group: W&B allows one writer.
    """

    per_explorer = True

    def __init__(
        self,
        info: RunInfo,
        _checkpoint_root_dir: Path,
        base_url: str | None = None,
        api_key: str | None = None,
        mode: str | None = None,
    ) -> None:
        import wandb
        from wandb.errors import Error

        self.faults: tuple[type[Exception], ...] = (Error, OSError)
        folder = info.job_dir / "monitor"
        private_folder(folder)
        note = _kept(folder / (f"wandb_{info.explorer}.json" if info.explorer else "wandb.json"), info)
        self.run_id = str(note["id"])
        self.evals_id = info.identity if any(folder.glob("wandb_*.json")) else self.run_id
        # By default all parts of an asynchronous run in one process would write to the run opened first.
        settings: dict[str, Any] = {"silent": True, "console": "off", "reinit": "create_new"}
        connection = {"base_url": base_url, "api_key": api_key}
        settings |= {name: value for name, value in connection.items() if value}
        try:
            self._run = wandb.init(
                project=info.project,
                name=f"{info.name} {info.explorer}".strip(),
                group=info.parent_dir.name if info.parent_dir else info.name,
                id=self.run_id,
                resume="allow",
                dir=str(folder),
                config=without_secrets(info.config),
                mode=mode or os.environ.get("WANDB_MODE"),  # type: ignore[arg-type]
                tags=sorted(info.tags.values()),
                settings=wandb.Settings(**settings),
            )
        except Error as error:
            advice = "Set monitor.monitor_args.api_key or WANDB_API_KEY, or monitor_args.mode: offline."
            raise TrinityError(f"W&B does not open: {error} {advice}") from error
        self._run.define_metric("*", step_metric="step")

    @property
    def link(self) -> str:
        """The run's page, or the command that uploads an offline run."""
        sync = [sys.executable, "-m", "wandb", "sync", str(Path(self._run.dir).parent)]
        return self._run.url or shlex.join(sync)

    def log(self, lines: Sequence[MetricLine]) -> None:
        """Log each line with its own step, because sources may be at different steps."""
        for line in lines:
            self._run.log({"step": line.step, **full_names(line)})

    def artifact(self, path: Path, folder: str = "") -> None:
        self._run.save(str(path), base_path=str(path.parent), policy="now")

    def score(self, step: int, value: float) -> bool:
        self._run.log({"step": step, "eval/score": value})
        return True

    def close(self, outcome: RunOutcome) -> None:
        self._run.finish(exit_code=0 if outcome.is_success else 1)


def _kept(note: Path, info: RunInfo) -> dict[str, Any]:
    """Read the note in the job dir with the run's `id`. A resumed run continues the same W&B run; a copy does not."""
    content = read_json(note)
    if "id" not in content or not info.is_own(content):
        content = {"id": uuid4().hex[:12]}
    if info.identity:
        content["identity"] = info.identity
    write_json(note, content)
    return content
