"""What lies beside a checkpoint's weights is there from the start."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch

from trinity_core.errors import TrinityError
from trinity_core.training.model_files import describe, write_description
from trinity_core.training.policy import load_causal_lm

UNUSUAL = {"temperature": 0.9, "top_p": 0.6}
"""Without `do_sample`: transformers loads this with a warning, and refuses to save it."""


@pytest.fixture
def model(make_config: Any, tiny_model: Path, tmp_path: Path) -> Any:
    folder = tmp_path / "model"
    shutil.copytree(tiny_model, folder)
    (folder / "generation_config.json").write_text(json.dumps(UNUSUAL))
    return make_config(model__model_path=folder).model


def test_a_description_is_a_model_without_weights(model: Any, tmp_path: Path) -> None:
    from transformers import AutoConfig, AutoTokenizer, GenerationConfig

    lm = load_causal_lm(model.model_path, torch.float32)
    description = describe(lm, model)
    shutil.rmtree(model.model_path)  # whatever becomes of the model, the checkpoint is written
    write_description(description, tmp_path / "written")
    assert AutoConfig.from_pretrained(tmp_path / "written").to_diff_dict() == lm.config.to_diff_dict()
    assert AutoTokenizer.from_pretrained(tmp_path / "written").chat_template
    generation = GenerationConfig.from_pretrained(tmp_path / "written")
    assert {name: getattr(generation, name) for name in UNUSUAL} == UNUSUAL


def test_a_model_that_cannot_be_described_is_refused(model: Any) -> None:
    lm = load_causal_lm(model.model_path, torch.float32)
    (Path(model.model_path) / "tokenizer.json").write_text("{")
    with pytest.raises(TrinityError, match=f"model.model_path {model.model_path}"):
        describe(lm, model)
