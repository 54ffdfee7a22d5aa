"""A bfloat16 engine in a process of its own, to which wrong weights are given; started by `test_inference_stale`.

Prints, for each fault, the error of the load, and the gap that the log-probs alone would have shown.
"""

from __future__ import annotations

import asyncio
import json
import os
import shutil
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM
from vllm.model_executor.models.qwen2 import Qwen2ForCausalLM

from trinity_core.errors import WeightSyncError
from trinity_core.inference import weight_receiver
from trinity_core.inference.in_process import InProcessEngine
from trinity_core.inference.requests import WeightSource
from trinity_core.inference.settings import EngineSettings
from trinity_core.sync.checkpoint import CheckpointVersions
from trinity_core.sync.weight_check import WeightCheck

TOKENS = (3, 14, 15, 92, 65, 35, 89, 79)
NORM, BIAS = "model.layers.1.input_layernorm.weight", "model.layers.0.self_attn.k_proj.bias"


def logprobs(model: Any) -> torch.Tensor:
    tokens = torch.tensor([TOKENS])
    with torch.no_grad():
        return model(tokens).logits[0, :-1].float().log_softmax(-1).gather(-1, tokens[0, 1:, None])[:, 0]


def step(model: Any) -> None:
    """Change each weight by at most one unit in the last place of bfloat16, as a small learning rate does."""
    with torch.no_grad():
        for parameter in model.parameters():
            nudged = parameter * (1 + torch.randint(-1, 2, parameter.shape) * 2**-7)
            parameter.copy_(torch.where(parameter == 0, torch.full_like(parameter, 1e-3), nudged))


@contextmanager
def loader(keep: Callable[[Iterator[Any]], Iterator[Any]]) -> Iterator[None]:
    """A model whose loader sees what `keep` makes of the tensors."""
    load = Qwen2ForCausalLM.load_weights
    Qwen2ForCausalLM.load_weights = lambda self, weights: load(self, keep(weights))  # type: ignore[method-assign]
    try:
        yield
    finally:
        Qwen2ForCausalLM.load_weights = load  # type: ignore[method-assign]


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
        """The file of the next version: a step after the one before."""
        step(self.model)
        self.number += 1
        check = WeightCheck(TOKENS, tuple(logprobs(self.model).tolist()), "bfloat16")
        record = self.versions.publish(self.number, self.model.state_dict().items(), check)
        return self.versions._record_path(self.number).parent / record.file

    async def load(self) -> str:
        """Load the newest version; the error, or an empty string."""
        try:
            await self.engine.load(WeightSource("checkpoint", str(self.folder)), self.number)
        except WeightSyncError as error:
            return str(error)
        return ""

    async def gap(self) -> float:
        """What the log-probs say of the engine's weights."""
        return float((torch.tensor(await self.engine.score(TOKENS)) - logprobs(self.model)).abs().max())


async def faults(run: Run) -> dict[str, tuple[str, float]]:
    found: dict[str, tuple[str, float]] = {}

    async def note(fault: str) -> None:
        found[fault] = (await run.load(), await run.gap())

    before = run.publish()
    await note("none")
    kept = shutil.copy(before, run.folder / "before.safetensors")

    after = run.publish()
    shutil.copy(kept, after)
    await note("bytes of the step before")

    kept = load_file(run.publish())
    await run.load()
    file = run.publish()
    file.write_bytes(file.read_bytes().replace(raw(load_file(file)[NORM]), raw(kept[NORM])))
    await note("one stale tensor")

    for fault, keep in {
        "nothing loaded": lambda weights: iter(()),
        "norm skipped": without(NORM),
        "bias skipped": without(BIAS),
        "norms exchanged": exchanged(NORM, NORM.replace("layers.1", "layers.0")),
    }.items():
        run.publish()
        assert not await run.load()
        run.publish()
        with loader(keep):
            await note(fault)

    run.publish()
    assert not await run.load()
    run.publish()
    weight_receiver.with_head, with_head = lambda tensors: without("lm_head.weight")(tensors), weight_receiver.with_head
    await note("tied head skipped")
    weight_receiver.with_head = with_head
    run.publish()
    await note("none again")
    return found


async def main(source: Path, folder: Path) -> dict[str, tuple[str, float]]:
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_pretrained(source, dtype=torch.bfloat16).eval()
    engine = InProcessEngine(
        EngineSettings(str(source), dtype="bfloat16", max_model_len=64, max_num_seqs=4, kv_cache_gib=0.1)
    )
    os.environ.update(engine.settings.environment())
    await engine.start()
    found = await faults(Run(engine, folder, model))
    await engine.stop()
    for thread in threading.enumerate():
        if thread.name == "vllm":
            thread.join(5)
            assert not thread.is_alive(), "the engine has stopped"
    return found


print(json.dumps(asyncio.run(main(Path(sys.argv[1]), Path(sys.argv[2])))))
