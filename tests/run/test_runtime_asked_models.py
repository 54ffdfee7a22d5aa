"""Models beside the policy as the actors of a Ray: those that task operators ask, and reward models."""

from __future__ import annotations

import asyncio
import json
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from raising import raising

from trinity_core.base.errors import ModelError, TransientFault, TrinityError
from trinity_core.config import Config, config_from_dict
from trinity_core.hosting.actors import Actors
from trinity_core.hosting.cluster import close_cluster, open_cluster
from trinity_core.hosting.placement import Machine, place
from trinity_core.pipelines.tasks import curated_tasks
from trinity_core.pipelines.tasks.models import AskedModel, NoAnswer, Question
from trinity_core.rollout.inference.reward_engine import RewardEngine, RewardEngines
from trinity_core.run.asked_models import RunModels

SHORT, LONG = "What is 2 + 2?", "What is 2 + 2? " * 20


@pytest.fixture(scope="module")
def brief_folder(tiny_folder: Path, tiny_model: Any, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The small model, every token of which ends its answer."""
    folder = tmp_path_factory.mktemp("models") / "Brief-0.9M"
    shutil.copytree(tiny_folder, folder)
    path = folder / "generation_config.json"
    content = json.loads(path.read_text()) if path.is_file() else {}
    path.write_text(json.dumps({**content, "eos_token_id": list(range(tiny_model.config.vocab_size))}))
    return folder


TALK = [{"role": "user", "content": "Tom has 3 apples."}, {"role": "assistant", "content": "Tom has 3."}]


def rated(root: Path, model: Path, **reward_model: int) -> Config:
    return config_from_dict({
        "project": "p",
        "name": "rated",
        "checkpoint_root_dir": str(root),
        "mode": "explore",
        "model": {"model_path": str(model), "max_model_len": 64, "max_response_tokens": 8},
        "buffer": {"batch_size": 2, "total_steps": 1, "explorer_input": {"taskset": {"path": "tasks.jsonl"}}},
        "explorer": {"auxiliary_models": [{"model_path": str(model), **reward_model}]},
    })  # fmt: skip


def config_of(root: Path, model: Path, auxiliary: Path) -> Config:
    rows = [{"question": text, "answer": "It is apples. #### 4"} for text in (SHORT, "And 1 + 3?", LONG)]
    (root / "train.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    operators = [
        {"name": "pass_rate_filter", "args": {"api_or_hf_model": name, "samples": 2}}
        for name in ("policy", auxiliary.name.lower())
    ]
    return config_from_dict({
        "project": "p", "name": "n", "checkpoint_root_dir": str(root), "cluster": {"gpu_per_node": 0},
        "model": {"model_path": str(model), "max_model_len": 96, "max_response_tokens": 8, "max_prompt_tokens": 88},
        "explorer": {"auxiliary_models": [{"model_path": str(auxiliary), "max_model_len": 96, "kv_cache_gib": 1}]},
        "buffer": {
            "batch_size": 2, "total_steps": 2, "max_rejected_share": 0.5,
            "explorer_input": {"taskset": {"name": "t", "default_workflow_type": "math_workflow"}},
        },
        "data_processor": {"task_pipeline": {"inputs": [str(root / "train.jsonl")], "operators": operators}},
    })  # fmt: skip


@pytest.fixture(scope="module")
def own_ray(tiny_folder: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """Kept open, as a pipeline does for its stages."""
    cluster = open_cluster(rated(tmp_path_factory.mktemp("ray"), tiny_folder), 0)
    yield
    close_cluster(cluster)


@pytest.mark.slow
def test_models_of_the_configuration_answer(own_ray: None, brief_folder: Path, tiny_model: Any, tmp_path: Path) -> None:
    config = config_of(tmp_path, brief_folder, brief_folder)
    with RunModels(config) as models:
        greedy, long = models.ask(AskedModel("brief-0.9m"), [Question("", SHORT), Question("", LONG)])
        model = models._models["policy"]
        prompt = torch.tensor([model.encoder.prompt([{"role": "user", "content": SHORT}], None, None).tokens])
        likeliest = int(tiny_model(prompt).logits[0, -1].argmax())
        assert greedy == model.tokenizer.decode([likeliest], skip_special_tokens=True)
        assert isinstance(long, NoAnswer) and "more than the" in long.why
        with raising(ModelError, key="base_url"):
            models.ask(AskedModel("another"), [Question("", SHORT)])
        dataset = curated_tasks(config, models)
    written = [json.loads(line) for line in (dataset.folder / "train.jsonl").read_text().splitlines()]
    assert [(row["question"], row["pass_rate"]) for row in written] == [(SHORT, 0.0), ("And 1 + 3?", 0.0)]
    assert dataset.rejected == 1, "the long one got no answer, which is no wrong one"
    with RunModels(config) as models:
        assert curated_tasks(config, models) == dataset and models._cluster is None, "nothing starts for what is there"


def test_a_reward_model_cannot_be_asked(tiny_folder: Path, reward_folder: Path, tmp_path: Path) -> None:
    with RunModels(config_of(tmp_path, tiny_folder, reward_folder)) as models, pytest.raises(ModelError) as refused:
        models.ask(AskedModel(reward_folder.name.lower()), [Question("", SHORT)])
    assert "is a reward model, which writes no text" in str(refused.value)


def test_a_reward_model_takes_one_gpu_each(reward_folder: Path, tmp_path: Path) -> None:
    config = rated(tmp_path, reward_folder).with_values({"cluster.gpu_per_node": 8})
    model = config.explorer.auxiliary_models[0].with_values({"tensor_parallel_size": 2})
    config = config.with_values({"explorer.auxiliary_models": [model]})
    with raising(TrinityError, key="explorer.auxiliary_models[0].tensor_parallel_size"):
        Actors(None, config, place(config, Machine(cpus=8, gpus=8))).start_auxiliary()


@pytest.mark.slow
def test_a_reward_models_actors_rate_and_their_loss_is_named(
    own_ray: None, reward_folder: Path, tmp_path: Path
) -> None:
    import ray

    config = rated(tmp_path, reward_folder, engine_num=2)
    placement = place(config, Machine(cpus=2, gpus=0))
    cluster = open_cluster(config, 0)
    try:
        [handles] = Actors(cluster, config, placement).start_auxiliary()

        async def rate() -> list:
            engines = RewardEngines(handles, "the judge", 120.0, 60.0)
            await engines.start()
            both = await asyncio.gather(engines.rate([TALK]), engines.rate([TALK]))
            for handle in handles:
                ray.kill(handle)
            with pytest.raises(TransientFault):
                async with asyncio.timeout(60):
                    while True:  # `ray.kill` returns before the actor is dead
                        await engines.rate([TALK])
            return both

        first, second = asyncio.run(rate())
    finally:
        close_cluster(cluster)
    assert first == second == pytest.approx(RewardEngine(str(reward_folder), 64).rate([TALK]), abs=1e-5)
