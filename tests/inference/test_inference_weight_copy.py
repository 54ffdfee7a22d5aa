"""Weights that are copied by our own rule: wherever vLLM makes something else of them, vLLM goes on doing it."""

from __future__ import annotations

import copy
from typing import ClassVar

import torch
from torch import nn

from trinity_core.inference.weight_copy import Reloader


class Model(nn.Module):
    """As vLLM lays models out: projections in one parameter, a vocabulary with rows that belong to nobody."""

    packed_modules_mapping: ClassVar = {"qk": ["q", "k"]}

    def __init__(self):
        super().__init__()
        self.embed = nn.Embedding(6, 2)
        self.layer = nn.ModuleDict({"qk": nn.Linear(2, 5), "norm": nn.LayerNorm(2, bias=False)})


class Vllm:
    """Its way of loading, and how often it was asked."""

    def __init__(self, model, norm=lambda weight: weight):
        self.model, self.norm, self.calls = model, norm, 0

    def __call__(self, those):
        self.calls += 1
        given = dict(those)
        with torch.no_grad():
            self.model.embed.weight[:5] = given["embed.weight"]
            for name in ("weight", "bias"):
                whole = torch.cat([given[f"layer.q.{name}"], given[f"layer.k.{name}"]])
                self.model.layer["qk"].get_parameter(name).copy_(whole)
            self.model.layer["norm"].weight.copy_(self.norm(given["layer.norm.weight"]))


def checkpoint(seed):
    g = torch.Generator().manual_seed(seed)
    shapes = {
        "embed.weight": (5, 2), "layer.q.weight": (3, 2), "layer.k.weight": (2, 2), "layer.q.bias": (3,),
        "layer.k.bias": (2,), "layer.norm.weight": (2,),
    }  # fmt: skip
    return {name: torch.randn(shape, generator=g) for name, shape in shapes.items()}


def loaded(reload, tensors):
    """What the model of `reload` holds after vLLM alone has loaded `tensors`."""
    alone = Vllm(copy.deepcopy(reload.model), reload.norm)
    alone(tensors.items())
    return alone.model.state_dict()


def test_what_vllm_only_copies_is_copied_from_the_second_time_on():
    vllm = Vllm(Model())
    reloader = Reloader(vllm.model, vllm)
    for seed in range(3):
        expected = loaded(vllm, checkpoint(seed))
        reloader.load(checkpoint(seed).items())
        assert vllm.calls == 1
        for name, tensor in vllm.model.state_dict().items():
            assert torch.equal(tensor, expected[name]), name


def test_what_vllm_changes_is_left_to_vllm():
    vllm = Vllm(Model(), norm=lambda weight: weight + 1)
    reloader = Reloader(vllm.model, vllm)
    for seed in range(3):
        reloader.load(checkpoint(seed).items())
        assert torch.equal(vllm.model.layer["norm"].weight, checkpoint(seed)["layer.norm.weight"] + 1)
    assert vllm.calls == 3


def test_a_tensor_that_nothing_is_made_of_leaves_all_to_vllm():
    vllm = Vllm(Model())
    reloader = Reloader(vllm.model, vllm)
    for seed in range(2):
        reloader.load([*checkpoint(seed).items(), ("layer.scale", torch.ones(1))])
    assert vllm.calls == 2


def test_a_module_that_derives_more_from_weights_leaves_all_to_vllm():
    vllm = Vllm(Model())
    vllm.model.layer["norm"].process_weights_after_loading = lambda dtype: None
    reloader = Reloader(vllm.model, vllm)
    for seed in range(2):
        reloader.load(checkpoint(seed).items())
    assert vllm.calls == 2


def test_other_names_are_looked_at_anew():
    vllm = Vllm(Model())
    reloader = Reloader(vllm.model, vllm)
    reloader.load(checkpoint(0).items())
    reloader.load([*checkpoint(1).items(), ("layer.scale", torch.ones(1))])
    reloader.load(checkpoint(2).items())
    assert vllm.calls == 3
    reloader.load(checkpoint(3).items())
    assert vllm.calls == 3
    assert torch.equal(vllm.model.layer["norm"].weight, checkpoint(3)["layer.norm.weight"])
