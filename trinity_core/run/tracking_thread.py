"""Tracks the run of a stage: its record in the job dir, and its metrics in the tracking system."""

from __future__ import annotations

import logging
from functools import partial
from pathlib import Path

from trinity_core.base.plugins import load_plugins
from trinity_core.config import Config, public_dict
from trinity_core.exchange.store.run_store import identity_of
from trinity_core.exchange.tracking.forwarder import (
    TRAIN_AND_EVALUATE,
    Forwarder,
    ForwarderThread,
    open_writer,
    target_of,
)
from trinity_core.exchange.tracking.prometheus import PrometheusPage
from trinity_core.exchange.tracking.run_record import changes_since, record_end, record_start
from trinity_core.exchange.tracking.scores import valid_scores
from trinity_core.exchange.tracking.writers import RunInfo, RunOutcome
from trinity_core.run.nodes import software
from trinity_core.run.stage import Stage

log = logging.getLogger(__name__)


class TrackingThread(ForwarderThread):
    """Records the start of a stage's run and its end, and forwards its metrics meanwhile."""

    def __init__(self, stage: Stage) -> None:
        info = _run_info(stage)
        versions = software(stage.config.plugin_dir)
        if not info.keeps_status and (changes := changes_since(info.job_dir, info.config, stage.stage, versions)):
            log.warning("%s: %s", info.job_dir, changes)
        self._record = record_start(info.job_dir, info.config, stage.stage, info.keeps_status, versions)
        super().__init__(info.job_dir, partial(_open, stage.config, info))

    def close(self, outcome: RunOutcome) -> None:
        record_end(self._job_dir, self._record, outcome)
        super().close(outcome)


def _open(config: Config, info: RunInfo) -> Forwarder:
    load_plugins(config.plugin_dir)  # a plugin may define the monitor
    writer = open_writer(config.monitor.monitor_type, info, Path(config.checkpoint_root_dir))
    port = config.monitor.prometheus_port
    page = PrometheusPage(port, config.project, config.name) if port else None
    role = TRAIN_AND_EVALUATE if config.mode == "train" and config.evaluates_beside else config.mode
    return Forwarder(
        config.job_dir, writer, role, config.explorer.name, page,
        target=target_of(config.monitor), scores=partial(valid_scores, config),
    )  # fmt: skip


def _run_info(stage: Stage) -> RunInfo:
    config = stage.config
    tags = {"stage": stage.stage, "algorithm": config.algorithm.algorithm_type}
    if config.layout.stages.exists():  # the model before training is scored in the pipeline's run
        tags = {"stage": "pipeline"}
    return RunInfo(
        project=config.project,
        name=config.name,
        job_dir=config.job_dir,
        config=public_dict(config),
        parent_dir=stage.parent_dir,
        args=config.monitor.monitor_args,
        tags=tags,
        keeps_status=config.mode == "bench" or config.explores_alone,
        explorer=config.explorer.name if config.explores_alone else "",
        identity=identity_of(config.job_dir),
    )
