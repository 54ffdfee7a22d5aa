"""Fixtures that many tests share: a small model with its data, made once, and one engine that generates with it."""

from __future__ import annotations

import asyncio
import os
from pathlib import Path
from unittest import mock

import pytest
from hypothesis import settings

from trinity_core.data.tiny import TinyFolders

settings.register_profile("busy", deadline=None, print_blob=True)
settings.load_profile("busy")
"""A test that is slow because the machine is busy is no failure; each has pytest's time limit."""


@pytest.fixture(scope="session")
def tiny_folders(tmp_path_factory) -> TinyFolders:
    """A freshly initialised model of 0.9 million parameters and a small data set, as folders. Not to be written to."""
    from trinity_core.data.tiny import make_tiny

    return make_tiny(tmp_path_factory.mktemp("tiny"), seed=0, count_train=64, count_test=16, count_sft=16)


@pytest.fixture(scope="session")
def tiny_folder(tiny_folders) -> Path:
    """The small model's Hugging Face folder."""
    return tiny_folders.model


@pytest.fixture(scope="session")
def tiny_model(tiny_folder):
    """The small model in `transformers`, float32, in evaluation mode. Tests leave its weights as they are."""
    import torch
    from transformers import AutoModelForCausalLM

    return AutoModelForCausalLM.from_pretrained(tiny_folder, dtype=torch.float32).eval()


@pytest.fixture(scope="session")
def tiny_engine(tiny_folder):
    """A started CPU engine of the small model in this process. Tests that load other weights put its own back."""
    from trinity_core.inference.engine import Engine
    from trinity_core.inference.settings import EngineSettings

    settings = EngineSettings(str(tiny_folder), max_model_len=256, max_num_seqs=64)
    engine = Engine(settings)
    with mock.patch.dict(os.environ, settings.environment()):
        asyncio.run(engine.start())
    yield engine
    asyncio.run(engine.stop())
