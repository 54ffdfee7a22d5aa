"""How `AsyncLLMEngine` puts weights in use, against a stand-in for `AsyncLLM`: which calls, in which order."""

from __future__ import annotations

import asyncio

import pytest

from trinity_core.errors import DataError
from trinity_core.inference.async_llm import AsyncLLMEngine
from trinity_core.inference.requests import WeightSource
from trinity_core.inference.settings import EngineSettings
from trinity_core.sync.methods import open_versions
from trinity_core.sync.versions import VersionGone


class Vllm:
    """Records the calls. As in vLLM, only the text of a worker's error comes back."""

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
            [told] = await asyncio.gather(
                engine._load(WeightSource(method, str(tmp_path)), version), return_exceptions=True
            )
            return told if isinstance(told, Exception) else None

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


def test_a_step_takes_as_many_tokens_as_with_vllms_own_class(monkeypatch, tiny_folder):
    from vllm import EngineArgs
    from vllm.v1.engine.async_llm import AsyncLLM

    context = []

    def started(arguments, **named):
        context.append(named["usage_context"])
        return Vllm()

    monkeypatch.setattr(AsyncLLM, "from_engine_args", started)
    asyncio.run(AsyncLLMEngine(EngineSettings(str(tiny_folder), 100))._start())
    tokens, _ = EngineArgs.get_batch_defaults(1)
    assert tokens[context[0]] == max(tokens.values())
