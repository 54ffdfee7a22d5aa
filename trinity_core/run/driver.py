"""The driver, shared by the command line, Prefect, Studio and calls from Python, each with its own frontend.

The caller loads and checks a configuration once and passes it on as a value.
"""

from __future__ import annotations

import logging
import time
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, replace
from functools import partial
from threading import Event
from typing import Any

from trinity_core.base.errors import TrinityError, on_failure
from trinity_core.base.runlock import PIPELINE, held
from trinity_core.config import Config
from trinity_core.exchange.store.run_store import open_run_store
from trinity_core.hosting.cluster import Cluster, close_cluster, open_cluster, placement_of
from trinity_core.hosting.faults import CANCEL_TOKEN, CancelToken
from trinity_core.hosting.placement import Placement, flow_of
from trinity_core.pipelines.tasks import curated_tasks
from trinity_core.run.asked_models import RunModels
from trinity_core.run.attempt import open_attempt
from trinity_core.run.configuration import load_checked
from trinity_core.run.frontend import PLAIN, Frontend
from trinity_core.run.loop import run
from trinity_core.run.pipeline import (
    Plan,
    has_recorded_end,
    pipeline_cluster,
    pipeline_summary,
    plan_stages,
    with_seconds,
)
from trinity_core.run.stage import (
    Stage,
    StageRequest,
    choose_stage,
    in_fresh_folder,
    pick_stage,
    resume,
    unlock_run,
)
from trinity_core.run.summary import score_steps, summary_of_scores, unscored_steps, write_summary

log = logging.getLogger(__name__)

LOOK_SECONDS = 1.0
"""Interval of checks whether the trainer has gone back to a checkpoint after its explorer finished."""


def run_configuration(config: Config, frontend: Frontend = PLAIN, is_ready: bool = False) -> dict[str, Any]:
    if config.stages:
        return run_pipeline(config, frontend, is_ready)
    return run_request(StageRequest(config, flow_of(config), is_ready=is_ready), frontend)


def run_request(request: StageRequest, frontend: Frontend = PLAIN) -> dict[str, Any]:
    stage = frontend.call("resolve", lambda: resolve(request, frontend))
    if request.kind == "evaluate":
        return evaluate_stage(stage, request.which, frontend)
    with on_failure(lambda: unlock_run(stage)):
        return run(frontend.with_human_verdicts(stage), frontend)


def resolve(request: StageRequest, frontend: Frontend = PLAIN) -> Stage:
    """Choose the stage, lock its run, and find the checkpoint to resume from. Raises ConfigError or TrinityError."""
    chosen = choose_stage(request, frontend.begun_by(), request.is_ready and not frontend.is_retry())
    frontend.announce(chosen.config, chosen.stage)
    stage = resume(chosen)
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
        return frontend.subflow(request, lambda: run_request(request, frontend))

    plan = frontend.call("resolve", resolve_pipeline, retries=True)
    with _ray_between_stages(plan, frontend):
        before: dict[str, Any] = {}
        if plan.scores_base:
            before = with_seconds(plan, "before", run_stage("evaluate", plan.evaluates, which="base"))
        summaries: dict[str, dict[str, Any]] = {}
        model_path = ""
        for stage in plan.stages:
            summaries[stage.name] = stage.done or run_stage(stage.flow, stage.name, model_path=model_path)
            model_path = summaries[stage.name]["hf_dir"] or model_path
        last = plan.stages[-1].name
        if plan.evaluates == last and summaries[last]["score"] is None:
            scored = run_stage("evaluate", last, which="latest", run=summaries[last]["name"])
            scored = with_seconds(plan, last, scored)
            seconds = round(summaries[last]["seconds"] + scored["seconds"], 2)
            summaries[last] |= {"score": scored["score"], "scores": scored["scores"], "seconds": seconds}
        return frontend.call("publish", lambda: _publish_pipeline(plan, before, summaries, frontend))


def _ray_between_stages(plan: Plan, frontend: Frontend) -> AbstractContextManager[None]:
    """Return a context with Ray for the stages. For a completed pipeline nothing starts, and its recorded end is kept;
    a missing score starts Ray by itself."""
    done = all(stage.done for stage in plan.stages)
    if done:
        log.info("All stages of %s are done: nothing is run again", plan.config.name)
        if has_recorded_end(plan):
            return nullcontext()
    opened = None
    if not done:
        opened = frontend.call("cluster", lambda: open_cluster(plan.config, plan.gpu_per_node), retries=True)
    return pipeline_cluster(plan, opened)


def _publish_pipeline(
    plan: Plan, before: dict[str, Any], summaries: dict[str, dict[str, Any]], frontend: Frontend
) -> dict[str, Any]:
    summary = pipeline_summary(plan, before, summaries)
    write_summary(plan.config, summary)
    frontend.show(plan.config, summary, is_pipeline=True)
    return summary


