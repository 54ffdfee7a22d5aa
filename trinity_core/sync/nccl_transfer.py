"""Weights from GPU to GPU through vLLM's weight-transfer API (`vllm.distributed.weight_transfer`, backend "nccl").

The trainer's rank 0 is NCCL rank 0, the workers of engine i are the ranks `1 + i * workers` and up. A hand-over is a
push: rank 0 calls the engines' four control methods while it broadcasts, every other trainer rank gathers along with
it. The version is announced in the run's memory folder, without tensors but with its probe, before the engines put it
in use: whoever loads an announced version waits for a moment, and never finds engines ahead of what is announced.

Engines pause while they receive. Where each explore step is to have one version, push when the explorer waits.
Not covered: engines that come or go during a run (the group is fixed; build a new `NcclSender`), expert parallelism.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from typing import TYPE_CHECKING, Any, Protocol

from trinity_core.addresses import rendezvous
from trinity_core.errors import TransientFault

if TYPE_CHECKING:
    import torch

    from trinity_core.sync.publisher import TrainerWeights
    from trinity_core.sync.versions import WeightVersions
    from trinity_core.sync.weight_check import WeightCheck

Payload = dict[str, Any]


class EngineControl(Protocol):
    """The four calls of one engine; each returns when the engine has done it. `AsyncLLM` has them by these names."""

    def init_weight_transfer_engine(self, init_info: Payload) -> None:
        """Join the NCCL group."""

    def start_weight_update(self) -> None:
        """Make ready to receive."""

    def update_weights(self, update_info: Payload) -> None:
        """Receive what the trainer broadcasts."""

    def finish_weight_update(self, weight_version: str | None = None) -> None:
        """Put the received weights in use."""


class RayEngine:
    """The control of an engine that is a Ray actor with methods of the same names taking plain values."""

    def __init__(self, handle: Any, timeout: float) -> None:
        self._handle = handle
        self._timeout = timeout

    def init_weight_transfer_engine(self, init_info: Payload) -> None:
        """As `EngineControl`."""
        self._call("init_weight_transfer_engine", self._handle.init_weight_transfer_engine.remote(init_info))

    def start_weight_update(self) -> None:
        """As `EngineControl`."""
        self._call("start_weight_update", self._handle.start_weight_update.remote())

    def update_weights(self, update_info: Payload) -> None:
        """As `EngineControl`."""
        self._call("update_weights", self._handle.update_weights.remote(update_info))

    def finish_weight_update(self, weight_version: str | None = None) -> None:
        """As `EngineControl`."""
        self._call("finish_weight_update", self._handle.finish_weight_update.remote(weight_version))

    def _call(self, name: str, reference: Any) -> None:
        import ray

        try:
            ray.get(reference, timeout=self._timeout)
        except (ray.exceptions.GetTimeoutError, ray.exceptions.RayActorError) as error:
            raise TransientFault(f"an engine did not answer {name} during the hand-over of weights: {error}") from error


class EngineGroup:
    """Several engines as the one client that vLLM's trainer side drives; calls go to all of them at once."""

    def __init__(self, engines: Sequence[EngineControl], workers: int) -> None:
        if not engines or workers < 1:
            raise ValueError(f"a group needs engines with workers, got {len(engines)} engines of {workers}")
        self.engines = list(engines)
        self.workers = workers
        """Worker processes of each engine (tensor x pipeline x data parallel size)."""
        self._coming: tuple[str, Callable[[], None]] | None = None

    def expect(self, version: int, announce: Callable[[], None]) -> None:
        """What comes next is `version`; `announce` is called when all engines have received it."""
        self._coming = (str(version), announce)

    @property
    def world_size(self) -> int:
        """Ranks of the NCCL group: the trainer's rank 0 and every worker."""
        return 1 + len(self.engines) * self.workers

    def init_weight_transfer_engine(self, init_info: Payload) -> None:
        """Give each engine its own place among the ranks."""
        infos = [{**init_info, "rank_offset": 1 + i * self.workers} for i in range(len(self.engines))]
        self._all([partial(e.init_weight_transfer_engine, i) for e, i in zip(self.engines, infos, strict=True)])

    def start_weight_update(self) -> None:
        """On all engines."""
        self._all([engine.start_weight_update for engine in self.engines])

    def update_weights(self, update_info: Payload) -> None:
        """On all engines; returns when the last has received everything."""
        self._all([partial(engine.update_weights, update_info) for engine in self.engines])

    def finish_weight_update(self, weight_version: str | None = None) -> None:
        """On all engines, as the version that is expected. vLLM's sender names none."""
        if self._coming is not None:
            weight_version, announce = self._coming
            announce()
        self._all([partial(engine.finish_weight_update, weight_version) for engine in self.engines])

    @staticmethod
    def _all(calls: Sequence[Callable[[], None]]) -> None:
        # A worker blocked in NCCL never returns, so an error must not wait for the other threads.
        pool = ThreadPoolExecutor(len(calls))
        try:
            for future in [pool.submit(call) for call in calls]:
                future.result()
        finally:
            pool.shutdown(wait=False)


