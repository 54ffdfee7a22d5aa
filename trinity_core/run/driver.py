"""The driver, shared by the command line, Prefect, Studio and calls from Python, each with its own frontend.

The caller loads and checks a configuration once and passes it on as a value. `run_configuration` runs it, stage by
stage if it has stages; each goes through `resolve`, which makes a `Stage` (`stage.py`), and `run` (`loop.py`).
"""

from __future__ import annotations

import logging
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

from trinity_core.base.errors import TransientFault, TrinityError, on_failure
from trinity_core.base.files import private_folder, write_json
from trinity_core.base.layout import JobLayout, run_of
from trinity_core.base.runlock import PIPELINE, held
from trinity_core.config import Config, public_dict, stages
from trinity_core.config.paths import normalised
from trinity_core.exchange.checkpoints.convert import is_complete
from trinity_core.exchange.checkpoints.huggingface import huggingface_folder
from trinity_core.exchange.checkpoints.resume import whole_steps
from trinity_core.exchange.tracking.mlflow_writer import close_parent, keep_parent_open
from trinity_core.exchange.tracking.pauses import Decision
from trinity_core.exchange.tracking.run_record import record_end, record_kill, record_start
from trinity_core.exchange.tracking.writers import RunOutcome
from trinity_core.hosting.cluster import Cluster, close_cluster, open_cluster, placement_of
from trinity_core.hosting.faults import first_error_stays
from trinity_core.hosting.placement import flow_of
from trinity_core.run.attempt import PLAIN, Frontend, open_attempt
from trinity_core.run.configuration import start_from
from trinity_core.run.loop import run
from trinity_core.run.made_from import differences, made_from
from trinity_core.run.nodes import software
from trinity_core.run.pauses import decided
from trinity_core.run.preflight.steps import evaluating_stage, scores_base
from trinity_core.run.promotion import run_gate
from trinity_core.run.stage import (
    Stage,
    StageRequest,
    choose_stage,
    in_fresh_folder,
    pick_stage,
    resume,
    stage_names,
    unlock_run,
)
from trinity_core.run.stop import over_budget, spent_by_stages
from trinity_core.run.summary import read_summary, score_steps, summary_of_scores, unscored_steps, write_summary

log = logging.getLogger(__name__)

OTHER_SETTINGS = "%s has been run with other settings (%s): it resumes from its checkpoint"
OTHER_INPUTS = (
    "%s is done and is not run again, although these have changed since: %s. To run it with them, give the run another "
    "`name` or set `continue_from_checkpoint: false`"
)


def run_configuration(config: Config, frontend: Frontend = PLAIN, is_ready: bool = False) -> dict[str, Any]:
    """Run a configuration with all its stages."""
    if config.stages:
        return run_pipeline(config, frontend, is_ready)
    return run_request(StageRequest(config, flow_of(config), is_ready=is_ready), frontend)


def run_request(request: StageRequest, frontend: Frontend = PLAIN) -> dict[str, Any]:
    """Run or evaluate a stage; return its summary. A paused run resumes once a person has decided. Raises Paused if
    nobody does.

    The decision that the frontend was given is for the pause at which the run waits now: not for a later one, and not
    for a retry, before which a person may have stopped the run.
    """
    if frontend.is_retry() and request.kind != "evaluate":
        frontend.decision = None
    stage = frontend.call("resolve", lambda: resolve(request, frontend))
    if request.kind == "evaluate":
        return evaluate_stage(stage, request.which, frontend)
    if request.kind == "gate":
        return run_gate(stage, frontend)
    while True:
        summary = _run_to_pause(request, stage, frontend)
        if summary is not None:
            return summary
        frontend.decision = None
        # A run in a fresh folder resumes there.
        config = request.config if request.config.stages else request.config.resuming(stage.config.name)
        request = replace(request, config=config, is_ready=False)
        stage = frontend.call("resolve", partial(resolve, request, frontend))


def _run_to_pause(request: StageRequest, stage: Stage, frontend: Frontend) -> dict[str, Any] | None:
    """Run a stage once its pause, if it waits at one, has ended; return None if it begins another one."""

    def with_decision(decision: Decision) -> Stage:
        is_ready = request.is_ready and not decision.settings  # what they name has not been opened
        return resolve(replace(request, settings=decision.settings, is_ready=is_ready), frontend)

    with on_failure(lambda: unlock_run(stage)):
        stage = decided(stage, frontend.decision, frontend.decides, with_decision)
        return run(frontend.with_human_verdicts(stage), frontend)