def run_parts(files: Sequence[str], overrides: Sequence[str] = (), frontend: Frontend = PLAIN) -> dict[str, Any]:
    """Run a trainer and its explorers, each from its own configuration, on one Ray; return part → summary.

    When one fails for good, the others save and end. A finished explorer runs again if its trainer goes back to a
    checkpoint before steps that it explored.
    """

    def resolve_parts() -> list[Part]:
        parts = plan_parts(files, overrides)
        frontend.announce(parts[0].config, "async")
        return parts

    def run_part(part: Part, trained: Event, token: CancelToken) -> dict[str, Any]:
        request = StageRequest(part.config, "rft", file=part.file)
        try:
            while True:
                summary = frontend.subflow(request, lambda: run_request(request, frontend))
                config = part.config.with_values({"name": summary["name"]})  # the run may be in a fresh folder
                if config.mode != "explore" or not _explores_again(config, trained, token):
                    return summary
        finally:
            if part.config.mode == "train":
                trained.set()

    parts = frontend.call("resolve", resolve_parts, retries=True)
    opened = frontend.call("cluster", lambda: open_cluster(parts[0].config, gpus_together(parts)), retries=True)
    trained = Event()
    if all(part.config.mode != "train" for part in parts):
        trained.set()
    with shared_ray(parts, opened) as token:
        return frontend.run_components(token, {part.name: partial(run_part, part, trained, token) for part in parts})


def _explores_again(config: Config, trained: Event, token: CancelToken) -> bool:
    """Wait until the trainer or all parts end. Return True if the trainer went back before steps of this explorer."""
    name = config.explorer.name
    with open_run_store(config) as store:
        lineage = -1
        while not trained.wait(LOOK_SECONDS) and not token.cancelled:
            before, lineage = lineage, store.lineage()
            explorer = None if lineage == before else store.stats().explorers.get(name)
            if explorer and explorer.is_expected and not store.trainer().finished:
                step = explorer.step + 1
                log.warning("the trainer went back to a checkpoint: %s explores again from step %d", name, step)
                return True
    return False


def curate(config: Config, stage: str, frontend: Frontend = PLAIN) -> dict[str, Any]:
    """Create, continue or find the output of a stage's task pipeline; return its folder and row counts.

    Raises TrinityError as `curated_tasks` does, or if the stage has no task pipeline.
    """
    chosen, _ = pick_stage(config, stage)

    def make() -> dict[str, Any]:
        frontend.announce(chosen, "curate")
        if chosen.data_processor.task_pipeline is None:
            raise TrinityError(
                f"{chosen.name} has no data_processor.task_pipeline, so there is nothing to curate.",
                key="data_processor.task_pipeline",
            )
        with RunModels(chosen) as models:
            curated = curated_tasks(chosen, models)
        log.info("%d of %d rows in %s", curated.rows, curated.read, curated.folder)
        summary = {**vars(curated), "folder": str(curated.folder)}
        frontend.show(chosen, summary, is_pipeline=True)
        return summary

    return frontend.call("curate", make)


@dataclass(frozen=True, slots=True)
class Part:
    """One run of an asynchronous training: the trainer or an explorer."""

    name: str
    """`trainer`, or the explorer's name."""
    file: str
    config: Config
    placement: Placement


def plan_parts(files: Sequence[str], overrides: Sequence[str]) -> list[Part]:
    """Return the parts of one asynchronous run, with checked configurations, from their files.

    Raises ConfigError or TrinityError, and TransientFault if GPUs of a part are in use.
    """
    configs = {file: load_checked(file, list(overrides)) for file in files}
    first, *_ = configs
    for file, config in configs.items():
        if config.mode != "train" and not config.explores_alone:
            raise TrinityError(
                f"{file} has mode {config.mode}. The parts of one run have mode: explore or serve, and one has "
                "mode: train.",
                key="mode",
            )
        if config.job_dir != configs[first].job_dir:
            raise TrinityError(
                f"{file} and {first} are different runs: project, name and checkpoint_root_dir must be the same.",
                key="name",
            )
    names = [_part_name(configs[file]) for file in files]
    twice = [name for name, count in Counter(names).items() if count > 1]
    if twice:
        files_named = ", ".join(file for file, name in zip(files, names, strict=True) if name in twice)
        raise TrinityError(
            f"{files_named} are the same part of the run ({twice[0]}). Give each explorer another "
            "explorer.name; a run has one trainer.",
            key="explorer.name",
        )
    return [Part(_part_name(config), file, config, placement_of(config)) for file, config in configs.items()]


@contextmanager
def shared_ray(parts: Sequence[Part], opened: Cluster) -> Iterator[CancelToken]:
    """Within this context all parts share one Ray and its cores; yields the token that cancels all of them.

    Ray is closed at the end. Raises TrinityError if the parts need more GPUs together than there are.
    """
    try:
        opened.check_room(sum(part.placement.gpus for part in parts))
        nodes = opened.nodes
        opened.nodes = [replace(node, cpus=max(node.cpus // len(parts), 1)) for node in nodes]
        token = CancelToken()
        before = CANCEL_TOKEN.set(token)
        try:
            yield token
        finally:
            CANCEL_TOKEN.reset(before)
            opened.nodes = nodes
    finally:
        close_cluster(opened)


def gpus_together(parts: Sequence[Part]) -> int:
    """Return the GPUs per node for all parts. Raises TrinityError if the parts use several Rays."""
    addresses = {part.config.cluster.ray_address for part in parts}
    if len(addresses) > 1:
        raise TrinityError(f"cluster.ray_address differs between {', '.join(part.file for part in parts)}.")
    return sum(part.placement.gpu_per_node for part in parts)


def _part_name(config: Config) -> str:
    return "trainer" if config.mode == "train" else config.explorer.name
