"""The whole way of a configuration with stages: each stage a subflow, from the model of the stage before."""

from __future__ import annotations

from typing import Any

from prefect import Flow, flow

from flows.evaluate import evaluate
from flows.parameters import NO_OVERRIDES, ConfigFile, Overrides
from flows.rft import rft
from flows.sft import sft
from tasks.checkpoints import publish_pipeline
from tasks.resolve import plan_pipeline
from tasks.retries import retry_only_transient_faults
from tasks.session import shared_cluster
from trinity_core.runtime.pipeline import pipeline_cluster

FLOWS: dict[str, Flow[..., dict[str, Any]]] = {"rft": rft, "sft": sft, "evaluate": evaluate}


@flow(name="pipeline", persist_result=False)
def pipeline(config: ConfigFile, overrides: Overrides = NO_OVERRIDES) -> dict[str, Any]:
    """Score the model as it is, run the stages in order, score and publish the last one's model.

    Stages that an earlier attempt has finished are not run again.
    """
    with retry_only_transient_faults():
        plan = plan_pipeline(config, overrides)
        with pipeline_cluster(plan, shared_cluster(plan.config, plan.gpu_per_node)):
            before = evaluate(config, overrides, plan.evaluates, which="base") if plan.evaluates else {}
            summaries: dict[str, dict[str, Any]] = {}
            model_path = ""
            for stage in plan.stages:
                summaries[stage.name] = stage.done or FLOWS[stage.flow](config, overrides, stage.name, model_path)
                model_path = summaries[stage.name]["hf_dir"] or model_path
            last = plan.stages[-1].name
            if plan.evaluates == last and summaries[last]["score"] is None:
                scored = evaluate(config, overrides, last, which="latest", run=summaries[last]["name"])
                summaries[last] |= {"score": scored["score"], "scores": scored["scores"]}
            return publish_pipeline(plan, before, summaries)
