"""The flow `convert` finds the checkpoints of the configuration that it is given."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import yaml
from raising import raising

from flows import convert as module
from trinity_core.base.errors import DataError, TrinityError
from trinity_core.base.layout import JobLayout, shard_name
from trinity_core.run.attempt import PLAIN

TASKS = {"path": "data", "format": {"prompt_key": "question", "response_key": "answer"}}
SFT = {
    "stage_name": "sft",
    "mode": "train",
    "algorithm": {"algorithm_type": "sft"},
    "buffer": {"train_batch_size": 4, "trainer_input": {"experience_buffer": {"storage_type": "file", **TASKS}}},
}
BENCH = {"stage_name": "scores", "mode": "bench"}


def written(folder: Path, *stages: dict[str, Any]) -> str:
    """A configuration in `folder`, whose runs lie there too."""
    inputs = {"taskset": TASKS, "eval_tasksets": [{"name": "test", **TASKS}]}
    tree = {
        "project": "tests",
        "name": "whole",
        "checkpoint_root_dir": str(folder),
        "algorithm": {"algorithm_type": "grpo", "repeat_times": 2},
        "model": {"model_path": "model", "max_model_len": 64, "max_response_tokens": 16},
        "buffer": {"batch_size": 2, "total_steps": 2, "explorer_input": inputs},
        "stages": list(stages),
    }
    path = folder / "run.yaml"
    path.write_text(yaml.safe_dump(tree))
    return str(path)


@pytest.fixture
def convert(monkeypatch: pytest.MonkeyPatch) -> Any:
    """The flow's own code, without a Prefect server."""
    monkeypatch.setattr(module, "PREFECT", PLAIN)
    return module.convert.fn


def checkpoint(root: Path, run: str, model: Any) -> Path:
    """A checkpoint of `run` as the trainer leaves it; the folder that its conversion makes."""
    actor = JobLayout(root / "tests" / run).actor(2)
    model.config.save_pretrained(actor / "huggingface")
    torch.save(dict(model.named_parameters()), actor / shard_name("model", 1, 0))
    return actor / "huggingface"


def test_convert_takes_the_last_trained_stage_or_the_named_one(convert: Any, tmp_path: Path, tiny_model: Any) -> None:
    sft, rft = (checkpoint(tmp_path, f"whole_{stage}", tiny_model) for stage in ("sft", "rft"))
    config = written(tmp_path, SFT, {"stage_name": "rft"}, BENCH)
    assert convert(config) == [str(rft)] and list(rft.glob("*.safetensors"))
    assert not list(sft.glob("*.safetensors"))
    assert convert(config, stage="sft") == [str(sft)] and list(sft.glob("*.safetensors"))
    with raising(TrinityError, key="stage"):
        convert(config, stage="dpo")


def test_of_one_run_its_own(convert: Any, tmp_path: Path, tiny_model: Any) -> None:
    config = written(tmp_path)
    with raising(DataError, key=str(tmp_path / "tests/whole")):
        convert(config)
    folder = checkpoint(tmp_path, "whole", tiny_model)
    assert convert(config) == [str(folder)]
