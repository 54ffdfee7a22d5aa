"""Reinforcement fine-tuning: explorer and trainer beside each other."""

from __future__ import annotations

from typing import Any

from prefect import flow

from flows.parameters import NO_OVERRIDES, RETRIES, RETRY_DELAY, ConfigFile, ModelPath, Overrides, StageName
from tasks.checkpoints import publish
from tasks.evaluation import evaluate_result
from tasks.explore import explore
from tasks.faults import only_transient_faults_are_retried
from tasks.lifetime import cluster, ending, together
from tasks.resolve import resolve
from tasks.train import train


@flow(name="rft", retries=RETRIES, retry_delay_seconds=RETRY_DELAY, persist_result=False)
def rft(
    config: ConfigFile, overrides: Overrides = NO_OVERRIDES, stage: StageName = "", model_path: ModelPath = ""
) -> dict[str, Any]:
    """Explore and train (or one of them, by the configuration's mode), evaluate the result and publish it."""
    with only_transient_faults_are_retried():
        plan = resolve(config, overrides, stage, model_path, "rft")
        with ending(cluster(plan)) as session:
            results = together(session, explore, train)
            evaluate_result(session)
            return publish(session, results)
