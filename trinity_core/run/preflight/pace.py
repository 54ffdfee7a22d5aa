"""`trinity plan --measure`: seconds per step on this machine, by a short real run (the trial), kept for later plans.

One file in the user's cache folder for each machine and each set of settings that affect speed. See docs/flows.md.
"""

from __future__ import annotations

import hashlib
import json
import logging
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field
from datetime import datetime
from pathlib import Path
from platform import node
from statistics import fmean

import psutil
from pydantic import TypeAdapter, ValidationError

from trinity_core.base.children import start_detached
from trinity_core.base.errors import TrinityError
from trinity_core.base.files import cache_folder, clear_errors, read_json, write_json
from trinity_core.base.processes import cores, stop
from trinity_core.base.waits import poll
from trinity_core.config import Config, public_dict, stages, to_yaml
from trinity_core.config.schema.monitor import PauseConfig, StopConfig
from trinity_core.exchange.tracking.metrics_file import MetricLine, read_metrics, series
from trinity_core.hosting.gpus import survey
from trinity_core.run.verdicts import asks_person
from trinity_core.version import __version__

log = logging.getLogger(__name__)

STEPS, LEFT_OUT = 6, 2
"""Steps of a trial, and how many first ones do not count, because memory is mapped and caches are filled."""
PARTS = {
    "generate": ("explorer", "generate"),
    "reward": ("explorer", "reward"),
    "weight sync": ("explorer", "weight_sync"),
    "train": ("trainer", "lay_out", "log_probs", "values", "advantages", "update_critic", "update_actor"),
}
"""Parts of a step, by the source and the names of their metrics `timing_s/…`."""
SHOWN = 0.02
"""Share of a step below which a part is not shown."""
NAMES = ("project", "name", "group", "ray_namespace")
"""Settings that only name or place a run. Those that `trial_of` sets are ignored too."""
MOST_SECONDS = 1800.0
"""Time for a stage's trial; steps of more than five minutes are better observed in the run itself."""
LOOK_SECONDS, GRACE_SECONDS, LAST_LINES = 0.5, 30.0, 8


@dataclass(frozen=True, slots=True)
class Pace:
    """Seconds of a run. Evaluations, and checkpoints between steps, come on top."""

    step: float
    """Average time from the end of a step to the end of the next."""
    start: float
    """Time from the command to the first step: processes start and load the model."""
    parts: dict[str, float] = field(default_factory=dict)
    """Part of a step → seconds. Parts may overlap; those below a share of `SHOWN` are left out."""
    measured: str = ""
    """Local time of the measurement, to the minute."""

    def whole(self, steps: int) -> float:
        return self.start + steps * self.step


def hindrance(config: Config) -> str:
    """Return why a stage cannot be measured, or ""."""
    if asks_person(config):
        return "it waits for a person's verdicts (human_verdicts)"
    if config.explores and any(taskset.storage_type == "queue" for taskset in config.buffer.explorer_input.tasksets):
        return "its tasks come from a queue (storage_type: queue), which a trial would take from the run"
    if config.cluster.ray_address:
        return "it runs on a Ray cluster (cluster.ray_address), whose other machines do not see this one's trial"
    if config.mode == "both" or (config.mode == "train" and config.is_supervised):
        return ""
    if config.mode == "bench":
        return "it evaluates (mode: bench) and has no steps"
    return f"it is one part of an asynchronous run (mode: {config.mode}), whose speed depends on the other"


def trial_of(config: Config, folder: Path) -> Config:
    """Return the stage with `STEPS` steps below `folder`, without evaluations and without the user's stores and
    ports."""
    changed = {
        "checkpoint_root_dir": str(folder),
        "continue_from_checkpoint": True,
        "buffer.total_steps": STEPS,
        "buffer.explorer_input.eval_tasksets": [],
        "explorer.api_port": 0,
        "explorer.eval_beside_training": False,
        "trainer.save_interval": 0,
        "monitor.monitor_type": "tensorboard",
        "monitor.monitor_args": {},
        "monitor.prometheus_port": 0,
        "monitor.pause": PauseConfig(),
        "monitor.stop": StopConfig(),
        "monitor.enable_ray_timeline": False,
        "data_processor.experience_pipeline.input_save_path": None,
        "data_processor.experience_pipeline.save_input": False,
    }
    if not config.is_supervised:
        changed["buffer.trainer_input.experience_buffer.path"] = None
    return config.with_values(changed)


def measure(config: Config, say: Callable[[str], None]) -> None:
    """Measure the stages of a checked configuration that are not measured yet.

    Raises TrinityError if a trial fails or takes longer than `MOST_SECONDS`, or if paces cannot be saved.
    """
    for stage in stages(config):
        if why := hindrance(stage):
            say(f"{stage.name} is not measured: {why}.")
        elif pace := cached_pace(stage):
            say(f"{stage.name} was measured {pace.measured}; to measure it again, remove {cache_file(stage)}.")
        else:
            make_folder()  # fails early if the measurement could not be saved
            keep(stage, measured_pace(stage, say))


