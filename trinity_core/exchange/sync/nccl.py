"""The sync method `nccl`: the trainer pushes weights into the engines; a record only names the version.

Version 0 is the engines' initial model: it is announced, not pushed. The connection is made with the first push, when
the engines have had time to start. In fixed style the trainer pushes once every explorer waits for the version, so that
no explore step mixes two versions. In the other styles explorers never wait: engines pause, and each token records its
version.

A synchronous run with `sync_interval` above 1 or a `sync_offset` samples with weights older than the trainer's. To
resume exactly it needs them in its checkpoints, so before each push the tensors are copied to shared memory.

Weights go from GPU to GPU through vLLM's weight-transfer API (`vllm.distributed.weight_transfer`, backend "nccl").
The trainer's rank 0 is NCCL rank 0; the workers of engine i are the ranks from `1 + i * workers` on. To push a version,
rank 0 calls the engines' four control methods while it broadcasts, and all trainer ranks gather. The version is
announced in the run's shared memory (weight check and digests, no tensors) before the engines use it: a reader may
briefly wait for an announced version, but engines are never ahead of what is announced.

Engines pause while they receive. To give each explore step a single version, push while the explorer waits.

Not covered: engines that join or leave during a run (the group is fixed; build a new `NcclSender`), expert parallelism.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import FIRST_EXCEPTION, wait
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, Self

from trinity_core.base.addresses import own_address, reserve_port
from trinity_core.base.errors import TransientFault, on_failure
from trinity_core.base.threads import DaemonThreads
from trinity_core.base.waits import poll
from trinity_core.config.paths import engine_name
from trinity_core.config.sync_schedule import SyncSchedule
from trinity_core.exchange.sync.memory import MemoryVersions, memory_root
from trinity_core.exchange.sync.tensorfile import TensorDigest, TensorSpec, digest, spec_of
from trinity_core.exchange.sync.versions import engine_dtype

if TYPE_CHECKING:
    import torch
    from torch import Tensor

    from trinity_core.config import Config
    from trinity_core.exchange.sync.versions import TrainerRank, TrainerWeights, WeightVersions
    from trinity_core.exchange.sync.weight_check import WeightCheck


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

    def _push(self, version: int, check: WeightCheck | None, kept_weights: dict[str, Tensor] | None) -> None:
        # Before the first push, engines hold version 0: explorers may wait for any newer version, and get this one.
        awaited = version if self._sender is not None else 1
        if self._sender is not None and kept_weights is None:
            self._sender.copy()  # while the engines still sample
        if not self._trainer.any_rank(self._trainer.rank == 0 and self._wait(version, awaited)):
            return
        if self._sender is None:
            self._sender = self._connect()
            if kept_weights is None:
                self._sender.copy()
        self._sender.send(version, check, kept_weights)

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


def connect_engines(config: Config, trainer: TrainerRank, versions: WeightVersions) -> NcclSender:
    """Connect rank 0 and the engines' workers in an NCCL group. Collective. Needs GPUs and Ray."""
    rollout = config.explorer.rollout_model
    copies = needs_copies(config)
    if trainer.rank != 0:
        return NcclSender(trainer.rank, VllmWeights(trainer.weights, copies=copies), None, None)
    weights = VllmWeights(trainer.weights, engine_dtype(config), copies)
    names = [engine_name(config, index) for index in range(rollout.engine_num)]
    engines = EngineGroup(find_engines(names, config.synchronizer.sync_timeout), rollout.tensor_parallel_size)
    return NcclSender(trainer.rank, weights, engines, versions)


Payload = dict[str, Any]
BUFFER_BYTES = 256 << 20
"""Size of each of the two transfer buffers, on either side. vLLM's default of 1 GiB would take 2 of 24 GiB."""


