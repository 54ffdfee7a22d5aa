"""The scores of checkpoints; and the summary of a run: scores, steps, folders, and what it was made from."""

from __future__ import annotations

import json
import logging
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict
from functools import partial
from pathlib import Path
from statistics import fmean
from typing import Any

from trinity_core.base.errors import DataError, TrinityError
from trinity_core.base.files import read_json, when_room, write_atomically
from trinity_core.base.layout import MANIFEST
from trinity_core.base.timing import duration
from trinity_core.config import Config
from trinity_core.config.paths import curated_folder
from trinity_core.exchange.checkpoints.commit import damage
from trinity_core.exchange.checkpoints.resume import latest_whole, whole_steps
from trinity_core.exchange.store.run_store import open_run_store
from trinity_core.exchange.tracking.curve import LearningCurve, curve_title
from trinity_core.exchange.tracking.metrics_file import explorer_source, read_metrics, series
from trinity_core.exchange.tracking.mlflow_writer import run_note
from trinity_core.exchange.tracking.pauses import read_pauses, recorded_pause
from trinity_core.exchange.tracking.run_record import read_record
from trinity_core.exchange.tracking.scores import (
    best_steps,
    evaluation_of,
    scored_text,
    step_scores_text,
    uncounted_steps,
    valid_scores,
)
from trinity_core.results.doctor import Diagnosis
from trinity_core.run.attempt import Frontend, RunAttempt
from trinity_core.run.examination import examine

log = logging.getLogger(__name__)
REWARD_STEPS = 5
UNCOUNTED = (
    "the scores of steps %s do not count: they were made with other settings, or by a release that scored otherwise; "
    "`trinity evaluate --config FILE --which missing` scores the checkpoints that are kept"
)


def publish(attempt: RunAttempt, results: dict[str, Any], frontend: Frontend) -> dict[str, Any]:
    found = [] if attempt.config.mode == "bench" else examine(attempt.config, frontend, "end")
    for diagnosis in found:
        log.warning("%s", diagnosis)
    summary = summarise(attempt, results, found)
    frontend.show(attempt.config, summary)
    return summary


def summarise(attempt: RunAttempt, results: dict[str, Any], findings: Sequence[Diagnosis] = ()) -> dict[str, Any]:
    """Convert the last checkpoint, and write the run's summary to the job's folder (`summary_path`); return it.

    A run that only evaluates has its scores as its summary, which is not written, so that the training's stays. A run
    that only explores converts nothing, because its trainer does. An external model's summary is written, because it
    has no training. `seconds` includes all attempts.
    """
    config = attempt.config
    if config.mode == "bench":
        return summary_of_scores(config, time.monotonic() - attempt.began)
    step = latest_whole(config.job_dir) or 0
    curve = LearningCurve(config.job_dir, curve_title(config)).draw()
    record = None if config.explores_alone else read_record(config.job_dir)
    seconds = time.monotonic() - attempt.began + (record.earlier if record is not None else 0.0)
    summary = _scored(config, step, valid_scores(config), seconds) | {
        "checkpoint_dir": str(config.job_dir / f"global_step_{step}") if step else None,
        "hf_dir": str(attempt.huggingface_folder(step)) if step and not config.explores_alone else None,
        "tracking": attempt.tracking_link(),
        "tracking_uri": run_note(config.job_dir).get("uri"),
        "curve": None if curve is None else str(curve),
        "reward": _first_and_last_reward(config.job_dir),
        "made_from": attempt.stage.made_from,
        "curated_tasks": curated_folder(config),
        "results": _recounted(config, results),
        "stopped_early": attempt.stop_rules.reason,
        "spent": attempt.stop_rules.spent(),
        "best": _best(config),
        "pauses": [asdict(pause) for pause in read_pauses(config.job_dir)],
        "findings": [asdict(diagnosis) for diagnosis in findings],
    }
    write_summary(config, summary)
    if steps := uncounted_steps(config):
        log.warning(UNCOUNTED, ", ".join(map(str, steps)))
    return summary


def _recounted(config: Config, results: dict[str, Any]) -> dict[str, Any]:
    """Count `untrained_rows` again where both parts did: a trainer ends before the explorer stores its last step."""
    parts = {"train": None, "explore": config.explorer.name}
    if any(results.get(part, {}).get("untrained_rows") is None for part in parts):
        return results
    with open_run_store(config) as store:
        counted = {part: {"untrained_rows": store.untrained(explorer)} for part, explorer in parts.items()}
    return results | {part: results[part] | rows for part, rows in counted.items()}


def _best(config: Config) -> dict[str, Any] | None:
    """Return step, score and folder of the best checkpoint by held-out score; None without any."""
    scores = valid_scores(config)
    best = [step for step in best_steps(config, whole_steps(config.job_dir)) if step in scores]
    if not best:
        return None
    step = max(best, key=lambda step: (scores[step], -step))
    return {"step": step, "score": scores[step], "checkpoint_dir": str(config.layout.step(step))}


