"""Model families with different attention, head or routers; `benchmarks/trained_families.py` has all."""

import json
import sys
from contextlib import nullcontext
from dataclasses import replace
from importlib import import_module
from pathlib import Path
from shutil import copytree

import pytest
import torch
from batches import make_batch
from raising import raising
from transformers import AutoModelForCausalLM

from trinity_core.base.errors import TrinityError
from trinity_core.training.distributed import Ranks, join, meeting_point
from trinity_core.training.learner import Learner, require_stacked_experts
from trinity_core.training.policy import load_causal_lm

SCRIPTS = str(Path(__file__).parents[2] / "benchmarks")
PACKED = {
    "opt": "positions are learned, and the last layer's output is narrower than the others'",
    "phimoe": "the router is a linear layer that returns several tensors",
    "mixtral": "all experts of a layer are one tensor",
    "granite": "logits are scaled",
}
PADDED = {
    "gemma2": "soft caps and windows",
    "falcon_h1": "each layer has a state and attention",
    "jamba": "some layers have states",
    "lfm2": "some layers have convolutions",
    "doge": "attention has a mask of its own",
    "llama4_text": "attention is chunked, and the causal LM names another prefix than its decoder's",
}


@pytest.fixture(scope="module")
def families():
    sys.path.insert(0, SCRIPTS)
    yield import_module("trained_families")
    sys.path.remove(SCRIPTS)


@pytest.mark.parametrize("kind", [*PACKED, *PADDED])
def test_a_family_trains_as_in_transformers(families, kind):
    gaps, packing = families.check(kind)
    assert max(gaps.values()) < families.LIMIT, gaps
    assert packing is (kind in PACKED)


def test_parameters_that_a_class_freezes_stay_frozen(families, tmp_path):
    """On the rank that reads the model and on the others."""
    families.save_model("ernie4_5_moe", tmp_path)
    read, unread = (load_causal_lm(str(tmp_path), torch.float32, reads=reads) for reads in (True, False))
    frozen = [name for name, p in read.named_parameters() if not p.requires_grad]
    assert frozen == [name for name, p in unread.named_parameters() if not p.requires_grad]
    assert {name.rpartition(".")[2] for name in frozen} == {"e_score_correction_bias"}


@pytest.mark.parametrize("name", ["model_path", "critic_model_path"])
def test_quantized_model_ends_at_its_loading(make_config, tiny_model, tmp_path, name):
    """The check before a run does not see one that was then downloaded."""
    folder = copytree(tiny_model, tmp_path / "quantized")
    entry = {"quantization_config": {"quant_method": "fp8", "modules_to_not_convert": ["model", "lm_head"]}}
    (folder / "config.json").write_text(json.dumps(json.loads((folder / "config.json").read_text()) | entry))
    config = make_config("ppo", **{f"model__{name}": folder})
    with raising(TrinityError, key=f"model.{name}") as caught:
        Learner(config, 4, join(0, 1, *meeting_point(), use_gpu=False))
    assert "quantization_config" in str(caught.value)


@pytest.mark.parametrize("stage", [{"trainer__zero_stage": 3}, {"trainer__optimizer_offload": True}], ids=["3", "2"])
def test_weights_that_are_read_in_float32_are_cast_alike(families, make_config, tmp_path, stage):
    """In the reference as in the policy: before the first step they are the same model."""
    families.save_model("ernie4_5_moe", tmp_path / "model")
    penalty = {"algorithm__kl_loss_fn": "abs", "algorithm__kl_loss_fn_args": {"kl_coef": 0.1}}
    config = make_config(model__model_path=tmp_path / "model", trainer__dtype="bfloat16", **stage, **penalty)
    learner = Learner(config, 4, join(0, 1, *meeting_point(), use_gpu=False))
    rows = [replace(row, tokens=row.tokens % families.SIZES["vocab_size"]) for row in make_batch(1)]
    metrics = learner.step(rows, 1)
    assert metrics["actor/grad_norm"] > 0 and metrics["actor/kl_loss"] == 0


def test_gradient_checkpointing_of_a_family_without_it(families, make_config, tmp_path):
    families.save_model("jetmoe", tmp_path / "jetmoe")
    config = make_config(model__model_path=tmp_path / "jetmoe", trainer__gradient_checkpointing=True)
    with raising(TrinityError, key="trainer.gradient_checkpointing"):
        Learner(config, 4, Ranks(0, 1, torch.device("cpu")))


@pytest.mark.parametrize(("stage", "workers", "refused"), [(0, 2, False), (2, 1, False), (2, 2, True), (3, 4, True)])
def test_experts_of_one_rank_are_refused_where_ranks_must_use_the_same(families, stage, workers, refused):
    """Under ZeRO 2 and 3 two ranks that use different experts train others than one rank does."""
    with torch.device("meta"):
        lm = AutoModelForCausalLM.from_config(families.config_of("mixtral"))
    ranks = Ranks(0, workers, torch.device("cpu"))
    require_stacked_experts(lm, stage, ranks)
    mixture = lm.model.layers[0].mlp
    mixture.experts = torch.nn.ModuleList([torch.nn.Linear(2, 2), torch.nn.Linear(2, 2)])
    with raising(TrinityError, key="trainer.zero_stage") if refused else nullcontext():
        require_stacked_experts(lm, stage, ranks)