class RayEngine:
    """A Ray actor's four methods for receiving weights: `init_weight_transfer_engine(init_info)`,
    `start_weight_update()`, `update_weights(update_info)` and `finish_weight_update(weight_version)`.

    Each returns once the engine is done. `AsyncLLM` has methods with the same names.
    """

    def __init__(self, handle: Any, timeout: float) -> None:
        self._handle = handle
        self._timeout = timeout

    def __getattr__(self, name: str) -> Callable[..., None]:
        """Return the actor's method. It raises TransientFault if the engine is lost or does not answer."""
        return partial(self._call, name)

    def _call(self, name: str, *arguments: Any) -> None:
        import ray

        try:
            ray.get(getattr(self._handle, name).remote(*arguments), timeout=self._timeout)
        except (ray.exceptions.GetTimeoutError, ray.exceptions.RayActorError) as error:
            raise TransientFault(f"an engine did not answer {name} during weight sync: {error}") from error


class EngineGroup:
    """Several engines as the single client that vLLM's trainer side calls; each call goes to all engines at once."""

    def __init__(self, engines: Sequence[RayEngine], workers: int) -> None:
        if not engines or workers < 1:
            raise ValueError(f"a group needs engines with workers, got {len(engines)} engines of {workers}")
        self.engines = list(engines)
        self.workers = workers
        """Number of worker processes per engine (tensor × pipeline × data parallel size)."""
        self._expected: tuple[str, Callable[[], None]] | None = None
        self.abort: Callable[[], object] = lambda: None
        """Called if an engine fails to receive, because rank 0 is blocked in its broadcast to that engine."""

    def expect(self, version: int, announce: Callable[[], None]) -> None:
        """Set the version of the next update; `announce` is called once all engines have received it."""
        self._expected = (str(version), announce)

    @property
    def world_size(self) -> int:
        return 1 + len(self.engines) * self.workers

    def init_weight_transfer_engine(self, init_info: Payload) -> None:
        infos = [{**init_info, "rank_offset": 1 + i * self.workers} for i in range(len(self.engines))]
        self._all([partial(e.init_weight_transfer_engine, i) for e, i in zip(self.engines, infos, strict=True)])

    def start_weight_update(self) -> None:
        self._all([engine.start_weight_update for engine in self.engines])

    def update_weights(self, update_info: Payload) -> None:
        """Receive on all engines; returns once the last one has everything. A thread calls it during the broadcast."""
        with on_failure(self.abort):
            self._all([partial(engine.update_weights, update_info) for engine in self.engines])

    def finish_weight_update(self, weight_version: str | None = None) -> None:
        """Announce the expected version and activate it on all engines. vLLM's sender passes no version."""
        if self._expected is not None:
            weight_version, announce = self._expected
            announce()
        self._all([partial(engine.finish_weight_update, weight_version) for engine in self.engines])

    @staticmethod
    def _all(calls: Sequence[Callable[[], None]]) -> None:
        # A worker blocked in NCCL never returns, so raise an error without waiting for the other threads, and do not
        # let them delay the end of the process.
        threads = DaemonThreads("weight-transfer")
        done, _ = wait([threads.submit(call) for call in calls], return_when=FIRST_EXCEPTION)
        for future in done:
            future.result()


class VllmWeights:
    """The trainer's tensors as vLLM's `WeightSource`: their metadata, and a new iterator for each push."""

    def __init__(self, weights: TrainerWeights, engine_dtype: str = "", copies: bool = False) -> None:
        self._weights = self._present = weights
        self._engine_dtype = engine_dtype
        self._copies = copies
        self.digests: dict[str, TensorDigest] = {}
        """Digests of the tensors passed on last, in the engines' dtype. Empty without `engine_dtype`."""
        self.copied: dict[str, torch.Tensor] = {}
        """CPU copies, on the sending rank, of the tensors passed on next, if copies are requested."""

    @contextmanager
    def replaced_by(self, kept: Mapping[str, torch.Tensor]) -> Iterator[None]:
        """Within this context, pass on these weights instead."""
        self._weights = KeptWeights(kept)
        self.copied = dict(kept) if self._copies else {}
        try:
            yield
        finally:
            self._weights = self._present

    def copy(self) -> None:
        """Copy the current tensors to the CPU, if copies are requested. A separate pass, because engines pause during a
        push."""
        if self._copies:
            self.copied = {
                name: tensor.detach().to("cpu", copy=True) for name, tensor in self._weights if self._engine_dtype
            }

    def metadata(self) -> list[Any]:
        import torch
        from vllm.distributed.weight_transfer.base import ParamMeta

        return [ParamMeta(spec.name, vars(torch)[spec.dtype], tuple(spec.shape)) for spec in self._weights.specs()]

    def __iter__(self) -> Iterator[tuple[str, torch.Tensor]]:
        """Yield whole tensors on the sending GPU. Gathered ones are copied, because vLLM keeps several until a buffer
        is full."""
        for name, tensor in self._weights:
            if self._engine_dtype:
                self.digests[name] = digest(tensor, dtype=self._engine_dtype)
            yield name, tensor.clone() if self._weights.gathers else tensor