def resolve(request: StageRequest, frontend: Frontend = PLAIN) -> Stage:
    """Choose the stage, lock its run, and find the checkpoint to resume from. Raises ConfigError or TrinityError."""
    choice = choose_stage(request, frontend.begun_by(), request.is_ready and not frontend.is_retry())
    frontend.announce(choice.config, choice.stage, request.ending)
    stage = resume(choice)
    for warning in stage.warnings:
        log.warning(warning)
    if stage.resumed_step:
        log.info("Resuming from the checkpoint of step %s in %s", stage.resumed_step, stage.config.job_dir)
    return stage


def evaluate_stage(stage: Stage, which: str, frontend: Frontend = PLAIN) -> dict[str, Any]:
    """Score those weights of `which` that have no score yet; engines start only if there are any."""

    def publish(seconds: float) -> dict[str, Any]:
        summary = summary_of_scores(stage.config, seconds)
        frontend.show(stage.config, summary)
        return summary

    steps = frontend.call("find", lambda: unscored_steps(stage.config, which))
    log.info("To score: %s", ", ".join(f"step {step}" for step in steps) or "nothing")
    if not steps:
        return frontend.call("publish", lambda: publish(0.0))
    with frontend.call("cluster", lambda: open_attempt(stage)) as attempt:
        frontend.call("evaluate", lambda: score_steps(attempt, steps))
        return frontend.call("publish", lambda: publish(time.monotonic() - attempt.began))


def run_pipeline(config: Config, frontend: Frontend = PLAIN, is_ready: bool = False) -> dict[str, Any]:
    """Score the base model, run the stages in order on one Ray, score and publish the last model.

    Stages that an earlier attempt finished are skipped. Raises TrinityError if the pipeline is in progress. A pipeline
    that starts over gets its own folder.
    """
    config = in_fresh_folder(config, frontend.begun_by())
    with held(config.job_dir, PIPELINE):
        return _run_stages(config, frontend, is_ready)


def _run_stages(config: Config, frontend: Frontend, is_ready: bool) -> dict[str, Any]:
    def resolve_pipeline() -> Plan:
        frontend.announce(config, "pipeline")
        return plan_stages(config)

    def run_stage(kind: str, stage: str, **more: Any) -> dict[str, Any]:
        request = StageRequest(config, kind, stage, is_ready=is_ready, **more)
        frontend.show_so_far(config, pipeline_summary(plan, base_summary, summaries), request.title)
        return frontend.subflow(request, lambda: run_request(request, frontend))

    def publish() -> dict[str, Any]:
        summary = pipeline_summary(plan, base_summary, summaries)
        write_summary(config, summary)
        frontend.show(config, summary, is_pipeline=True)
        return summary

    plan = frontend.call("resolve", resolve_pipeline, retries=True)
    opened: Cluster | None = None
    if all(stage.done for stage in plan.stages):  # a score that is missing starts Ray by itself
        log.info("All stages of %s are done: nothing is run again", config.name)
    else:
        opened = frontend.call("cluster", lambda: open_cluster(config, plan.gpu_per_node), retries=True)
    with pipeline_cluster(plan, opened):
        base_summary: dict[str, Any] = {}
        summaries: dict[str, dict[str, Any]] = {}
        if plan.scores_base:
            base_summary = run_stage("evaluate", plan.evaluates, which="base")
        model_path = ""
        for stage in plan.stages:
            done = stage.done or _left_out(config, stage)
            summaries[stage.name] = done or run_stage(stage.flow, stage.name, model_path=model_path)
            model_path = summaries[stage.name]["hf_dir"] or model_path
        last = next((stage.name for stage in reversed(plan.stages) if stage.flow != "gate"), "")
        if last and plan.evaluates == last and summaries[last]["score"] is None and not summaries[last].get("left_out"):
            scored = run_stage("evaluate", last, which="latest", run=summaries[last]["name"])
            seconds = round(summaries[last]["seconds"] + scored["seconds"], 2)
            summaries[last] |= {"score": scored["score"], "scores": scored["scores"], "seconds": seconds}
        return frontend.call("publish", publish)


