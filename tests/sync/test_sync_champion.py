"""The sync method `champion`: an endpoint's versions are the entries of its project's champions."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from raising import raising

from trinity_core.base.errors import DataError, TrinityError
from trinity_core.data.tiny import TinyFolders
from trinity_core.exchange.sync.champion import ChampionVersions
from trinity_core.exchange.sync.tensorfile import value_digest
from trinity_core.exchange.sync.versions import VersionGone, open_versions
from trinity_core.exchange.tracking.champions import go_back, promote


def test_versions_are_the_champions_in_order(tmp_path: Path, tiny_folders: TinyFolders) -> None:
    versions = open_versions("champion", tmp_path / "p" / "served")
    assert isinstance(versions, ChampionVersions)
    assert versions.latest() is None and not versions.has(0), "the endpoint's own model"
    model, gone = str(tiny_folders.model), str(tmp_path / "gone")
    promote(tmp_path / "p", model, None, {})
    promote(tmp_path / "p", gone, model, {})
    assert (versions.latest(), versions.versions(), versions.has(2), versions.has(3)) == (2, [1, 2], True, False)
    tensors = dict(versions.load(1))
    assert tensors and all(tensor.dtype == torch.float32 for tensor in tensors.values())
    assert versions.values(1, "bfloat16") == {name: value_digest(t, "bfloat16") for name, t in tensors.items()}
    with raising(DataError, key=gone):
        versions.load(2)
    with pytest.raises(VersionGone):
        versions.load(3)
    go_back(tmp_path / "p")
    assert versions.latest() == 3 and dict(versions.load(3)).keys() == tensors.keys()


def test_nothing_but_the_gate_changes_them(tmp_path: Path, tiny_folders: TinyFolders) -> None:
    versions = open_versions("champion", tmp_path / "p" / "served")
    promote(tmp_path / "p", str(tiny_folders.model), None, {})
    assert versions.rewind(-1) == [] and versions.latest() == 1
    with raising(TrinityError, key="synchronizer.sync_method"):
        versions.publish(2, [])
