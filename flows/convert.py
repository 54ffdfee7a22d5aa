"""Checkpoints as Hugging Face folders."""

from __future__ import annotations

from pathlib import Path

from prefect import flow

from flows.loaded import run_title
from flows.parameters import NO_OVERRIDES, BaseModelDir, CheckpointDir, ConfigFile, MergeAdapters, Overrides, StageName
from tasks.frontend import PREFECT
from tasks.retries import retry_only_transient_faults
from trinity_core.run.configuration import load_checked
from trinity_core.run.stage import job_dir_of


@flow(name="convert", flow_run_name=run_title, persist_result=False)
def convert(
    config: ConfigFile,
    overrides: Overrides = NO_OVERRIDES,
    stage: StageName = "",
    checkpoint_dir: CheckpointDir = "",
    base_model_dir: BaseModelDir = "",
    merge: MergeAdapters = False,
) -> list[str]:
    """Convert every checkpoint of the configuration's run (or below another folder), skipping converted ones.

    With stages, the run is that of `stage`, or else of the last stage that trains.
    """
    from trinity_core.exchange.checkpoints.convert import convert_all

    with retry_only_transient_faults():
        folder = checkpoint_dir or str(job_dir_of(load_checked(config, overrides), stage))
        base = Path(base_model_dir) if base_model_dir else None
        return PREFECT.call("convert", lambda: [str(path) for path in convert_all(Path(folder), base, merge)])
