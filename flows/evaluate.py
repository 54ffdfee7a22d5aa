"""Scores: a model, or the checkpoints of a run, on the configuration's eval sets."""

from __future__ import annotations

import time
from typing import Any

from prefect import flow

from flows.parameters import (
    NO_OVERRIDES,
    ConfigFile,
    ModelPath,
    Overrides,
    RunName,
    StageName,
    Which,
)
from tasks.evaluation import publish_scores, score, unscored
from tasks.resolve import resolve
from tasks.retries import RETRIES, RETRY_DELAY, retry_only_transient_faults
from tasks.session import cluster


@flow(name="evaluate", retries=RETRIES, retry_delay_seconds=RETRY_DELAY, persist_result=False)
def evaluate(
    config: ConfigFile,
    overrides: Overrides = NO_OVERRIDES,
    stage: StageName = "",
    model_path: ModelPath = "",
    which: Which = "latest",
    run: RunName = "",
) -> dict[str, Any]:
    """Score what has no score yet; engines start only if anything is to be scored."""
    with retry_only_transient_faults():
        plan = resolve(config, overrides, stage, model_path, "evaluate", which == "base", run)
        targets = unscored(plan, which)
        if not targets:
            return publish_scores(plan)
        with cluster(plan) as session:
            score(session, targets)
            return publish_scores(plan, time.monotonic() - session.began)
