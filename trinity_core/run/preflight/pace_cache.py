"""Seconds per step on this machine, measured by a short real run (the trial) and cached for later plans.

One file in the user's cache folder for each machine and each set of settings that affect speed. See docs/flows.md.
"""

from __future__ import annotations

import hashlib
import json
import logging
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from statistics import fmean

from pydantic import TypeAdapter, ValidationError

from trinity_core.base.files import cache_folder, clear_errors, read_json, write_json
from trinity_core.base.processes import cores
from trinity_core.config import Config, public_dict
from trinity_core.exchange.tracking.metrics_file import MetricLine, series
from trinity_core.hosting.gpus import survey
from trinity_core.run.verdicts import asks_person

log = logging.getLogger(__name__)

STEPS = 6
LEFT_OUT = 2
"""First steps that do not count, because memory is mapped and caches are filled."""
EXPLORING = {"generate": ("generate",), "reward": ("reward",), "weight sync": ("weight_sync",)}
TRAINING = {"train": ("lay_out", "log_probs", "values", "advantages", "update_critic", "update_actor")}
"""Parts of a step, as names of the metrics `timing_s/…` of explorer and trainer."""
SHOWN = 0.02
"""Share of a step below which a part is not shown."""
PACKAGES = ("trinity-flows", "torch", "vllm", "deepspeed", "transformers")
NAMES = ("project", "name", "group", "ray_namespace")
"""Settings that only name or place a run. Those that `trial_of` sets are ignored too."""


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
        "trainer.total_steps": STEPS,
        "buffer.explorer_input.eval_tasksets": [],
        "explorer.api_port": 0,
        "trainer.save_interval": 0,
        "monitor.monitor_type": "tensorboard",
        "monitor.monitor_args": {},
        "monitor.prometheus_port": 0,
        "monitor.enable_ray_timeline": False,
    }
    if not config.is_supervised:
        changed["buffer.trainer_input.experience_buffer.path"] = None
    if config.data_processor.experience_pipeline is not None:
        changed["data_processor.experience_pipeline.input_save_path"] = None
        changed["data_processor.experience_pipeline.save_input"] = False
    return config.with_values(changed)


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


def pace_of(lines: Sequence[MetricLine], began: float, left_out: int, measured: str) -> Pace:
    """Return the pace of a run that began at `began` (Unix seconds), without its slower first `left_out` steps.

    Raises ValueError if no step is left.
    """
    ends = {line.step: line.time for line in lines if line.source == "trainer"}
    counted = [step for step in sorted(ends) if step > left_out and step - 1 in ends]
    if not counted:
        raise ValueError(f"{len(ends)} steps were trained; the first {left_out} do not count")
    step = fmean(ends[step] - ends[step - 1] for step in counted)
    parts = _parts(lines, counted, EXPLORING, "explorer") | _parts(lines, counted, TRAINING, "trainer")
    first = ends[min(ends)] - began
    shown = {name: seconds for name, seconds in parts.items() if seconds >= SHOWN * step}
    return Pace(step, max(first - step, 0.0), shown, measured)


def _parts(
    lines: Sequence[MetricLine], steps: Sequence[int], parts: Mapping[str, tuple[str, ...]], source: str
) -> dict[str, float]:
    of_source = [line for line in lines if line.source == source]
    means = {}
    for part, names in parts.items():
        timings = [series(of_source, f"timing_s/{name}") for name in names]
        means[part] = fmean(sum(timing.get(step, 0.0) for timing in timings) for step in steps)
    return means


def folder() -> Path:
    """Return the folder for paces: `trinity-flows/paces` in $XDG_CACHE_HOME or ~/.cache."""
    return cache_folder() / "paces"


def make_folder() -> None:
    with clear_errors("making", folder(), "choose another folder with XDG_CACHE_HOME"):
        folder().mkdir(parents=True, exist_ok=True)


def cache_file(config: Config) -> Path:
    settings = public_dict(trial_of(config, Path()))
    facts = {
        "settings": {name: value for name, value in settings.items() if name not in NAMES},
        "model": _shape(Path(config.model.model_path)),
        "machine": machine(),
        "packages": versions_of(PACKAGES),
    }
    digest = hashlib.sha256(json.dumps(facts, sort_keys=True, default=str).encode()).hexdigest()
    return folder() / f"{digest[:16]}.json"


def versions_of(packages: Iterable[str]) -> dict[str, str]:
    """Return the installed version of each package; "" if missing."""
    versions = {}
    for name in packages:
        try:
            versions[name] = version(name)
        except PackageNotFoundError:
            versions[name] = ""
    return versions


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


def machine() -> dict[str, object]:
    """Return the properties of this machine that determine its speed."""
    lines = Path("/proc/cpuinfo").read_text(errors="replace").splitlines() if Path("/proc/cpuinfo").exists() else []
    models = sorted({line.partition(":")[2].strip() for line in lines if line.startswith("model name")})
    return {
        "processors": models,
        "cpus": cores(),
        "gpus": sorted(gpu.uuid for gpu in survey()),
    }


def _shape(model: Path) -> str:
    """Return the text of its config.json; empty for a model that does not exist yet, or is on the hub."""
    path = model / "config.json"
    return path.read_text() if path.is_file() else ""