def measured_pace(stage: Config, say: Callable[[str], None]) -> Pace:
    """Run `STEPS` steps of a stage in a separate process, in a temporary folder, and return their pace."""
    say(f"Measuring {stage.name}: {STEPS} steps on this machine. Processes start and load the model …")
    with tempfile.TemporaryDirectory(prefix="trinity-plan-") as name:
        folder, trial = Path(name), trial_of(stage, Path(name))
        (folder / "trial.yaml").write_text(to_yaml(trial))
        command = [sys.executable, "-m", "trinity_core.run", "--config", str(folder / "trial.yaml")]
        began = time.time()
        with _running(command, folder / "trial.log", say) as process:
            _watch(process, trial.job_dir, stage.name, say)
        lines = read_metrics(trial.job_dir)
        if process.returncode:
            last = (folder / "trial.log").read_text(errors="replace").strip().splitlines()[-LAST_LINES:]
            raise TrinityError(f"{stage.name} could not be measured, its trial ended with:\n{os.linesep.join(last)}")
    try:
        return pace_of(lines, began, LEFT_OUT, f"{datetime.now():%Y-%m-%d %H:%M}")
    except ValueError as error:
        raise TrinityError(f"{stage.name} could not be measured: {error}. Does its data last for {STEPS}?") from None


@contextmanager
def _running(command: Sequence[str], log: Path, say: Callable[[str], None]) -> Iterator[subprocess.Popen[bytes]]:
    """Run a process with its output in `log`; it is ended, with all its descendants, however this context ends."""
    process = start_detached(command, log)
    try:
        yield process
    finally:
        if process.poll() is None:
            say(f"Ending the trial, within {GRACE_SECONDS:g} s …")
            stop(psutil.Process(process.pid), GRACE_SECONDS)
            process.wait(GRACE_SECONDS)


def _watch(trial: subprocess.Popen[bytes], job_dir: Path, name: str, say: Callable[[str], None]) -> None:
    """Report each step of the trial until it ends. Raises TrinityError if that takes too long."""
    done = 0
    for _ in poll(MOST_SECONDS, pause=LOOK_SECONDS):
        if trial.poll() is not None:
            return
        steps = max((line.step for line in read_metrics(job_dir) if line.source == "trainer"), default=0)
        if steps > done:
            done = steps
            say(f"Measuring {name}: step {done} of {STEPS}")
    raise TrinityError(
        f"{name} could not be measured: after {MOST_SECONDS / 60:g} minutes it has done {done} of {STEPS} steps. "
        "Measure it with a smaller batch_size or max_response_tokens, given as key=value.",
        key="buffer.batch_size",
    )


def pace_of(lines: Sequence[MetricLine], began: float, left_out: int, measured: str) -> Pace:
    """Return the pace of a run that began at `began` (Unix seconds), without its slower first `left_out` steps.

    Raises ValueError if no step is left.
    """
    ends = {line.step: line.time for line in lines if line.source == "trainer"}
    counted = [step for step in sorted(ends) if step > left_out and step - 1 in ends]
    if not counted:
        raise ValueError(f"{len(ends)} steps were trained; the first {left_out} do not count")
    step = fmean(ends[step] - ends[step - 1] for step in counted)
    parts = {}
    for part, (source, *names) in PARTS.items():
        timings: list[Mapping[int, float]] = [
            series([line for line in lines if line.source == source], f"timing_s/{name}") for name in names
        ]
        parts[part] = fmean(sum(timing.get(number, 0.0) for timing in timings) for number in counted)
    shown = {name: seconds for name, seconds in parts.items() if seconds >= SHOWN * step}
    return Pace(step, max(ends[min(ends)] - began - step, 0.0), shown, measured)


def folder() -> Path:
    """Return the folder for paces: `trinity-flows/paces` in $XDG_CACHE_HOME or ~/.cache."""
    return cache_folder() / "paces"


def make_folder() -> None:
    with clear_errors("making", folder(), "choose another folder with XDG_CACHE_HOME"):
        folder().mkdir(parents=True, exist_ok=True)


def cache_file(config: Config) -> Path:
    """Return the file of a stage's pace, by its settings, the model's shape, this machine and this release."""
    settings = {name: value for name, value in public_dict(trial_of(config, Path())).items() if name not in NAMES}
    described = Path(config.model.model_path, "config.json")
    shape = described.read_text() if described.is_file() else ""
    facts = [settings, shape, node(), cores(), sorted(gpu.uuid for gpu in survey()), __version__]
    return folder() / f"{hashlib.sha256(json.dumps(facts, sort_keys=True, default=str).encode()).hexdigest()[:16]}.json"


def cached_pace(config: Config) -> Pace | None:
    """Return the pace of a stage on this machine; None if there is none, or, with a warning, if it is damaged."""
    path = cache_file(config)
    try:
        record = read_json(path)
        return TypeAdapter(Pace).validate_python(record) if record else None
    except (OSError, ValidationError) as error:
        log.warning("The pace in %s cannot be read and is taken as not measured: %s", path, error)
        return None


def keep(config: Config, pace: Pace) -> None:
    make_folder()
    write_json(cache_file(config), asdict(pace))
