"""How `AsyncLLMEngine` changes weights, with a fake `AsyncLLM`: which calls, in which order."""

from __future__ import annotations

import asyncio
import copy
import json
import os
import subprocess
import sys
import threading
from pathlib import Path

import pytest

from trinity_core.base.errors import DataError
from trinity_core.config.engine_args import OWN, SAFE
from trinity_core.exchange.sync.versions import VersionGone, open_versions
from trinity_core.exchange.sync.weight_check import WeightCheck
from trinity_core.rollout.inference import vllm_types
from trinity_core.rollout.inference.async_llm import AsyncLLMEngine, reasons_of_children
from trinity_core.rollout.inference.requests import WeightSource
from trinity_core.rollout.inference.settings import EngineSettings


class Vllm:
    """Records the calls. As in vLLM, only the text of a worker's error is returned."""

    def __init__(self, fault: str = "", meanwhile=lambda: None):
        self.asked, self.fault, self.meanwhile = [], fault, meanwhile

    def __getattr__(self, verb):
        async def ask(*_, **__):
            self.asked.append(verb)
            if verb == "collective_rpc" and self.fault:
                self.meanwhile()
                raise Exception(self.fault)

        return ask


@pytest.fixture
def load(tmp_path):
    """Load a version into an engine with version 3 from a folder with 3 and 4; return its version, calls and error."""
    import torch

    folder = open_versions("checkpoint", tmp_path)
    for version in (3, 4):
        folder.publish(version, [("w", torch.ones(2))])

    def load(method="checkpoint", version=4, fault="", gone=False):
        vllm = Vllm(fault, (lambda: folder.rewind(3)) if gone else (lambda: None))
        engine = AsyncLLMEngine(EngineSettings("model", 100))
        engine.version, engine._engine = 3, vllm

        async def outcome():
            [result] = await asyncio.gather(
                engine._load(WeightSource(method, str(tmp_path)), version), return_exceptions=True
            )
            return result if isinstance(result, Exception) else None

        error = asyncio.run(outcome())
        return engine.version, vllm.asked, error

    return load


def test_generation_pauses_while_weights_load(load):
    version, asked, error = load()
    assert (version, error) == (4, None)
    assert asked[:2] == ["pause_generation", "collective_rpc"] and asked[-1] == "resume_generation"


def test_missing_weights_raise_and_change_nothing(load, tmp_path):
    version, asked, error = load(version=5)
    assert (version, asked) == (3, []) and isinstance(error, VersionGone)
    version, asked, error = load("folder")
    assert (version, asked) == (3, []) and isinstance(error, DataError)
    for file in tmp_path.rglob("*.safetensors"):
        file.write_bytes(file.read_bytes()[:-1])
    version, asked, error = load()
    assert (version, asked) == (3, []) and isinstance(error, DataError)


def test_version_that_goes_during_a_load_is_named(load):
    version, asked, error = load(fault="VersionGone: no longer there", gone=True)
    assert version == 3 and asked == ["pause_generation", "collective_rpc"] and isinstance(error, VersionGone)


def test_failed_load_leaves_generation_paused(load):
    version, asked, error = load(fault="out of memory")
    assert version == 3 and "out of memory" in str(error)
    assert "resume_generation" not in asked


@pytest.mark.parametrize(("rank", "level"), [(0, 2), (8, 1)])
async def test_an_engine_that_shares_its_gpu_starts_asleep(monkeypatch, tiny_folder, rank, level):
    """Level 2 drops the weights, which the next version replaces; level 1 keeps the base of an adapter."""

    class Sleeper(Vllm):
        async def sleep(self, level, mode):
            self.asked.append(f"sleep {level} {mode}")

    vllm = Sleeper()
    engine = AsyncLLMEngine(EngineSettings(str(tiny_folder), 100, on_gpu=True, sleeps=True, lora_rank=rank))

    async def start():
        engine._engine = vllm

    monkeypatch.setattr(engine, "_start", start)

    await engine.start()
    assert vllm.asked[-1] == f"sleep {level} abort"
    vllm.asked.clear()
    await engine.sleep()
    await engine.wake()
    await engine.wake()
    assert vllm.asked == ["wake_up"]


def test_arguments_that_may_be_given_are_vllms():
    from dataclasses import fields

    from vllm import EngineArgs

    known = {field.name for field in fields(EngineArgs)}
    ours = vllm_types.engine_arguments(EngineSettings("model", 100, on_gpu=True, sleeps=True, tensor_parallel_size=2))
    assert not {*SAFE, *OWN, *ours} - known


def test_a_step_takes_as_many_tokens_as_with_vllms_own_class(monkeypatch, tiny_folder):
    from vllm import EngineArgs
    from vllm.v1.engine.async_llm import AsyncLLM

    context = []

    def started(arguments, **named):
        context.append(named["usage_context"])
        return Vllm()

    monkeypatch.setattr(AsyncLLM, "from_engine_args", started)
    asyncio.run(AsyncLLMEngine(EngineSettings(str(tiny_folder), 100)).start())
    tokens, _ = EngineArgs.get_batch_defaults(1)
    assert tokens[context[0]] == max(tokens.values())


