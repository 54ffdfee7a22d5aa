"""What `trinity plan` says: what each stage of a configuration will do, before anything is loaded."""

from __future__ import annotations

import json
import math
from dataclasses import asdict, dataclass
from pathlib import Path

from trinity_core.config import Config, stages


@dataclass(frozen=True, slots=True)
class StageOutlook:
    """What a stage will do. None stands for what it does not do, or what cannot be known before it runs."""

    name: str
    project: str
    algorithm: str
    mode: str
    job_dir: str
    model: str
    """What `model.model_path` says; a later stage begins with the weights of the one before it."""
    parameters: int | None
    """Parameters of the model's folder; None where it is not there yet, or holds no safetensors."""
    total_steps: int | None
    """None: until the data has been passed over as often as configured."""
    tasks_a_step: int | None
    rollouts_a_step: int | None
    sampled_tokens_a_step: int | None
    """At most, with one turn a rollout: every response as long as `max_response_tokens`."""
    experiences_a_step: int | None
    eval_interval: int | None
    save_interval: int | None
    sync_interval: int | None


def planned(config: Config) -> list[StageOutlook]:
    """The stages of a checked configuration, in order; only the headers of weight files are read."""
    return [_stage(each) for each in stages(config)]


def _stage(config: Config) -> StageOutlook:
    explores, trains = config.mode in ("both", "explore"), config.mode in ("both", "train")
    tasks = config.buffer.batch_size if explores else None
    rollouts = tasks * config.algorithm.repeat_times if tasks else None
    return StageOutlook(
        name=config.name,
        project=config.project,
        algorithm=config.algorithm.algorithm_type,
        mode=config.mode,
        job_dir=str(config.job_dir),
        model=config.model.model_path,
        parameters=parameters_of(Path(config.model.model_path)),
        total_steps=config.buffer.total_steps if explores or trains else None,
        tasks_a_step=tasks,
        rollouts_a_step=rollouts,
        sampled_tokens_a_step=rollouts * config.model.max_response_tokens if rollouts else None,
        experiences_a_step=config.buffer.train_batch_size if trains else None,
        eval_interval=config.explorer.eval_interval if explores else None,
        save_interval=config.trainer.save_interval if trains else None,
        sync_interval=config.synchronizer.sync_interval if explores and trains else None,
    )


def parameters_of(folder: Path) -> int | None:
    """Parameters in a folder's safetensors, from their headers alone; None if it has none."""
    files = sorted(folder.glob("*.safetensors"))
    return sum(map(_parameters, files)) if files else None


def _parameters(file: Path) -> int:
    """Parameters in one file: its first 8 bytes are the header's length, and the header names each tensor's shape."""
    with file.open("rb") as opened:
        header = json.loads(opened.read(int.from_bytes(opened.read(8), "little")))
    return sum(math.prod(each["shape"]) for name, each in header.items() if name != "__metadata__")


def planned_text(given: list[StageOutlook]) -> str:
    """The lines for a terminal."""
    return "\n".join(line for each in given for line in _lines(each))


def planned_json(given: list[StageOutlook]) -> str:
    """It as JSON: an object with the list `stages`."""
    return json.dumps({"stages": [asdict(each) for each in given]}, indent=2)


def _lines(stage: StageOutlook) -> list[str]:
    known = "" if stage.parameters is None else f" ({stage.parameters:,} parameters)"
    lines = [
        f"{stage.project}/{stage.name}: {stage.algorithm}, mode {stage.mode}, {stage.job_dir}",
        f"  model    {stage.model}{known}",
    ]
    if stage.tasks_a_step or stage.experiences_a_step:
        lines.append(f"  steps    {stage.total_steps or 'until the data is used up'}")
    if stage.tasks_a_step:
        rollouts = f"{stage.tasks_a_step:,} tasks, {stage.rollouts_a_step:,} rollouts"
        lines.append(f"  explore  {rollouts}, at most {stage.sampled_tokens_a_step:,} sampled tokens a turn, each step")
    if stage.experiences_a_step:
        lines.append(f"  train    {stage.experiences_a_step:,} experiences each step")
    every = {"eval": stage.eval_interval, "save": stage.save_interval, "sync": stage.sync_interval}
    return [*lines, *(f"  {name:8} every {steps:,} steps" for name, steps in every.items() if steps)]