class VllmWeights:
    """The trainer's tensors as vLLM's `WeightSource`: their metadata, and a fresh pass over them for each push."""

    def __init__(self, weights: TrainerWeights) -> None:
        self._weights = weights

    def metadata(self) -> list[Any]:
        """Name, dtype and shape of each tensor, in order of iteration."""
        import torch
        from vllm.distributed.weight_transfer.base import ParamMeta

        return [ParamMeta(spec.name, vars(torch)[spec.dtype], tuple(spec.shape)) for spec in self._weights.specs()]

    def __iter__(self) -> Iterator[tuple[str, torch.Tensor]]:
        """Whole tensors on the sending GPU. vLLM keeps several until a buffer is full, so gathered ones are copied."""
        for name, tensor in self._weights:
            yield name, tensor.clone() if self._weights.gathers else tensor


class NcclSender:
    """The trainer's side. Collective: every rank makes one and calls `send`; rank 0 has `engines` and `folder`."""

    def __init__(
        self, rank: int, source: VllmWeights, engines: EngineGroup | None, folder: WeightVersions | None
    ) -> None:
        from vllm.distributed.weight_transfer.nccl_engine import NCCLTrainerInitInfo, NCCLTrainerWeightTransferEngine

        self._folder, self._engines = folder, engines
        world_size = engines.world_size if engines is not None else 1
        info = NCCLTrainerInitInfo(*rendezvous(), world_size, rank=rank)
        # vLLM's types want its own classes; what it uses is the shape alone.
        client: Any = engines
        weights: Any = source
        self._engine = NCCLTrainerWeightTransferEngine.trainer_init(info, client=client, source=weights)

    def send(self, version: int, check: WeightCheck | None = None) -> None:
        """Push the present weights to every engine as `version`, and announce it (rank 0)."""
        if self._engines is not None:
            self._engines.expect(version, partial(self._announce, version, check))
        self._engine.send_weights()

    def _announce(self, version: int, check: WeightCheck | None) -> None:
        if self._folder is not None:
            self._folder.publish(version, [], check)

    def close(self) -> None:
        """Leave the group."""
        self._engine.shutdown()


def find_engines(names: Sequence[str], timeout: float) -> list[RayEngine]:
    """The engines that are Ray actors of these names in this job's namespace, once they have started.

    Raises TransientFault where one is not there, or does not start within `timeout` seconds.
    """
    import ray

    try:
        handles = [ray.get_actor(name) for name in names]
        ray.get([handle.start.remote() for handle in handles], timeout=timeout)
    except (ValueError, ray.exceptions.GetTimeoutError, ray.exceptions.RayActorError) as error:
        raise TransientFault(f"the engines that weights go to are not there: {error}") from error
    return [RayEngine(handle, timeout) for handle in handles]
