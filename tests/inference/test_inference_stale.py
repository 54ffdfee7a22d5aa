"""Wrong weights in a bfloat16 engine, whose log-probs are too coarse to show them."""

from __future__ import annotations

import asyncio
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from trinity_core.base.errors import WeightSyncError
from trinity_core.exchange.sync.checkpoint import CheckpointVersions
from trinity_core.exchange.sync.weight_check import TOLERANCES, WeightCheck
from trinity_core.rollout.inference import weight_receiver
from trinity_core.rollout.inference.in_process import InProcessEngine
from trinity_core.rollout.inference.requests import WeightSource

pytestmark = pytest.mark.slow

TOKENS = (3, 14, 15, 92, 65, 35, 89, 79)
NORM, BIAS = "model.layers.1.input_layernorm.weight", "model.layers.0.self_attn.k_proj.bias"


def logprobs(model: Any) -> torch.Tensor:
    tokens = torch.tensor([TOKENS])
    with torch.no_grad():
        return model(tokens).logits[0, :-1].float().log_softmax(-1).gather(-1, tokens[0, 1:, None])[:, 0]


def step(model: Any) -> None:
    """Change each weight by at most one unit in the last place of bfloat16, like a small learning rate."""
    with torch.no_grad():
        for parameter in model.parameters():
            nudged = parameter * (1 + torch.randint(-1, 2, parameter.shape) * 2**-7)
            parameter.copy_(torch.where(parameter == 0, torch.full_like(parameter, 1e-3), nudged))


ANY = "any parameter"
WRONG = {
    "none": "",
    "bytes of the step before": ANY,
    "one stale tensor": NORM,
    "nothing loaded": ANY,
    "norm skipped": NORM,
    "bias skipped": "model.layers.0.self_attn.qkv_proj.bias",
    "norms exchanged": NORM.replace("layers.1", "layers.0"),
    "tied head skipped": "lm_head.weight (packed)",
}
"""Fault -> the parameter that the error names."""


def raw(tensor: torch.Tensor) -> bytes:
    return tensor.view(torch.uint8).numpy().tobytes()


def without(*names: str) -> Callable[[Iterator[Any]], Iterator[Any]]:
    return lambda weights: ((name, tensor) for name, tensor in weights if name not in names)


def exchanged(first: str, second: str) -> Callable[[Iterator[Any]], Iterator[Any]]:
    other = {first: second, second: first}
    return lambda weights: ((other.get(name, name), tensor) for name, tensor in weights)


class Run:
    """An engine and the versions that a trainer publishes for it."""

    def __init__(self, engine: InProcessEngine, folder: Path, model: Any) -> None:
        self.engine, self.folder, self.model = engine, folder, model
        self.versions = CheckpointVersions(folder)
        self.number = 0

    def publish(self) -> Path:
        """Publish the next version, a step after the last one."""
        step(self.model)
        self.number += 1
        check = WeightCheck(TOKENS, tuple(logprobs(self.model).tolist()), "bfloat16")
        record = self.versions.publish(self.number, self.model.state_dict().items(), check)
        return self.versions._record_path(self.number).parent / record.file

    def load(self) -> str:
        """Load the newest version; return the parameter that an error names, or an empty string."""
        try:
            asyncio.run(self.engine.load(WeightSource("checkpoint", str(self.folder)), self.number))
        except WeightSyncError as error:
            return error.key
        return ""

    def gap(self) -> float:
        """The gap of the weight check."""
        return float((torch.tensor(asyncio.run(self.engine.score(TOKENS))) - logprobs(self.model)).abs().max())


def loaded_by(keep: Callable[[Iterator[Any]], Iterator[Any]], patch: pytest.MonkeyPatch) -> None:
    """Make the model's loader see the tensors that `keep` returns."""
    from vllm.model_executor.models.qwen2 import Qwen2ForCausalLM

    load = Qwen2ForCausalLM.load_weights
    patch.setattr(Qwen2ForCausalLM, "load_weights", lambda self, weights: load(self, keep(weights)))


def test_wrong_weights_of_a_bfloat16_engine_are_named(
    engine_of: Any, tiny_folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from transformers import AutoModelForCausalLM

    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_pretrained(tiny_folder, dtype=torch.bfloat16).eval()
    engine = engine_of(str(tiny_folder), dtype="bfloat16", max_model_len=64, max_num_seqs=4, kv_cache_gib=0.1)
    run = Run(engine, tmp_path, model)

    def check(fault: str) -> None:
        parameter = run.load()
        assert parameter if WRONG[fault] == ANY else parameter == WRONG[fault], (fault, parameter)
        assert run.gap() < TOLERANCES["bfloat16"], "the log-probs alone would have let it pass"

    before = run.publish()
    check("none")
    kept = shutil.copy(before, tmp_path / "before.safetensors")
    after = run.publish()
    shutil.copy(kept, after)
    check("bytes of the step before")

    tensors = load_file(run.publish())
    run.load()
    file = run.publish()
    file.write_bytes(file.read_bytes().replace(raw(load_file(file)[NORM]), raw(tensors[NORM])))
    check("one stale tensor")

    for fault, keep in {
        "nothing loaded": lambda weights: iter(()),
        "norm skipped": without(NORM),
        "bias skipped": without(BIAS),
        "norms exchanged": exchanged(NORM, NORM.replace("layers.1", "layers.0")),
    }.items():
        run.publish()
        assert not run.load()
        run.publish()
        with monkeypatch.context() as patch:
            loaded_by(keep, patch)
            check(fault)

    run.publish()
    assert not run.load()
    run.publish()
    with monkeypatch.context() as patch:
        patch.setattr(weight_receiver, "with_head", without("lm_head.weight"))
        check("tied head skipped")
    run.publish()
    check("none")
