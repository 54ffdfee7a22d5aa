"""The run that is measured: a stage as it is, for a few steps, in a folder that is thrown away."""

from __future__ import annotations

from pathlib import Path

from trinity_core.config import Config
from trinity_core.runtime.verdicts import asks_person

STEPS = 6
LEFT_OUT = 2
"""First steps that do not count: memory is mapped, and caches are filled."""


def hindrance(config: Config) -> str:
    """Why a stage cannot be measured; empty if it can."""
    if asks_person(config):
        return "it waits for a person's verdicts (human_verdicts)"
    if config.explores and any(each.storage_type == "queue" for each in config.buffer.explorer_input.tasksets):
        return "its tasks come from a queue (storage_type: queue), which a trial would take from the run"
    if config.cluster.ray_address:
        return "it runs on a Ray cluster (cluster.ray_address), whose other machines do not see this one's trial"
    if config.mode == "both" or (config.mode == "train" and config.is_supervised):
        return ""
    if config.mode == "bench":
        return "it evaluates (mode: bench) and has no steps"
    return f"it is one part of an asynchronous run (mode: {config.mode}), whose speed depends on the other"


def trial_of(config: Config, folder: Path) -> Config:
    """The stage for `STEPS` steps below `folder`, without evaluations, and without a store or port of the user's."""
    changed = {
        "checkpoint_root_dir": str(folder),
        "continue_from_checkpoint": True,
        "buffer.total_steps": STEPS,
        "trainer.total_steps": STEPS,
        "buffer.explorer_input.eval_tasksets": [],
        "explorer.api_port": 0,
        "trainer.save_interval": 0,
        "monitor.monitor_type": "tensorboard",
        "monitor.monitor_args": {},
        "monitor.prometheus_port": 0,
        "monitor.enable_ray_timeline": False,
    }
    if not config.is_supervised:
        changed["buffer.trainer_input.experience_buffer.path"] = None
    if config.data_processor.experience_pipeline is not None:
        changed["data_processor.experience_pipeline.input_save_path"] = None
        changed["data_processor.experience_pipeline.save_input"] = False
    return config.with_values(changed)
