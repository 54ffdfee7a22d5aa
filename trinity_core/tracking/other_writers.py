"""TensorBoard (files below the job dir) and Weights & Biases (offline too)."""

from __future__ import annotations

import os
import shlex
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any
from uuid import uuid4

from trinity_core.config.secrets import without_secrets
from trinity_core.errors import TrinityError
from trinity_core.files import read_json, write_json
from trinity_core.tracking.metrics_file import MetricLine
from trinity_core.tracking.writers import (
    MONITORS,
    RunInfo,
    RunOutcome,
    Writer,
    full_names,
)


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
        folder.mkdir(parents=True, exist_ok=True)
        kept = _kept(folder / (f"wandb_{info.explorer}.json" if info.explorer else "wandb.json"), info)
        self.run_id = str(kept["id"])
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
        self._run.finish(exit_code=0 if outcome is RunOutcome.FINISHED else 1)


def _kept(note: Path, info: RunInfo) -> dict[str, Any]:
    """Read the note in the job dir with the run's `id`. A resumed run continues the same W&B run; a copy does not."""
    kept = read_json(note) or {}
    if "id" not in kept or not info.is_own(kept):
        kept = {"id": uuid4().hex[:12]}
    if info.identity:
        kept["identity"] = info.identity
    write_json(note, kept)
    return kept
