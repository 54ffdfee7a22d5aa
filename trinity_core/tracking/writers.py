"""The interface of tracking systems that metrics are forwarded to, and what they share."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from enum import Enum
from pathlib import Path
from typing import TYPE_CHECKING, Any

from trinity_core.config.secrets import without_secrets
from trinity_core.registry import Registry
from trinity_core.tracking.metrics_file import MetricLine, stream_of

if TYPE_CHECKING:
    from trinity_core.tracking.rollouts import SampledRollout


class RunOutcome(Enum):
    """The end of a run or of one attempt of it."""

    FINISHED = "finished"
    FAILED = "failed"
    CANCELLED = "cancelled"
    """Ended by a person or by SIGTERM; it may be resumed."""

    @classmethod
    def of(cls, error: BaseException | None) -> RunOutcome:
        """From what ended the run: cancellation is an exception that is no `Exception`, as with Ctrl+C."""
        if error is None:
            return cls.FINISHED
        return cls.FAILED if isinstance(error, Exception) else cls.CANCELLED


@dataclass(frozen=True, slots=True)
class RunInfo:
    """The facts of a run that a tracking system records."""

    project: str
    """The experiment (MLflow) or project (W&B)."""
    name: str
    """The run's name."""
    job_dir: Path
    config: Mapping[str, Any] = field(default_factory=dict)
    """The whole configuration; secrets are masked before they leave this process."""
    parent_dir: Path | None = None
    """The job dir of the pipeline that this run is a stage of."""
    args: Mapping[str, Any] = field(default_factory=dict)
    """`monitor.monitor_args`."""
    tags: Mapping[str, str] = field(default_factory=dict)
    keeps_status: bool = False
    """True for an evaluation or an explorer: it leaves an existing run's status unchanged, because training may still
    use the run."""
    explorer: str = ""
    """The explorer's name, if this flow only explores: others of the run are at work too."""
    identity: str = ""
    """Unique to the run: a copy of its folder is another run. Empty where that is not known yet."""

    def is_own(self, note: Mapping[str, Any]) -> bool:
        """True if a tracked run's note in the job dir is this run's, and not that of the folder it was copied from."""
        return not self.identity or note.get("identity", self.identity) == self.identity


class Writer:
    """Sends what a run has written to a tracking system. A call that raised one of `faults` may be repeated later."""

    faults: tuple[type[Exception], ...] = ()
    """Exceptions of the tracking system while it cannot be reached."""
    run_id = ""
    """Id that the tracking system gives the run, if it does. A new run is sent all lines from the first one."""
    per_explorer = False
    """True if each explorer in a separate flow has a run of its own."""
    evals_id = ""
    """With `per_explorer`, shared by all flows of a job that forward evaluations: each evaluation is sent once, to the
    run of the first of them."""
    closes_before_files = False
    """True if a run that has ended takes more files."""
    takes_traces = False
    """True if `traces` keeps rollouts."""
    counting: Collection[int] | None = None
    """The steps whose scores count now (None: all). Others were made with other eval sets, prompts or sampling."""

    @property
    def link(self) -> str:
        """The run's address, or the command that opens it."""
        raise NotImplementedError

    def log(self, lines: Sequence[MetricLine]) -> None:
        """Forward these numbers."""
        raise NotImplementedError

    def artifact(self, path: Path, folder: str = "") -> None:
        """Keep a small file with the run, in a tracking system that takes files."""

    def traces(self, source: str, step: int, rollouts: Sequence[SampledRollout], time_ns: int) -> None:
        """Keep rollouts of a step, sampled at `time_ns` (since 1970), if `takes_traces`. Repeating it replaces them."""

    def checkpoint(self, step: int, path: Path) -> None:
        """Register a complete checkpoint, in a tracking system that knows models."""

    def score(self, step: int, value: float) -> bool:
        """Record the eval score of a checkpoint; False if the checkpoint is not registered yet."""
        return True

    def close(self, outcome: RunOutcome) -> None:
        """Mark the run as ended; it may be reopened."""


MONITORS: Registry[Callable[..., Writer]] = Registry("monitor", leading=2)
"""Name -> (info, checkpoint_root_dir, **monitor_args) -> Writer. Libraries are imported when a writer opens."""


AWAY = (
    "locked", "unable to open", "refused", "Max retries exceeded", "timed out", "Temporary failure", "is full",
    "No space left", "Connection aborted", "does not answer", "Current state is deleted",
)  # fmt: skip
"""Parts of the message of a tracking system that is away, or in which the run was deleted. It takes later, in a new
run, what it does not take now."""


def is_away(error: BaseException) -> bool:
    """True if an error means that the tracking system is away, and not that it is broken or refuses us."""
    return isinstance(error, ConnectionError | TimeoutError) or any(sign in str(error) for sign in AWAY)


def full_names(line: MetricLine) -> dict[str, float]:
    """The line's metrics by their full names, such that no two sources share one.

    Trainer and evals keep their own names (`response_length/mean`, `eval/…`); an explorer's, many of which the trainer
    has too, and names without a group are put below their source.
    """
    below = stream_of(line.source) == "explorer"
    own = {name: f"{line.source}/{name}" if below or "/" not in name else name for name in line.metrics}
    return {own[name]: value for name, value in line.metrics.items()}


def flatten(config: Mapping[str, Any]) -> dict[str, str]:
    """`{"a": {"b": 1}}` -> `{"a.b": "1"}`, secrets masked. Empty values and None are left out."""
    empty: tuple[Any, ...] = (None, "", [], {})
    return {key: str(value) for key, value in leaves(without_secrets(dict(config))) if value not in empty}


def leaves(value: Any, prefix: str = "") -> Iterator[tuple[str, Any]]:
    """Each value that is no section and no list of sections, by its dotted key."""
    if isinstance(value, Mapping):
        for name, part in value.items():
            yield from leaves(part, f"{prefix}.{name}" if prefix else str(name))
    elif isinstance(value, list) and any(isinstance(part, Mapping) for part in value):
        for position, part in enumerate(value):
            yield from leaves(part, f"{prefix}.{position}")
    else:
        yield prefix, value