def _first_and_last_reward(job_dir: Path) -> list[float] | None:
    """Return the mean rewards of the first and the last `REWARD_STEPS` train steps; None without rewards."""
    rewards = list(series(read_metrics(job_dir), "reward/mean", "trainer").values())
    return [fmean(rewards[:REWARD_STEPS]), fmean(rewards[-REWARD_STEPS:])] if rewards else None


def summary_of_scores(config: Config, seconds: float = 0.0) -> dict[str, Any]:
    """Return all scores of the run, by step; `score` is the latest. For an external model, also write it."""
    scores = valid_scores(config)
    summary = _scored(config, max(scores, default=0), scores, seconds) | {
        "checkpoint_dir": str(config.job_dir),
        "hf_dir": None,
        "tracking": str(config.job_dir / "monitor" / "metrics.jsonl"),
    }
    if external := config.external_model:
        summary["external_model"] = {"base_url": external.base_url, "model_name": external.model_name}
        write_summary(config, summary)
    return summary


def _scored(config: Config, step: int, scores: Mapping[int, float], seconds: float) -> dict[str, Any]:
    """Return what every summary contains: its run, the score of `step`, and those of all steps."""
    return {
        "project": config.project,
        "name": config.name,
        "step": step,
        "scores": {f"step {number}": value for number, value in scores.items()},
        "score": scores.get(step),
        "evaluation": evaluation_of(config, step),
        "seconds": round(seconds, 2),
    }


def summary_text(summary: dict[str, Any]) -> str:
    lines = [f"{title:11}{text}" for title, text in summary_rows(summary)]
    return "\n".join([f"\n{summary['project']}/{summary['name']}: step {summary['step']}", *lines])


def summary_rows(summary: Mapping[str, Any]) -> list[tuple[str, str]]:
    """Return the results of a run, stage or pipeline for people, as (title, text), without what is empty or zero. A row
    without a title belongs to the one above."""
    scored = named_stages({name: score for name, score in summary["scores"].items() if score is not None})
    rows = [("scores", ", ".join(f"{name}: {score:.3f}" for name, score in scored.items()))]
    rows += [(taskset, scored_text(numbers)) for taskset, numbers in (summary.get("evaluation") or {}).items()]
    if reward := summary.get("reward"):
        rows.append(("reward", f"{reward[0]:.3g} → {reward[1]:.3g} (first and last {REWARD_STEPS} steps)"))
    rows.append(("steps", ", ".join(f"{name}: {step}" for name, step in summary.get("steps", {}).items() if step)))
    rows.append(("time", _time_text(summary)))
    for title, key in (
        ("checkpoint", "checkpoint_dir"), ("model", "hf_dir"), ("tracking", "tracking"), ("tasks", "curated_tasks"),
    ):  # fmt: skip
        rows.append((title, str(summary.get(key) or "")))
    if (best := summary.get("best")) and best["step"] != summary["step"]:
        rows.append(("best", f"step {best['step']}, score {best['score']:.3f}: {best['checkpoint_dir']}"))
    if gate := summary.get("gate"):
        rows.append(("gate", f"{gate['verdict']}: {gate['candidate']}"))
    ended = summary.get("stopped_early") or ""
    rows.append(("ended by", ended))
    pauses = [recorded_pause(pause, "pauses").text for pause in summary.get("pauses", ())]
    rows += [("paused", pause) for pause in pauses if pause not in ended]
    for name, result in summary.get("results", {}).items():
        rows += _component_rows(name, result)
    rows += [("finding", str(Diagnosis(**finding))) for finding in summary.get("findings", ())]
    return [(title, text) for title, text in rows if text]


def _time_text(summary: Mapping[str, Any]) -> str:
    """Return `8 min 38 s`, of a pipeline `8 min 38 s: base score 1 min 56 s, sft 1 min 53 s, …`; "" if nothing ran."""
    by_stage = named_stages(summary.get("stage_seconds", {}))
    parts = ", ".join(f"{name} {duration(seconds)}" for name, seconds in by_stage.items() if seconds)
    total = duration(seconds) if (seconds := summary.get("seconds")) else ""
    return f"{total}: {parts}" if total and parts else total


def _component_rows(name: str, result: Mapping[str, Any]) -> Iterator[tuple[str, str]]:
    """Yield how an explorer or a trainer has ended."""
    if "ended" in result:
        left = f", {result['untrained_rows']} untrained rows left" if result.get("untrained_rows") else ""
        of = "" if result["total_steps"] is None else f" of {result['total_steps']}"
        yield name, f"step {result['step']}{of}, {result['ended']}{left}"
    if result.get("flat_groups"):
        yield "", f"rewards taught nothing: all advantages of {result['flat_groups']} groups are 0"
    for operator, number in (result.get("dropped_experiences") or {}).items():
        yield "", f"{number} experiences dropped by {operator}"


def named_stages(values: Mapping[str, float]) -> dict[str, float]:
    """Return a pipeline's scores or seconds with display names: `before` is the base model's score."""
    return {"base score" if name == "before" else name: value for name, value in values.items()}