@dataclass(frozen=True)
class KeptWeights:
    """`TrainerWeights` of an older version, stored on the CPU and sent from the current GPU."""

    tensors: Mapping[str, torch.Tensor]
    gathers = False

    def specs(self) -> list[TensorSpec]:
        return [spec_of(name, tensor) for name, tensor in self.tensors.items()]

    def __iter__(self) -> Iterator[tuple[str, torch.Tensor]]:
        import torch

        device = "cuda" if torch.cuda.is_available() else "cpu"
        return ((name, tensor.to(device)) for name, tensor in self.tensors.items())


class NcclSender:
    """The trainer's side. Collective: every rank creates one and calls `send`; rank 0 has `engines` and `versions`."""

    def __init__(
        self, rank: int, source: VllmWeights, engines: EngineGroup | None, versions: WeightVersions | None
    ) -> None:
        from vllm.distributed.weight_transfer.nccl_engine import NCCLTrainerInitInfo, NCCLTrainerWeightTransferEngine

        self._versions, self._engines, self._source = versions, engines, source
        world_size = engines.world_size if engines is not None else 1
        # vLLM's annotations ask for its own classes, but duck typing is enough.
        client: Any = engines
        weights: Any = source
        with reserve_port(own_address()) as holder:  # keeps the port until vLLM listens there
            address, port = holder.getsockname()
            info = NCCLTrainerInitInfo(address, port, world_size, rank=rank, packed_buffer_size_bytes=BUFFER_BYTES)
            self._engine = NCCLTrainerWeightTransferEngine.trainer_init(info, client=client, source=weights)
        if engines is not None:
            engines.abort = self._abort

    def copy(self) -> None:
        """Keep copies of the current weights for `send` to announce, if the run needs them."""
        self._source.copy()

    def send(
        self, version: int, check: WeightCheck | None = None, kept: Mapping[str, torch.Tensor] | None = None
    ) -> None:
        """Push the current weights, or `kept`, to every engine as `version`; rank 0 announces it."""
        import torch

        if self._engines is not None:
            self._engines.expect(version, partial(self._announce, version, check))
        if torch.cuda.is_available():
            torch.cuda.synchronize()  # vLLM reads the weights on streams of its own, which wait for no other
        if kept is None:
            self._engine.send_weights()
        elif self._engines is not None:
            with self._source.replaced_by(kept):
                self._engine.send_weights()

    def _abort(self) -> None:
        """Abort the broadcast that this process is in: NCCL would wait forever for the lost engine."""
        if self._engine.model_update_group is not None:
            self._engine.model_update_group.destroy()  # calls ncclCommAbort

    def _announce(self, version: int, check: WeightCheck | None) -> None:
        if self._versions is not None:
            self._versions.publish(version, self._source.copied.items(), check, pushed=self._source.digests)

    def close(self) -> None:
        self._engine.shutdown()


def find_engines(names: Sequence[str], timeout: float) -> list[RayEngine]:
    """Return the Ray actors with these names in this job's namespace, once they have started.

    Raises TransientFault if one does not exist or does not start within `timeout` seconds.
    """
    import ray

    try:
        handles = [ray.get_actor(name) for name in names]
        ray.get([handle.start.remote() for handle in handles], timeout=timeout)
    except (ValueError, ray.exceptions.GetTimeoutError, ray.exceptions.RayActorError) as error:
        raise TransientFault(f"the engines that take the weights cannot be reached: {error}") from error
    return [RayEngine(handle, timeout) for handle in handles]
