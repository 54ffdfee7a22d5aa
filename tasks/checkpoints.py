"""What a run leaves behind for others to use: converted models, digests, summaries."""

from __future__ import annotations

import json
import time
from hashlib import sha256
from pathlib import Path
from typing import Any

from prefect import task
from prefect.cache_policies import NO_CACHE

from tasks.reports import show_curve, show_rollouts, show_summary, show_tracking
from tasks.resolve import pick_stage
from trinity_core.config import Config, stages, to_dict
from trinity_core.files import read_json, write_atomically
from trinity_core.runtime.configuration import load_checked
from trinity_core.runtime.session import Session
from trinity_core.tracking import read_metrics
from trinity_core.tracking.forwarder import eval_scores, run_note

SUMMARY = "summary.json"
OUTCOME = ("mode", "seed", "algorithm", "model", "buffer", "explorer", "trainer", "data_processor")
"""Sections of a configuration that decide what a run makes."""


@task(name="publish", cache_policy=NO_CACHE, persist_result=False)
def publish(session: Session, training: dict[str, Any]) -> dict[str, Any]:
    """Convert the last checkpoint, show the results, and note them in the job's `summary.json`."""
    from trinity_core.checkpoints.resume import latest_whole

    config = session.config
    step = latest_whole(config.job_dir) or 0
    scores = eval_scores(read_metrics(config.job_dir))
    summary: dict[str, Any] = {
        "project": config.project,
        "name": config.name,
        "step": step,
        "scores": {f"step {each}": value for each, value in scores.items()},
        "score": scores.get(step),
        "checkpoint_dir": str(config.job_dir / f"global_step_{step}") if step else None,
        "hf_dir": str(session.huggingface_folder(step)) if step else None,
        "tracking": session.tracking().link,
        "tracking_uri": run_note(config.job_dir).get("uri"),
        "curve": _text(show_curve(config)),
        "seconds": round(time.monotonic() - session.began, 2),
        "made_from": digest_of(config),
        "results": training,
    }
    show_rollouts(config)
    show_tracking(config, summary["tracking"])
    show_summary(config, {name: value for name, value in summary.items() if name != "results"})
    write_summary(config, summary)
    return summary


@task(name="convert", cache_policy=NO_CACHE, persist_result=False)
def convert_folder(checkpoint_dir: str, base_model_dir: str | None = None) -> list[str]:
    """Convert every checkpoint below a folder to Hugging Face format; the folders made."""
    from trinity_core.checkpoints.convert import convert_all

    return [
        str(folder) for folder in convert_all(Path(checkpoint_dir), Path(base_model_dir) if base_model_dir else None)
    ]


def job_dir_of(config: str, overrides: list[str], stage: str = "") -> str:
    """The folder of the run that a configuration describes; of several stages that of `stage`, or the last to train."""
    loaded = load_checked(config, overrides)
    if stage:
        return str(pick_stage(loaded, stage)[0].job_dir)
    parts = stages(loaded)
    trained = [part for part in parts if part.mode in ("both", "train")]
    return str((trained or parts)[-1].job_dir)


def digest_of(config: Config) -> str:
    """SHA-256 of what decides the outcome of a run: its settings but for those of machines, names and tracking."""
    sections = _alike({name: value for name, value in to_dict(config).items() if name in OUTCOME})
    return sha256(json.dumps(sections, sort_keys=True, default=str).encode()).hexdigest()


def write_summary(config: Config, summary: dict[str, Any]) -> None:
    """`<job_dir>/summary.json`, whole or not at all."""
    config.job_dir.mkdir(parents=True, exist_ok=True)
    write_atomically(config.job_dir / SUMMARY, json.dumps(summary, indent=2, default=str).encode() + b"\n")


def read_summary(config: Config) -> dict[str, Any] | None:
    """What a finished run has noted; None where there is nothing, or nothing readable: then it counts as not done."""
    return read_json(config.job_dir / SUMMARY)


def _text(path: Path | None) -> str | None:
    return None if path is None else str(path)


def _alike(value: Any) -> Any:
    """The same for numbers that are the same: 1024 and 1024.0."""
    if isinstance(value, dict):
        return {name: _alike(each) for name, each in value.items()}
    if isinstance(value, list):
        return [_alike(each) for each in value]
    return int(value) if isinstance(value, float) and value.is_integer() else value