def summary_path(config: Config) -> Path:
    """Return `<job_dir>/summary.json`; for an explorer on its own `summary_<explorer>.json`, since others share its
    folder."""
    alone = config.explores_alone
    return config.job_dir / (f"summary_{explorer_source(config.explorer.name)}.json" if alone else "summary.json")


def write_summary(config: Config, summary: dict[str, Any]) -> None:
    when_room(partial(config.job_dir.mkdir, parents=True, exist_ok=True), config.job_dir)
    write_atomically(summary_path(config), json.dumps(summary, indent=2, default=str).encode() + b"\n")


def read_summary(config: Config) -> dict[str, Any]:
    """Read the summary of a finished run; empty if it is missing or damaged, so that the run counts as not done."""
    return read_json(summary_path(config))


def unscored_steps(config: Config, which: str) -> list[int]:
    """Return the steps selected by `which` whose weights have no score yet; 0 is the model that the engines start with,
    or an external one.

    `which` is `base`, `latest`, `missing`, `all` (including scored ones) or a step. An empty `which` follows mode
    `bench`: the latest checkpoint (or step 0 if there is none), or every one with `bench_on_latest_checkpoint: false`.
    Damaged checkpoints are skipped with a warning, as on resume. Raises TrinityError if the given step has no intact
    checkpoint. An external model has no steps: every value selects it.
    """
    if not config.buffer.explorer_input.eval_tasksets:
        raise TrinityError("There is nothing to evaluate on: buffer.explorer_input.eval_tasksets is empty.")
    if not which:
        every = not config.explorer.bench_on_latest_checkpoint and bool(whole_steps(config.job_dir))
        which = "missing" if every else "latest"
    external = config.external_model is not None and not which.isdigit()
    steps = [0] if external else steps_meant(which, config.job_dir)
    scored = {} if which == "all" else valid_scores(config)
    unscored = [step for step in steps if step not in scored]
    if which in ("missing", "all"):
        unscored = [step for step in unscored if not step or not _is_damaged(config.layout.step(step))]
    return unscored


def unscored_result(attempt: RunAttempt) -> list[int]:
    """Return the run's last checkpoint if it has no score yet and the run has engines and eval sets.

    In mode `bench`, return what `unscored_steps` returns. In `explore` and `serve`, return nothing while the trainer
    may still make checkpoints, and remove this one.
    """
    config = attempt.config
    if config.mode == "bench":
        return unscored_steps(config, "")
    if config.explores_alone and not trainer_has_finished(config):
        return []
    if not attempt.placement.engines or not config.buffer.explorer_input.eval_tasksets:
        return []
    step = latest_whole(config.job_dir)
    return [] if step is None or step in valid_scores(config) else [step]


def score_steps(attempt: RunAttempt, steps: Sequence[int]) -> dict[int, dict[str, float]]:
    """Score the weights of each step on every eval set; return step → metric → value.

    Raises TrinityError if a running trainer has removed the checkpoints of all of them meanwhile.
    """
    scores = {step: score for step in steps if (score := score_step(attempt, step)) is not None}
    if steps and not scores:
        raise TrinityError(
            f"None of the checkpoints to score is left in {attempt.config.job_dir}: training has continued and removed "
            "them (trainer.max_checkpoints_to_keep). Score a later one.",
            key="trainer.max_checkpoints_to_keep",
        )
    return scores


def score_step(attempt: RunAttempt, step: int) -> dict[str, float] | None:
    """Score the weights of a step on every eval set; None, with a warning, if a running trainer has removed them."""
    config = attempt.config
    if step and not _is_there(config, step):
        log.warning("the checkpoint of step %d has been removed and is not scored", step)
        return None
    try:
        folder = attempt.huggingface_folder(step, config.engine_adapter is None) if step else None
        scores = attempt.score(step, folder)
    except (DataError, OSError):
        if not step or _is_there(config, step):
            raise
        log.warning("the checkpoint of step %d was removed while it was scored", step)
        return None
    log.info("%s", step_scores_text(config, step, evaluation_of(config, step)))
    return scores


def _is_there(config: Config, step: int) -> bool:
    return (config.layout.step(step) / MANIFEST).exists()


def trainer_has_finished(config: Config) -> bool:
    with open_run_store(config) as store:
        return store.trainer().finished


def steps_meant(which: str, job_dir: Path) -> list[int]:
    """Return the steps of a run that a word selects; 0 is the model before training."""
    if which == "base":
        return [0]
    if which == "latest":
        return [latest_whole(job_dir) or 0]
    whole = whole_steps(job_dir)
    if which in ("missing", "all"):
        return whole
    if int(which) not in whole:
        there = ", ".join(map(str, whole)) or "none"
        raise TrinityError(f"There is no whole checkpoint of step {which}; whole ones: {there}.")
    return [int(which)]


def _is_damaged(folder: Path) -> bool:
    wrong = damage(folder)
    if wrong:
        log.warning("the checkpoint %s is skipped: %s", folder, wrong)
    return wrong is not None
