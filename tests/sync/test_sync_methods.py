"""The registry of sync methods: names to classes."""

import pytest

from trinity_core.config.sync_methods import SYNC_METHODS, default_sync_method
from trinity_core.exchange.sync.checkpoint import CheckpointVersions
from trinity_core.exchange.sync.memory import MemoryVersions
from trinity_core.exchange.sync.versions import open_versions


@pytest.mark.parametrize("name", SYNC_METHODS)
def test_table_and_class_agree(name, tmp_path):
    method = SYNC_METHODS[name]
    assert open_versions(name, tmp_path).keeps_tensors == (not method.vllm_backend)
    assert not method.without_own_gpus or not SYNC_METHODS[method.without_own_gpus].without_own_gpus


def test_open_versions_by_name(tmp_path):
    assert isinstance(open_versions("checkpoint", tmp_path), CheckpointVersions)
    memory = open_versions("memory", tmp_path)
    assert isinstance(memory, MemoryVersions)
    assert memory.root == open_versions("memory", tmp_path).root


@pytest.mark.parametrize(("mode", "name"), [("both", "nccl"), ("explore", "checkpoint"), ("bench", "checkpoint")])
def test_default_serves_the_mode(mode, name):
    assert default_sync_method(mode) == name
