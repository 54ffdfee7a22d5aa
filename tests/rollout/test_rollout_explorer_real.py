"""The explorer with a real engine, a stand-in for the trainer beside it."""

from __future__ import annotations

import asyncio

import numpy as np
import pytest

from trinity_core.config import config_from_dict, store_url
from trinity_core.inference.requests import WeightSource
from trinity_core.rollout.explorer import Explorer
from trinity_core.runtime.run import explore
from trinity_core.store.store import ExperienceStore
from trinity_core.sync.methods import open_versions
from trinity_core.sync.weight_check import WeightCheck
from trinity_core.tracking.metrics_file import read_metrics

pytestmark = pytest.mark.slow


@pytest.fixture
def own_weights_after(tiny_engine, tiny_folder):
    yield
    asyncio.run(tiny_engine.load(WeightSource("folder", str(tiny_folder)), 0))


def config_of(tiny_folders, root, name):
    taskset = {"path": str(tiny_folders.data), "format": {"prompt_key": "question", "response_key": "answer"}}
    return config_from_dict({
        "project": "p",
        "name": name,
        "checkpoint_root_dir": str(root),
        "algorithm": {"algorithm_type": "grpo", "repeat_times": 4},
        "model": {"model_path": str(tiny_folders.model), "max_model_len": 128, "max_response_tokens": 16},
        "buffer": {"batch_size": 4, "total_steps": 2, "explorer_input": {"taskset": taskset}},
        "explorer": {"runner_per_model": 4, "eval_interval": 0},
        "synchronizer": {"sync_method": "memory"},
    })  # fmt: skip


def logprobs_of(model, tokens: np.ndarray) -> np.ndarray:
    import torch

    sequence = torch.tensor(tokens[None].astype(np.int64))
    with torch.no_grad():
        logits = model(sequence).logits[0, :-1]
    return torch.log_softmax(logits, -1).gather(-1, sequence[0, 1:, None])[:, 0].numpy()


def explored(config, engine, model) -> list:
    """Two steps, with versions 0 and 1 published as a trainer would; what the store holds then."""
    folder = open_versions("memory", config.job_dir)
    tokens = np.arange(3, 40, 4)
    check = WeightCheck(tuple(tokens.tolist()), tuple(logprobs_of(model, tokens).tolist()))
    for version in (0, 1):
        folder.publish(version, model.state_dict().items(), check)
    asyncio.run(Explorer(config, [engine]).run(explore))
    folder.remove()
    return ExperienceStore.open(store_url(config), str(config.job_dir)).lease(1, 32, 1)


def test_stored_rollouts_are_trainable_and_the_seed_repeats_them(
    tiny_folders, tiny_engine, tiny_model, tmp_path, own_weights_after
):
    configs = [config_of(tiny_folders, tmp_path, name) for name in ("one", "two")]
    first, second = [explored(config, tiny_engine, tiny_model) for config in configs]
    assert len(first) == 32
    for e in first:
        expected = logprobs_of(tiny_model, e.tokens)[e.prompt_length - 1 :]
        np.testing.assert_allclose(e.logprobs, expected, atol=1e-5)
    assert [int(e.versions[0]) for e in first] == [0] * 16 + [1] * 16
    assert len({tuple(e.tokens.tolist()) for e in first}) > 16
    assert [e.tokens.tolist() for e in first] == [e.tokens.tolist() for e in second]
    gaps = [line.metrics["weight_sync/check_gap"] for line in read_metrics(configs[0].job_dir)]
    assert max(gaps) < 1e-4
