"""Folders of LoRA adapters: which are read, and that they are written whole."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from raising import raising

from trinity_core.base.errors import DataError
from trinity_core.exchange.checkpoints.adapters import read_config, write_adapter

TENSORS = {"x.lora_A": torch.ones(2, 3), "x.lora_B": torch.ones(3, 2)}


@pytest.mark.parametrize(
    "more",
    [
        {"alpha_pattern": {"q_proj": 64}}, {"rank_pattern": {"q_proj": 4}}, {"lora_bias": True},
        {"fan_in_fan_out": True}, {"init_lora_weights": "pissa"}, {"target_parameters": ["experts.down_proj"]},
        {"use_rslora": True}, {"layer_replication": [[0, 4], [2, 5]]}, {"trainable_token_indices": [0]},
    ],
    ids=lambda more: next(iter(more)),
)  # fmt: skip
def test_an_adapter_that_is_more_than_two_matrices_and_a_scale_is_refused(more: dict[str, Any], tmp_path: Path) -> None:
    write_adapter(TENSORS, {"r": 2, "lora_alpha": 4, **more}, tmp_path)
    with raising(DataError, key=next(iter(more))):
        read_config(tmp_path)


def test_an_adapter_as_peft_writes_it_is_read(tmp_path: Path) -> None:
    import peft

    peft.LoraConfig(r=2, lora_alpha=4, target_modules=["x"], task_type="CAUSAL_LM").save_pretrained(tmp_path)
    assert read_config(tmp_path)["r"] == 2
