"""Supervised learning from a data set (SFT, DPO): the trainer alone."""

from __future__ import annotations

from typing import Any

from prefect import flow

from flows.parameters import NO_OVERRIDES, RETRIES, RETRY_DELAY, ConfigFile, ModelPath, Overrides, StageName
from tasks.checkpoints import publish
from tasks.faults import only_transient_faults_are_retried
from tasks.lifetime import cluster, ending, together
from tasks.resolve import resolve
from tasks.train import train


@flow(name="sft", retries=RETRIES, retry_delay_seconds=RETRY_DELAY, persist_result=False)
def sft(
    config: ConfigFile, overrides: Overrides = NO_OVERRIDES, stage: StageName = "", model_path: ModelPath = ""
) -> dict[str, Any]:
    """Train on the configuration's data set and publish the model."""
    with only_transient_faults_are_retried():
        plan = resolve(config, overrides, stage, model_path, "sft")
        with ending(cluster(plan)) as session:
            results = together(session, train)
            return publish(session, results)
