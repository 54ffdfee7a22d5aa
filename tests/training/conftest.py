"""A model of 30,000 parameters, and batches for it."""

from pathlib import Path

import numpy as np
import pytest

from trinity_core.config import config_from_dict
from trinity_core.data.experience import Experience
from trinity_core.data.tiny import TinySize, make_model

VOCABULARY = 400
"""Below the tiny tokenizer's."""


@pytest.fixture(scope="session")
def tiny_model(tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("model")
    make_model(folder, 0, TinySize(hidden_size=64, intermediate_size=96, layers=2, heads=2, key_value_heads=1))
    return folder


@pytest.fixture
def make_config(tiny_model, tmp_path):
    """A checked configuration; keyword arguments are overrides with `__` for dots."""

    def make(algorithm="grpo", name="run", **overrides):
        config = {
            "project": "tests",
            "name": name,
            "mode": "train",
            "checkpoint_root_dir": str(tmp_path),
            "algorithm": {"algorithm_type": algorithm, "repeat_times": 4, "optimizer": {"lr": 1e-4}},
            "model": {"model_path": str(tiny_model), "max_prompt_tokens": 32, "max_response_tokens": 32},
            "cluster": {"gpu_per_node": 0},
            "buffer": {"batch_size": 4, "total_steps": 4, "trainer_input": {"experience_buffer": {"name": "buffer"}}},
            "synchronizer": {"sync_method": "checkpoint"},
        }
        return config_from_dict(config, [f"{key.replace('__', '.')}={value}" for key, value in overrides.items()])

    return make


def make_batch(step: int, groups: int = 4, repeats: int = 4) -> list[Experience]:
    """Rollouts with random rewards; lengths mixed, some tokens of other speakers between the actions."""
    rng = np.random.default_rng(step)
    rows = []
    for group in range(groups):
        prompt = rng.integers(3, VOCABULARY, rng.integers(4, 9))
        for run in range(repeats):
            response = rng.integers(3, VOCABULARY, rng.integers(2, 12))
            mask = rng.random(len(response)) < 0.8
            mask[-1] = True
            rows.append(
                Experience(
                    tokens=np.concatenate([prompt, response]),
                    prompt_length=len(prompt),
                    action_mask=mask,
                    logprobs=np.where(mask, -6 - 0.1 * rng.random(len(response)), 0.0),
                    versions=np.where(mask, step - 1, -1),
                    reward=float(rng.integers(0, 2)),
                    group=f"{step}/{group}",
                    run=run,
                )
            )
    return rows
