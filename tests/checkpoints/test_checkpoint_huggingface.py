"""The digest of a model's weights: of values and names, not of files."""

from __future__ import annotations

from pathlib import Path

import numpy as np
from raising import raising
from safetensors.numpy import save_file

from trinity_core.base.errors import TrinityError
from trinity_core.exchange.checkpoints.huggingface import tensors_sha256
from trinity_core.run.driver import scores_by_stage


def test_digest_does_not_depend_on_division_into_files(tmp_path: Path) -> None:
    tensors = {"b": np.arange(6, dtype=np.float32).reshape(2, 3), "a": np.ones(4, dtype=np.float16)}
    one, two, other = tmp_path / "one", tmp_path / "two", tmp_path / "other"
    for folder in (one, two, other):
        folder.mkdir()
    save_file(tensors, one / "model.safetensors", {"format": "pt"})
    for name, value in tensors.items():
        save_file({name: value}, two / f"model-{name}.safetensors")
    assert tensors_sha256(one) == tensors_sha256(two)
    save_file({**tensors, "a": np.zeros(4, dtype=np.float16)}, other / "model.safetensors")
    assert tensors_sha256(other) != tensors_sha256(one)


def test_a_folder_without_weights_has_no_digest(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text("{}")
    with raising(TrinityError, key=str(tmp_path)):
        tensors_sha256(tmp_path)


def test_stage_without_score_takes_first_score_of_next_stage() -> None:
    summaries = {"sft": {"score": None, "scores": {}}, "rft": {"score": 0.9, "scores": {"step 0": 0.4, "step 8": 0.9}}}
    assert [*scores_by_stage({"score": 0.1}, summaries).items()] == [("before", 0.1), ("sft", 0.4), ("rft", 0.9)]
    assert scores_by_stage({}, {"sft": summaries["sft"]}) == {"before": None, "sft": None}
