"""Adapters are evaluated beside the model that their run began with."""

from __future__ import annotations

import shutil
from dataclasses import asdict
from pathlib import Path

from preflight_configs import config_of
from raising import raising

from trinity_core.base.errors import TrinityError
from trinity_core.base.files import write_json
from trinity_core.base.layout import JobLayout
from trinity_core.data.tiny import TinyFolders
from trinity_core.exchange.checkpoints.beginning import STATE, Beginning
from trinity_core.exchange.checkpoints.commit import write_manifest
from trinity_core.exchange.checkpoints.huggingface import huggingface_folder
from trinity_core.run.stage import for_evaluation


def test_adapter_is_evaluated_with_the_base_of_its_run(tiny_folders: TinyFolders, tmp_path: Path) -> None:
    """In a pipeline that is the model of the stage before, not model.model_path."""
    config = config_of(f"checkpoint_root_dir={tmp_path}", "model.model_path=another", "model.lora_configs=[{rank: 4}]")
    folder = config.job_dir / "global_step_1"
    folder.mkdir(parents=True)
    write_json(folder / STATE, {"began": asdict(Beginning.of(str(tiny_folders.model)))})
    write_manifest(folder, 1)
    assert for_evaluation(config).model.model_path == str(tiny_folders.model)
    with raising(TrinityError, key="model.model_path"):
        huggingface_folder(config, 1, merge=False)


def test_adapter_of_a_moved_pipeline_is_evaluated_with_its_base(tiny_folders: TinyFolders, tmp_path: Path) -> None:
    """Where the stage before is now, if that is the same model."""
    config = config_of(f"checkpoint_root_dir={tmp_path}", "model.model_path=another", "model.lora_configs=[{rank: 4}]")
    base = JobLayout(config.job_dir.parent / "sft").huggingface(3)
    before = str(tmp_path / "before" / base.relative_to(tmp_path))
    shutil.copytree(tiny_folders.model, base)
    folder = config.job_dir / "global_step_1"
    folder.mkdir(parents=True)
    for digest, found in ((Beginning.of(str(base)).digest, str(base)), ("of another model", before)):
        write_json(folder / STATE, {"began": asdict(Beginning(before, digest))})
        write_manifest(folder, 1)
        assert for_evaluation(config).model.model_path == found
