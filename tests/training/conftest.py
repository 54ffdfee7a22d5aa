"""A model of 30,000 parameters."""

from pathlib import Path

import pytest

from trinity_core.config import config_from_dict
from trinity_core.data.tiny import TinySize, make_model


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
            "algorithm": {
                "algorithm_type": algorithm,
                "repeat_times": 4,
                "optimizer": {"lr": 1e-4},
                "max_rollout_gap": 100,
            },  # rows have log-probs of nobody
            "model": {"model_path": str(tiny_model), "max_prompt_tokens": 32, "max_response_tokens": 32},
            "cluster": {"gpu_per_node": 0},
            "buffer": {"batch_size": 4, "total_steps": 4, "trainer_input": {"experience_buffer": {"name": "buffer"}}},
            "synchronizer": {"sync_method": "checkpoint"},
        }
        return config_from_dict(config, [f"{key.replace('__', '.')}={value}" for key, value in overrides.items()])

    return make
