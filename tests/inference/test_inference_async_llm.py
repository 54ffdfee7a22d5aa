"""The served engine with a stand-in for vLLM's processes: what it asks of them when it is handed weights."""

from __future__ import annotations

import asyncio

import pytest

from trinity_core.errors import DataError
from trinity_core.inference.async_llm import AsyncLLMBackend
from trinity_core.inference.requests import WeightSource
from trinity_core.inference.settings import EngineSettings
from trinity_core.sync.methods import open_versions
from trinity_core.sync.versions import VersionGone


class Vllm:
    """Notes what is asked. Of an error in a worker, as in vLLM, only the text comes back."""

    def __init__(self, fault: str = ""):
        self.asked, self.fault = [], fault

    def __getattr__(self, verb):
        async def ask(*_, **__):
            self.asked.append(verb)
            if verb == "collective_rpc" and self.fault:
                raise Exception(self.fault)

        return ask


@pytest.fixture
def load(tmp_path):
    """Hand a version to an engine that holds 3, from a folder of 3 and 4: what it then holds, asked, and raised."""
    import torch

    folder = open_versions("checkpoint", tmp_path)
    for version in (3, 4):
        folder.publish(version, [("w", torch.ones(2))])

    def load(method="checkpoint", version=4, fault=""):
        vllm = Vllm(fault)
        engine = AsyncLLMBackend(EngineSettings("model", 100), version=3, _engine=vllm)

        async def outcome():
            [told] = await asyncio.gather(
                engine.load(WeightSource(method, str(tmp_path)), version), return_exceptions=True
            )
            return told if isinstance(told, Exception) else None

        error = asyncio.run(outcome())
        return engine.version, vllm.asked, error

    return load


def test_weights_are_put_in_use_while_generation_pauses(load):
    version, asked, error = load()
    assert (version, error) == (4, None)
    assert asked[:2] == ["pause_generation", "collective_rpc"] and asked[-1] == "resume_generation"


def test_weights_that_are_not_there_are_told_by_their_type_and_disturb_nothing(load, tmp_path):
    version, asked, error = load(version=5)
    assert (version, asked) == (3, []) and isinstance(error, VersionGone)
    version, asked, error = load("folder")
    assert (version, asked) == (3, []) and isinstance(error, DataError)
    for file in tmp_path.rglob("*.safetensors"):
        file.write_bytes(file.read_bytes()[:-1])
    version, asked, error = load()
    assert (version, asked) == (3, []) and isinstance(error, DataError)


def test_an_engine_that_fails_amid_loading_samples_nothing_more(load):
    version, asked, error = load(fault="out of memory")
    assert version == 3 and "out of memory" in str(error)
    assert "resume_generation" not in asked
