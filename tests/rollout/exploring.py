"""An explorer with the test session's real engine, and two versions published like a trainer's."""

from __future__ import annotations

import asyncio
from contextlib import closing
from pathlib import Path
from typing import Any

import numpy as np

from trinity_core.config import Config, config_from_dict
from trinity_core.exchange.store.run_store import open_run_store
from trinity_core.exchange.sync.versions import open_versions
from trinity_core.exchange.sync.weight_check import WeightCheck
from trinity_core.rollout.explorer import Explorer
from trinity_core.run.loop import explore

COLUMNS = {"prompt_key": "question", "response_key": "answer"}


def run_of(root: Path, policy: Path, taskset: dict[str, Any], /, **sections: Any) -> Config:
    """A GRPO run below `root` with two answers a task and no evaluations; `sections` are laid over it."""
    tree: dict[str, Any] = {
        "project": "p",
        "name": "n",
        "checkpoint_root_dir": str(root),
        "algorithm": {"algorithm_type": "grpo", "repeat_times": 2},
        "model": {"model_path": str(policy), "max_model_len": 128},
        "buffer": {"explorer_input": {"taskset": {"format": COLUMNS, **taskset}}},
        "explorer": {"eval_interval": 0},
        "synchronizer": {"sync_method": "checkpoint"},
    }
    for name, section in sections.items():
        tree[name] = tree.get(name, {}) | section if isinstance(section, dict) else section
    return config_from_dict(tree)


def rows_of(config: Config, engine, *auxiliary) -> list:
    """Explore to the end; return the rows in the store."""
    asyncio.run(Explorer(config, [engine], [[helper] for helper in auxiliary]).run(explore))
    with closing(open_run_store(config)) as store:
        return store.lease(1, 64, 1)


def config_of(tiny_folders, root, name):
    return run_of(
        root, tiny_folders.model, {"path": str(tiny_folders.data)}, name=name,
        algorithm={"repeat_times": 4}, model={"max_response_tokens": 16}, buffer={"batch_size": 4, "total_steps": 2},
        explorer={"runner_per_model": 4}, synchronizer={"sync_method": "memory"},
    )  # fmt: skip


def logprobs_of(model, tokens: np.ndarray) -> np.ndarray:
    import torch

    sequence = torch.tensor(tokens[None].astype(np.int64))
    with torch.no_grad():
        logits = model(sequence).logits[0, :-1]
    return torch.log_softmax(logits, -1).gather(-1, sequence[0, 1:, None])[:, 0].numpy()


def explored(config, engine, model) -> list:
    """Run two steps, with versions 0 and 1 published; return the contents of the store."""
    folder = open_versions("memory", config.job_dir)
    tokens = np.arange(3, 40, 4)
    check = WeightCheck(tuple(tokens.tolist()), tuple(logprobs_of(model, tokens).tolist()))
    for version in (0, 1):
        folder.publish(version, model.state_dict().items(), check)
    asyncio.run(Explorer(config, [engine]).run(explore))
    folder.remove()
    return open_run_store(config).lease(1, 64, 1)
