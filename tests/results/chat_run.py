"""A run whose model can be talked to."""

from __future__ import annotations

import shutil
from pathlib import Path

import yaml

from trinity_core.base.layout import JobLayout
from trinity_core.config import Config, to_dict
from trinity_core.exchange.checkpoints.commit import write_manifest
from trinity_core.exchange.checkpoints.resume import update_meta
from trinity_core.exchange.tracking.run_record import config_path


def chat_run(job: Path, tiny_folder: Path) -> Path:
    """A run from the small model whose checkpoint, converted already, has the small model's weights."""
    layout = JobLayout(job)
    shutil.copytree(tiny_folder, layout.huggingface(4))
    write_manifest(layout.step(4), 4)
    taskset = {"path": "data", "default_workflow_type": "math_workflow", "workflow_args": {"with_think": True}}
    settings = {
        "model.model_path": str(tiny_folder), "model.max_model_len": 512, "model.max_response_tokens": 8,
        "buffer.explorer_input.tasksets": [taskset | {"rollout_args": {"temperature": 0.5}}],
    }  # fmt: skip
    config_path(job).parent.mkdir()
    config_path(job).write_text(yaml.safe_dump(to_dict(Config().with_values(settings))))
    update_meta(layout.trainer_meta, model=str(tiny_folder))
    return job
