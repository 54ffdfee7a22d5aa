"""The sync method `champion`: an endpoint without a trainer follows the project's champion.

Version n is the model of entry n in the project's `champions.json`, which the gate and `trinity promote --back` append
to; version 0 is the endpoint's own model, until there is a champion. Nothing is published or removed here.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any, NoReturn

from trinity_core.base.errors import TrinityError
from trinity_core.exchange.checkpoints.huggingface import folder_tensors
from trinity_core.exchange.sync.tensorfile import value_digest
from trinity_core.exchange.sync.versions import VersionGone, WeightVersions
from trinity_core.exchange.tracking.champions import history

if TYPE_CHECKING:
    import torch


class ChampionVersions(WeightVersions):
    @classmethod
    def open(cls, job_dir: Path) -> ChampionVersions:
        return cls(job_dir.parent)

    def _write(self, *_: Any) -> NoReturn:
        raise TrinityError("the gate alone makes a champion", key="synchronizer.sync_method")

    def versions(self) -> list[int]:
        return list(range(1, len(history(self.root)) + 1))

    def has(self, version: int) -> bool:
        return version in self.versions()

    def load(self, version: int) -> Iterator[tuple[str, torch.Tensor]]:
        """Return the tensors of a champion. Raises VersionGone, and DataError if its folder is gone."""
        return folder_tensors(self._record_path(version))

    def values(self, version: int, dtype: str) -> dict[str, int]:
        return {name: value_digest(tensor, dtype) for name, tensor in self.load(version)}

    def check(self, version: int) -> None:
        """There are no log-probs of a trainer: each engine compares all its parameters with the folder instead."""

    def rewind(self, version: int) -> list[int]:
        return []

    def _record_path(self, version: int) -> Path:
        entries = history(self.root)
        if not 0 < version <= len(entries):
            raise VersionGone(f"{self.root} has had {len(entries)} champions, so there is no version {version}")
        return Path(entries[version - 1].model)

    def _map(self, *_: Any) -> NoReturn:
        raise NotImplementedError("champions are loaded from their folders")

    def _forget(self, version: int) -> None:
        """A champion's checkpoint stays."""
