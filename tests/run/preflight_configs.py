"""Configurations and a model's shape that preflight tests share."""

from __future__ import annotations

from trinity_core.config import Config, config_from_dict
from trinity_core.run.preflight.model_shape import ModelShape

SHAPE = ModelShape(1_000_000, 4, 128, 384, 4, 2, 32, 1024, tied=True)
TASKSET = {"name": "t", "path": "data", "default_workflow_type": "math_workflow"}


def config_of(*overrides: str) -> Config:
    """Ten steps of GRPO on the CPU: 4 tasks with 8 rollouts, prompts of 88 and answers of 40 tokens."""
    tree = {
        "algorithm": {"algorithm_type": "grpo", "repeat_times": 8},
        "model": {"model_path": "no-model", "max_prompt_tokens": 88, "max_response_tokens": 40},
        "cluster": {"gpu_per_node": 0},
        "buffer": {
            "batch_size": 4,
            "total_steps": 10,
            "explorer_input": {"taskset": TASKSET, "eval_tasksets": [{**TASKSET, "name": "e"}]},
        },
        "explorer": {"eval_interval": 4},
        "trainer": {"save_interval": 4},
    }
    return config_from_dict(tree, overrides)