def _left_out(config: Config, stage: PlannedStage) -> dict[str, Any] | None:
    """Return the summary of a stage that does not train because a budget of the whole pipeline is spent, else None."""
    reason = over_budget(config.monitor.stop.pipeline, spent_by_stages(config.job_dir))
    if not reason or stage.flow not in ("rft", "sft"):
        return None
    log.info("%s is left out: monitor.stop.pipeline.%s", stage.config.name, reason)
    return {
        "project": config.project, "name": stage.config.name, "step": 0, "score": None, "scores": {}, "seconds": 0.0,
        "checkpoint_dir": None, "hf_dir": None, "stopped_early": f"monitor.stop.pipeline.{reason}", "left_out": True,
    }  # fmt: skip


def curate(config: Config, stage: str, frontend: Frontend = PLAIN) -> dict[str, Any]:
    """Create, continue or find the output of a stage's task pipeline; return its folder and row counts.

    Raises TrinityError as `curated_tasks` does, or if the stage has no task pipeline.
    """
    from trinity_core.pipelines.tasks import curated_tasks
    from trinity_core.run.asked_models import RunModels

    stage_config, _ = pick_stage(config, stage)

    def make() -> dict[str, Any]:
        frontend.announce(stage_config, "curate")
        if stage_config.data_processor.task_pipeline is None:
            raise TrinityError(
                f"{stage_config.name} has no data_processor.task_pipeline, so there is nothing to curate.",
                key="data_processor.task_pipeline",
            )
        with RunModels(stage_config) as models:
            curated = curated_tasks(stage_config, models)
        log.info("%d of %d rows in %s", curated.rows, curated.read, curated.folder)
        summary = {**vars(curated), "folder": str(curated.folder)}
        frontend.show(stage_config, summary, is_pipeline=True)
        return summary

    return frontend.call("curate", make)


@dataclass(frozen=True, slots=True)
class PlannedStage:
    """One subflow of a pipeline."""

    name: str
    flow: str
    config: Config
    done: dict[str, Any] | None
    """The summary, if an earlier attempt finished the stage."""


@dataclass(frozen=True, slots=True)
class Plan:
    """A pipeline that can start."""

    config: Config
    stages: list[PlannedStage]
    evaluates: str
    """The stage whose eval sets score the pipeline's models; "" if no stage has any."""
    scores_base: bool
    """True if the model is also scored before training (`explorer.eval_on_startup` of that stage)."""
    gpu_per_node: int


def plan_stages(config: Config) -> Plan:
    configs = stages(config)
    done = finished(configs)
    planned = [
        PlannedStage(*fields) for fields in zip(stage_names(config), map(flow_of, configs), configs, done, strict=True)
    ]
    last = evaluating_stage(configs)
    evaluates = "" if last is None else planned[last].name
    return Plan(config, planned, evaluates, last is not None and scores_base(configs[last]), gpus_of(configs))


def finished(configs: list[Config]) -> list[dict[str, Any] | None]:
    """Return the summary of each completed stage; None from the first one on that is not done or was made from other
    settings.

    A stage that runs again resumes from its latest checkpoint. Changed data, plugins or sync settings do not reopen it,
    but a warning names them: running it again would continue training weights that were trained on the old ones. A
    moved stage stays done.
    """
    summaries: list[dict[str, Any] | None] = []
    model = ""
    for config in configs:
        start = start_from(config, model) if model else config
        recorded = read_summary(config) if config.continue_from_checkpoint and None not in summaries else {}
        summary = None
        if recorded:
            recorded_start, now = recorded.get("made_from"), made_from(start)
            differing = differences(recorded_start, now, "settings")
            settings, wanted = (recorded_start or {}).get("settings", {}), now["settings"]
            changed = [
                name
                for name in differing
                if not (model and wanted.get(name) == normalised(model) and _is_moved(settings.get(name), model))
            ]
            if changed:
                log.warning(OTHER_SETTINGS, config.name, ", ".join(changed))
            else:
                summary = _with_model(start, recorded)
                if changed := differences(recorded_start, now, "inputs"):
                    log.warning(OTHER_INPUTS, config.name, ", ".join(changed))
                model = summary["hf_dir"] or model
        summaries.append(summary)
    return summaries


def _is_moved(recorded: Any, model: str) -> bool:
    """True if a recorded model is that of the same checkpoint of a run, which may have been moved or copied."""
    (before, before_step), (run_folder, step) = run_of(str(recorded)), run_of(model)
    if before is None or run_folder is None:
        return False
    return (before.parts[-2:], before_step) == (run_folder.parts[-2:], step)


