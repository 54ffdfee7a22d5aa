"""Reward models as the actors of a run."""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest
from raising import raising

from trinity_core.config import config_from_dict
from trinity_core.errors import TransientFault, TrinityError
from trinity_core.inference.reward_engine import RewardEngine, RewardEngines
from trinity_core.runtime.actors import Actors
from trinity_core.runtime.cluster import close_cluster, open_cluster
from trinity_core.runtime.placement import Machine, place

TALK = [{"role": "user", "content": "Tom has 3 apples."}, {"role": "assistant", "content": "Tom has 3."}]


def config_of(root: Path, model: Path, **reward_model: int):
    return config_from_dict({
        "project": "p",
        "name": "rated",
        "checkpoint_root_dir": str(root),
        "mode": "explore",
        "model": {"model_path": str(model), "max_model_len": 64, "max_response_tokens": 8},
        "buffer": {"batch_size": 2, "total_steps": 1, "explorer_input": {"taskset": {"path": "tasks.jsonl"}}},
        "explorer": {"auxiliary_models": [{"model_path": str(model), **reward_model}]},
    })  # fmt: skip


def test_a_reward_model_takes_one_gpu_each(reward_folder: Path, tmp_path: Path) -> None:
    config = config_of(tmp_path, reward_folder).with_values({"cluster.gpu_per_node": 8})
    model = config.explorer.auxiliary_models[0].with_values({"tensor_parallel_size": 2})
    config = config.with_values({"explorer.auxiliary_models": [model]})
    with raising(TrinityError, key="explorer.auxiliary_models[0].tensor_parallel_size"):
        Actors(None, config, place(config, Machine(cpus=8, gpus=8))).start_auxiliary()


@pytest.mark.slow
def test_a_reward_models_actors_rate_and_their_loss_is_named(reward_folder: Path, tmp_path: Path) -> None:
    import ray

    config = config_of(tmp_path, reward_folder, engine_num=2)
    placement = place(config, Machine(cpus=2, gpus=0))
    cluster = open_cluster(config, 0)
    try:
        [handles] = Actors(cluster, config, placement).start_auxiliary()

        async def rated() -> list:
            engines = RewardEngines(handles, "the judge", 120.0, 60.0)
            await engines.start()
            both = await asyncio.gather(engines.rate([TALK]), engines.rate([TALK]))
            for handle in handles:
                ray.kill(handle)
            with pytest.raises(TransientFault, match="the judge"):
                async with asyncio.timeout(60):
                    while True:  # `ray.kill` returns before the actor is dead
                        await engines.rate([TALK])
            return both

        first, second = asyncio.run(rated())
    finally:
        close_cluster(cluster)
    assert first == second == pytest.approx(RewardEngine(str(reward_folder), 64).rate([TALK]), abs=1e-5)
