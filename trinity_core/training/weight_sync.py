"""The ways by which weights leave the trainer: through a folder, or over NCCL. `open_hand_over` chooses.

Every rank has a way of its own and calls `give` in step with the others: under ZeRO 3 each tensor is gathered from all.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from functools import partial
from typing import TYPE_CHECKING, Protocol

from torch import Tensor

from trinity_core.config.paths import engine_name
from trinity_core.config.schema import Config
from trinity_core.errors import TransientFault
from trinity_core.sync.tensorfile import TensorSpec, spec_of
from trinity_core.sync.versions import WeightVersions, open_versions
from trinity_core.sync.weight_check import WeightCheck
from trinity_core.training.distributed import Ranks, broadcast_bytes
from trinity_core.training.state import buffers, shape_of, weights

if TYPE_CHECKING:
    from trinity_core.sync.nccl import NcclSender, TrainerWeights
    from trinity_core.training.engine import TrainingEngine

POLL_SECONDS = 0.02
"""Between two looks at whether the explorers wait."""


class HandOver(Protocol):
    """One way of giving weights to the engines."""

    folder: WeightVersions
    """Where versions are announced."""
    keeps_tensors: bool
    """Whether a version can still be read from the folder after it was given."""

    def give(self, version: int, probe: WeightCheck) -> None:
        """Give the present weights as `version`. Collective; rank 0 writes or sends."""


class Sender(Protocol):
    """What `PushHandOver` needs of `NcclSender`."""

    def send(self, version: int, probe: WeightCheck | None = None) -> None:
        """Push the present weights and announce them. Collective."""


class FolderHandOver:
    """Writes each version to the folder, from which the engines load it."""

    keeps_tensors = True

    def __init__(self, engine: TrainingEngine, ranks: Ranks, folder: WeightVersions) -> None:
        self.folder = folder
        self._engine = engine
        self._ranks = ranks

    def give(self, version: int, probe: WeightCheck) -> None:
        """As `HandOver`."""
        named = weights(self._engine, tied=True)
        gathers = self._engine.settings.zero_stage == 3
        if self._ranks.first:
            self.folder.publish(version, named, probe, specs=specs_of(self._engine) if gathers else None)
        elif gathers:
            for _ in named:
                pass


class PushHandOver:
    """Pushes each version into the engines; the folder only says so.

    Version 0 is what engines start with: nothing is pushed. The connection is made with the first push, when the
    engines have had time to start.
    """

    keeps_tensors = False

    def __init__(
        self, ranks: Ranks, folder: WeightVersions, connect: Callable[[], Sender], awaited: Callable[[int], bool],
        stopping: Callable[[], bool], timeout: float,
    ) -> None:  # fmt: skip
        self.folder = folder
        self._ranks = ranks
        self._connect = connect
        self._awaited = awaited
        self._stopping = stopping
        self._timeout = timeout
        self._sender: Sender | None = None

    def give(self, version: int, probe: WeightCheck) -> None:
        """As `HandOver`. Nothing is sent where the run is asked to stop before the explorers wait for `version`."""
        if version == 0:
            if self._ranks.first:
                self.folder.publish(version, [], probe)
            return
        # Engines that nothing was pushed to hold version 0: whichever newer one is waited for, they get this one.
        asked = version if self._sender is not None else 1
        wanted = str(int(self._wait(version, asked))).encode() if self._ranks.first else None
        if broadcast_bytes(wanted, self._ranks) == b"0":
            return
        if self._sender is None:
            self._sender = self._connect()
        self._sender.send(version, probe)

    def _wait(self, version: int, asked: int) -> bool:
        """Until no explorer is in the midst of a step; False: the run stops first."""
        deadline = time.monotonic() + self._timeout
        while not self._awaited(asked):
            if self._stopping():
                return False
            if time.monotonic() > deadline:
                raise TransientFault(
                    f"no explorer asked for version {version} of the weights within synchronizer.sync_timeout"
                )
            time.sleep(POLL_SECONDS)
        return True


def open_hand_over(
    config: Config, engine: TrainingEngine, ranks: Ranks, awaited: Callable[[int], bool], stopping: Callable[[], bool]
) -> HandOver:
    """The way of `synchronizer.sync_method`. `awaited(version)` says whether all explorers wait for that version.

    In the dynamic styles explorers never wait: engines pause in the midst of a step, and each token has its version.
    """
    sync = config.synchronizer
    if sync.sync_method != "nccl":
        return FolderHandOver(engine, ranks, open_versions(sync.sync_method, config.job_dir))
    folder = open_versions("nccl", config.job_dir)
    connect = partial(connect_engines, config, engine, ranks, folder)
    ready = awaited if sync.sync_style == "fixed" else _always
    return PushHandOver(ranks, folder, connect, ready, stopping, sync.sync_timeout)


def connect_engines(config: Config, engine: TrainingEngine, ranks: Ranks, folder: WeightVersions) -> NcclSender:
    """Join the engines' workers in an NCCL group. Collective; only rank 0 is a member. Needs GPUs and Ray."""
    from trinity_core.sync.nccl import EngineGroup, NcclSender, find_engines

    source = trainer_weights(engine)
    if not ranks.first:
        return NcclSender(ranks.rank, source, None, None)
    rollout = config.explorer.rollout_model
    names = [engine_name(config, index) for index in range(rollout.engine_num)]
    engines = EngineGroup(find_engines(names, config.synchronizer.sync_timeout), rollout.tensor_parallel_size)
    return NcclSender(ranks.rank, source, engines, folder)


def trainer_weights(engine: TrainingEngine) -> TrainerWeights:
    """The engine's weights as vLLM's sender wants them: specs first, then a fresh pass for each hand-over."""
    from trinity_core.sync.nccl import TrainerWeights

    return TrainerWeights(specs_of(engine), partial(_lasting, engine))


def specs_of(engine: TrainingEngine) -> list[TensorSpec]:
    """Name, dtype and whole shape of what `weights(engine, tied=True)` goes through, without gathering anything."""
    dtype = str(engine.settings.dtype).removeprefix("torch.")
    trained = [
        TensorSpec(name.removeprefix("lm."), dtype, shape_of(p, engine))
        for name, p in engine.module.named_parameters(remove_duplicate=False)
    ]
    return trained + [spec_of(name, buffer) for name, buffer in buffers(engine).items()]


def _lasting(engine: TrainingEngine) -> Iterator[tuple[str, Tensor]]:
    """vLLM collects tensors until a buffer is full; under ZeRO 3 the gathered ones do not last that long."""
    gathers = engine.settings.zero_stage == 3
    for name, tensor in weights(engine, tied=True):
        yield name, tensor.clone() if gathers else tensor


def _always(version: int) -> bool:
    return True