def _with_model(config: Config, summary: dict[str, Any]) -> dict[str, Any]:
    """Return a stage's summary with current folder names; the model is converted again if only the conversion was
    removed."""
    layout, step = config.layout, summary["step"]
    if not summary["hf_dir"]:
        return summary
    is_gone = not is_complete(layout.huggingface(step)) and step not in whole_steps(layout.root)
    model = layout.huggingface(step) if is_gone else huggingface_folder(config, step)
    return summary | {"checkpoint_dir": str(layout.step(step)), "hf_dir": str(model)}


def pipeline_summary(plan: Plan, base_summary: dict[str, Any], summaries: dict[str, dict[str, Any]]) -> dict[str, Any]:
    """Return scores, steps and seconds of each stage that has ended, and the folders of the last model."""
    last = [base_summary, *summaries.values()][-1]
    trained = [summary for summary in summaries.values() if summary["hf_dir"]] or [last]
    seconds = {"before": base_summary.get("seconds", 0.0)} | {
        name: summary["seconds"] for name, summary in summaries.items()
    }
    early = [f"{name}: {reason}" for name, summary in summaries.items() if (reason := summary.get("stopped_early"))]
    return {
        **{name: value for name, value in trained[-1].items() if name != "results"},
        "name": plan.config.name,
        "score": next((score for one in reversed(summaries.values()) if (score := one["score"]) is not None), None),
        **({"gate": last["gate"]} if last.get("gate") else {}),
        "scores": scores_by_stage(base_summary, summaries),
        "steps": {name: summary["step"] for name, summary in summaries.items()},
        "stopped_early": "; ".join(early) or None,
        "findings": [finding for summary in summaries.values() for finding in summary.get("findings") or ()],
        "stage_seconds": seconds,
        "seconds": round(sum(seconds.values()), 2),
    }


@contextmanager
def pipeline_cluster(plan: Plan, opened: Cluster | None) -> Iterator[None]:
    """Within this context Ray, if it was opened, stays up between the stages. At the end it is closed, and the
    pipeline's MLflow run ends. The folders of its stages are recorded first."""
    private_folder(plan.config.job_dir)
    write_json(JobLayout(plan.config.job_dir).stages, {stage.name: stage.config.name for stage in plan.stages})
    keep_parent_open(plan.config.job_dir)
    record_kill(plan.config.job_dir, [stage.config.job_dir for stage in plan.stages])
    versions = software(plan.config.plugin_dir)
    record = record_start(plan.config.job_dir, public_dict(plan.config), "pipeline", software=versions)
    outcome = RunOutcome.FINISHED
    try:
        yield
    except BaseException as error:
        outcome = RunOutcome.of(error)
        raise
    finally:
        with first_error_stays(outcome is RunOutcome.FINISHED):
            try:
                if opened is not None:
                    close_cluster(opened)
            finally:
                record_end(plan.config.job_dir, record, outcome)
                summary = (outcome is RunOutcome.FINISHED and read_summary(plan.config)) or {"scores": {}}
                close_parent(plan.config.job_dir, outcome, summary["scores"])


@contextmanager
def early_cluster(config: Config) -> Iterator[None]:
    """Within this context Ray is up. It starts early, during another wait.

    If it does not start now, the flow, which has retries, tries again. If all stages of a pipeline have summaries, Ray
    starts only if a stage has to run again.
    """
    if config.stages and config.continue_from_checkpoint and all(map(read_summary, stages(config))):
        yield
        return
    try:
        opened = open_cluster(config, gpus_of(stages(config)))
    except TransientFault as fault:
        log.warning("Ray did not start; it is tried again: %s", fault)
        yield
        return
    try:
        yield
    finally:
        close_cluster(opened)


def gpus_of(configs: list[Config]) -> int:
    """Return the largest number of GPUs per node that any of these runs takes."""
    return max(placement_of(config).gpu_per_node for config in configs)


def scores_by_stage(base_summary: dict[str, Any], summaries: dict[str, dict[str, Any]]) -> dict[str, float | None]:
    """Return `base_summary` and each stage's name → score, in order.

    A stage without evaluations gets the next one's score at step 0.
    """
    scores: dict[str, float | None] = {}
    following: float | None = None
    for name, summary in reversed(summaries.items()):
        scores[name] = following if summary["score"] is None else summary["score"]
        following = summary["scores"].get("step 0")
    return {"before": base_summary.get("score")} | {name: scores[name] for name in summaries}