async def test_an_engine_answers_while_it_starts(monkeypatch, tiny_folder):
    from vllm.v1.engine.async_llm import AsyncLLM

    answered = threading.Event()

    def started(*_, **__):
        assert answered.wait(60), "the event loop stands still"
        return Vllm()

    monkeypatch.setattr(AsyncLLM, "from_engine_args", started)
    engine = AsyncLLMEngine(EngineSettings(str(tiny_folder), 100))

    starting = asyncio.create_task(engine.start())
    assert (await engine.describe())[0] is engine.settings
    answered.set()
    await starting


CHILD = """
import sys, time
print("INFO all is well", file=sys.stderr)
print("(EngineCore pid=1) ERROR 01-01 00:00:00 [core.py:1] ValueError: no room for the KV cache", file=sys.stderr)
print("(EngineCore pid=1) RuntimeError: Engine core failed. See root cause above.", file=sys.stderr)
"""


def test_the_reason_of_vllms_processes_reaches_the_error(capfd):
    with pytest.raises(RuntimeError) as failure, reasons_of_children():
        subprocess.run([sys.executable, "-c", CHILD], check=True)
        raise RuntimeError("Engine core initialization failed. See root cause above.")
    assert str(failure.value).endswith("ValueError: no room for the KV cache")
    print("later", file=sys.stderr, flush=True)
    written = capfd.readouterr().err
    assert "all is well" in written and "later" in written, "the log has all of it"


REAL = """
import asyncio, json, multiprocessing, sys
import numpy as np
from trinity_core.rollout.inference.async_llm import AsyncLLMEngine
from trinity_core.rollout.inference.requests import Request, Sampling, WeightSource
from trinity_core.rollout.inference.settings import EngineSettings

async def main(model, method, folder):
    engine = AsyncLLMEngine(EngineSettings(model, 64, max_num_seqs=8))
    await engine.start()
    greedy = Sampling(max_tokens=8, temperature=0.0)
    def requests(mark):
        return [Request(f"{mark}{n}", np.arange(5 + n, dtype=np.int32), greedy, n) for n in range(3)]
    before = (await engine.generate(requests("a"))).unpack()
    scores = await engine.score([*range(5), *before[0].tokens.tolist()])
    long = Request("long", np.arange(5, dtype=np.int32), Sampling(max_tokens=50), 1)
    midway = asyncio.create_task(engine.generate([long]))
    report = await engine.load(WeightSource(method, folder), 1)
    after = (await engine.generate(requests("b"))).unpack()
    print(json.dumps({
        "lengths": [len(sample.tokens) for sample in before],
        "gap": max(abs(a - b) for a, b in zip(scores[4:], before[0].logprobs.tolist())),
        "versions": [sorted(set(s.versions.tolist())) for s in (before[0], after[0])],
        "same": before[0].tokens.tolist() == after[0].tokens.tolist(),
        "version": report.version,
        "check": report.gap,
        "midway": (await midway).unpack()[0].versions.tolist(),
    }))
    await engine.stop()

model, folder = sys.argv[1:]
forked = multiprocessing.get_context("fork")
multiprocessing.get_context = lambda method: forked  # on a CPU, vLLM has each of four processes import all of it anew
asyncio.run(main(model, "memory", folder))
"""


@pytest.mark.slow
@pytest.mark.campaign
def test_vllm_in_its_own_processes_samples_scores_and_loads(tiny_folder, tiny_model, tmp_path):
    """The real AsyncLLM, on the CPU: it scores its own samples alike; weights from shared memory are loaded during a
    request and pass the check."""
    import torch

    changed, tokens = copy.deepcopy(tiny_model), torch.arange(5, 29)
    with torch.no_grad():
        for parameter in changed.parameters():
            parameter.mul_(1.3)
        logits = changed(tokens[None]).logits[0, :-1]
    logprobs = logits.log_softmax(-1).gather(1, tokens[1:, None])[:, 0]
    check = WeightCheck(tuple(tokens.tolist()), tuple(logprobs.tolist()))
    whole = open_versions("memory", tmp_path / "whole")
    whole.publish(1, [(name, weight.detach()) for name, weight in changed.state_dict().items()], check)
    script = tmp_path / "real.py"
    script.write_text(REAL)
    environment = os.environ | EngineSettings("model", 64, threads=1).environment()
    del environment["VLLM_ENABLE_V1_MULTIPROCESSING"]
    try:
        ran = subprocess.run(
            [sys.executable, script, tiny_folder, tmp_path / "whole"], capture_output=True, text=True,
            timeout=400, env=environment | {"PYTHONPATH": str(Path(__file__).parents[2])}, check=False,
        )  # fmt: skip
    finally:
        whole.remove()
    assert ran.returncode == 0, ran.stderr[-3000:]
    [report] = [json.loads(line) for line in ran.stdout.splitlines() if line.startswith("{")]
    assert report["lengths"] == [8, 8, 8] and report["gap"] < 1e-4
    assert (report["version"], report["versions"], report["same"]) == (1, [[0], [1]], False)
    assert report["midway"] == sorted(report["midway"]) and report["midway"][-1] == 1
    assert report["check"] < 1e-4
