"""The sync method `nccl`: the trainer pushes weights into the engines; a record only names the version.

Version 0 is the engines' initial model: it is announced, not pushed. The connection is made with the first push, when
the engines have had time to start. In fixed style the trainer pushes once every explorer waits for the version, so that
no explore step mixes two versions. In the other styles explorers never wait: engines pause, and each token records its
version.

A synchronous run with `sync_interval` above 1 or a `sync_offset` samples with weights older than the trainer's. To
resume exactly it needs them in its checkpoints, so before each push the tensors are copied to shared memory.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Self

from trinity_core.config.paths import engine_name
from trinity_core.config.sync_schedule import SyncSchedule
from trinity_core.config.training import dtype_of
from trinity_core.errors import TransientFault
from trinity_core.sync.digest import digest
from trinity_core.sync.memory import MemoryVersions, memory_root
from trinity_core.waits import poll

if TYPE_CHECKING:
    from torch import Tensor

    from trinity_core.config import Config
    from trinity_core.sync.nccl_transfer import NcclSender
    from trinity_core.sync.versions import TrainerRank, WeightVersions
    from trinity_core.sync.weight_check import WeightCheck

PUSHED = "pushed_weights"


class PushedVersions(MemoryVersions):
    """Versions whose tensors only the engines hold: a record has the number, the digests and the weight check."""

    @classmethod
    def open(cls, job_dir: Path) -> Self:
        """Records are in the run's folder, visible to explorers and engines on other nodes; copies are in shared
        memory."""
        return cls(job_dir / PUSHED, shared=memory_root(job_dir))

    keeps_tensors = False
    """Explorers do not load from here; checkpoints do if the run `needs_copies`."""

    def publisher(self, config: Config, trainer: TrainerRank) -> PushPublisher:
        if config.synchronizer.sync_style != "fixed":
            trainer = replace(trainer, explorers_wait=lambda version: True)
        connect = partial(connect_engines, config, trainer, self)
        return PushPublisher(self, trainer, connect, config.synchronizer.sync_timeout, engine_dtype(config))

    def there_at_start(self) -> list[int]:
        return [0]

    def rewind(self, version: int) -> list[int]:
        """Remove every version: a resumed run has new engines, which hold none of them."""
        return super().rewind(-1)


class PushPublisher:
    def __init__(
        self,
        versions: WeightVersions,
        trainer: TrainerRank,
        connect: Callable[[], NcclSender],
        timeout: float,
        dtype: str = "bfloat16",
    ) -> None:
        self._versions = versions
        self._trainer = trainer
        self._connect = connect
        self._timeout = timeout
        self._dtype = dtype
        self._sender: NcclSender | None = None

    def publish(self, version: int, check: WeightCheck) -> None:
        """See `WeightPublisher`. Sends nothing if the run is asked to stop before the explorers wait for `version`.

        Raises TransientFault if they do not wait for it within `sync_timeout`.
        """
        if version == 0:
            digests = {name: digest(tensor, dtype=self._dtype) for name, tensor in self._trainer.weights}
            if self._trainer.rank == 0:
                self._versions.publish(version, [], check, pushed=digests)
            return
        self._push(version, check, None)

    def publish_kept(self, version: int, check: WeightCheck | None, tensors: dict[str, Tensor]) -> None:
        """See `WeightPublisher`. Version 0 is only announced: engines of a resumed run start with it."""
        if version:
            self._push(version, check, tensors)
        elif self._trainer.rank == 0:
            self._versions.publish(version, [], check)

    def _push(self, version: int, check: WeightCheck | None, kept: dict[str, Tensor] | None) -> None:
        # Before the first push, engines hold version 0: explorers may wait for any newer version, and get this one.
        awaited = version if self._sender is not None else 1
        if self._sender is not None and kept is None:
            self._sender.copy()  # while the engines still sample
        if not self._trainer.any_rank(self._trainer.rank == 0 and self._wait(version, awaited)):
            return
        if self._sender is None:
            self._sender = self._connect()
            if kept is None:
                self._sender.copy()
        self._sender.send(version, check, kept)

    def _wait(self, version: int, awaited: int) -> bool:
        """Wait until every explorer waits for version `awaited`. Return False if the run is asked to stop first."""
        for _ in poll(self._timeout, pause=0.02):
            if self._trainer.explorers_wait(awaited):
                return True
            if self._trainer.stopping():
                return False
        raise TransientFault(f"no explorer asked for version {version} of the weights within synchronizer.sync_timeout")


def needs_copies(config: Config) -> bool:
    """True if a resumed run needs weights that the trainer no longer has."""
    return config.is_synchronous and not SyncSchedule.of(config).is_lockstep


def engine_dtype(config: Config) -> str:
    return dtype_of(config.explorer.rollout_model.dtype, on_gpu=True)


def connect_engines(config: Config, trainer: TrainerRank, versions: WeightVersions) -> NcclSender:
    """Connect rank 0 and the engines' workers in an NCCL group. Collective. Needs GPUs and Ray."""
    from trinity_core.sync.nccl_transfer import EngineGroup, NcclSender, VllmWeights, find_engines

    rollout = config.explorer.rollout_model
    copies = needs_copies(config)
    if trainer.rank != 0:
        return NcclSender(trainer.rank, VllmWeights(trainer.weights, copies=copies), None, None)
    weights = VllmWeights(trainer.weights, engine_dtype(config), copies)
    names = [engine_name(config, index) for index in range(rollout.engine_num)]
    engines = EngineGroup(find_engines(names, config.synchronizer.sync_timeout), rollout.tensor_parallel_size)
    return NcclSender(trainer.rank, weights, engines, versions)
