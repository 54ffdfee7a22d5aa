"""The interface of a sync method: versions that the trainer publishes and the engines load.

Every implementation guarantees:

- A reader sees a version completely or not at all, whichever process is killed, at any time.
- The tensors of a loaded version do not change while any of them is alive, however many versions are published since.
- After `rewind` no reader sees a version of the abandoned lineage.

One process publishes at a time; any number of processes load.
"""

from __future__ import annotations

import errno
import json
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass, field
from pathlib import Path
from pkgutil import resolve_name
from typing import TYPE_CHECKING, ClassVar, Protocol
from uuid import uuid4

from trinity_core.base.errors import DataError, TransientFault
from trinity_core.base.files import from_record, write_atomically
from trinity_core.base.layout import LATEST_STATE_DICT
from trinity_core.base.waits import poll
from trinity_core.config import Config
from trinity_core.config.sync_methods import SYNC_METHODS
from trinity_core.config.sync_schedule import SyncSchedule
from trinity_core.config.training import dtype_of
from trinity_core.exchange.sync.tensorfile import (
    Layout,
    TensorDigest,
    TensorSpec,
    plan,
    spec_of,
    value_digest,
    views,
)
from trinity_core.exchange.sync.weight_check import WeightCheck

if TYPE_CHECKING:
    import mmap

    import torch
    from torch import Tensor


@dataclass(frozen=True)
class VersionRecord:
    """A loadable version. The record is written atomically after the tensors."""

    version: int
    file: str
    """Path of the tensor file, relative to the record's folder, or absolute."""
    size: int
    nonce: str
    """Unique per publication, so that a reader notices when the same version is published again."""
    aliases: dict[str, str]
    """Name → name under which its tensor is stored (tied embeddings)."""
    check: WeightCheck | None = None
    digests: dict[str, TensorDigest] = field(default_factory=dict)
    """Digests by tensor name, including names in `aliases`."""

    def to_bytes(self) -> bytes:
        return json.dumps(asdict(self)).encode() + b"\n"

    @classmethod
    def read(cls, path: Path) -> VersionRecord | None:
        """Return the record at `path`, or None. Raises DataError for a record written by a newer release."""
        try:
            with stale_as_missing():
                value = json.loads(path.read_bytes())
        except FileNotFoundError:
            return None
        check = value.pop("check")
        digests = {name: TensorDigest(*digest) for name, digest in value.pop("digests").items()}
        others = {"check": None if check is None else WeightCheck.from_json(check), "digests": digests}
        return from_record(cls, value | others, path)


@contextmanager
def stale_as_missing() -> Iterator[None]:
    """Raise FileNotFoundError for a file that another machine removed while it was being read over NFS."""
    try:
        yield
    except OSError as error:
        if error.errno != errno.ESTALE:
            raise
        raise FileNotFoundError(errno.ENOENT, error.strerror, error.filename) from error


@dataclass(frozen=True)
class Payload:
    """Tensors ready to be written, with their layout and aliases."""

    layout: Layout
    tensors: Iterable[tuple[str, torch.Tensor]]
    aliases: dict[str, str]

    def record(
        self, version: int, file: str, check: WeightCheck | None, digests: dict[str, TensorDigest]
    ) -> VersionRecord:
        """Return the record of this payload, written to `file` as `version`, with the written tensors' digests."""
        shared = {alias: digests[name] for alias, name in self.aliases.items()}
        return VersionRecord(version, file, self.layout.size, uuid4().hex, self.aliases, check, digests | shared)


def gather(tensors: Iterable[tuple[str, torch.Tensor]], specs: Sequence[TensorSpec] | None) -> Payload:
    """Plan the file of `tensors`.

    With `specs` the tensors are consumed one at a time, so that gathered partitions need no second copy of the model.
    Without, all tensors are held at once. Tied tensors are stored once: they are marked in `specs`, or share memory.
    """
    aliases: dict[str, str]
    if specs is not None:
        aliases = {spec.name: spec.same_as for spec in specs if spec.same_as}
        stored = ((name, tensor) for name, tensor in tensors if name not in aliases)
        return Payload(plan(spec for spec in specs if not spec.same_as), stored, aliases)
    seen: dict[tuple[object, ...], str] = {}
    aliases = {}
    gathered: list[tuple[str, torch.Tensor]] = []
    for name, tensor in tensors:
        storage = (tensor.device, tensor.data_ptr(), tensor.dtype, tuple(tensor.shape), tensor.stride())
        if tensor.numel() and storage in seen:
            aliases[name] = seen[storage]
        else:
            seen[storage] = name
            gathered.append((name, tensor))
    return Payload(plan(spec_of(name, tensor) for name, tensor in gathered), gathered, aliases)


DEFAULT_KEEP = 2
"""Number of versions that stay loadable: the newest, and one that an explorer may be about to load."""

LIST_EVERY = 20
"""Number of looks for a version per listing of the folder for newer ones."""


class TrainerWeights(Protocol):
    """The policy's current weights, whole, including tied names; for a policy with an adapter, only the adapter."""

    @property
    def gathers(self) -> bool:
        """True if all ranks must iterate in step, because each tensor is gathered and valid only until the next one."""

    def specs(self) -> list[TensorSpec]:
        """Return name, dtype and whole shape of each tensor, in order of iteration, without gathering."""

    def __iter__(self) -> Iterator[tuple[str, torch.Tensor]]:
        """A fresh pass over names and tensors."""


@dataclass(frozen=True)
class TrainerRank:
    """The trainer rank that a publisher belongs to."""

    rank: int
    weights: TrainerWeights
    any_rank: Callable[[bool], bool]
    """Return True on every rank if the argument is True on one. Collective."""
    explorers_wait: Callable[[int], bool]
    """True if every explorer waits for this version or a newer one, or has finished. Called on rank 0 only."""
    stopping: Callable[[], bool]
    held: Callable[[], Mapping[str, TensorDigest]] = dict
    """Digests of tensors that engines already hold: an adapter's base. The first call is collective if `weights`
    gathers."""


class WeightPublisher(Protocol):
    """Publishes versions of the trainer's weights by one sync method."""

    def publish(self, version: int, check: WeightCheck) -> None:
        """Publish the current weights as `version`. Collective; rank 0 writes or sends."""

    def publish_kept(self, version: int, check: WeightCheck | None, tensors: dict[str, torch.Tensor]) -> None:
        """Publish an older `version`, whose tensors are on rank 0 (empty on the others). Collective."""


class VersionGone(TransientFault):
    """A version was removed between `latest` and `load`; ask for the latest one again."""


class WeightVersions(ABC):
    """Published versions under `root`; see the module docstring for the guarantees."""

    keeps_tensors: ClassVar[bool] = True
    """True if `load` can return the tensors of a published version."""
    durable: ClassVar[bool] = False
    """True if versions survive a power cut: what names them is flushed to the disk."""
    digest_dtype: str = ""
    """The engines' dtype, to which float tensors are converted for the digests of what is published; "": their own."""

    def __init__(self, root: Path) -> None:
        self.root = Path(root)

    @classmethod
    @abstractmethod
    def open(cls, job_dir: Path) -> WeightVersions:
        """Return the versions of the run in `job_dir`. Reads and writes nothing yet."""

    def publisher(self, config: Config, trainer: TrainerRank) -> WeightPublisher:
        self.digest_dtype = engine_dtype(config)
        return VersionPublisher(self, trainer, version_count(config))

    def publish(
        self,
        version: int,
        named_tensors: Iterable[tuple[str, torch.Tensor]],
        check: WeightCheck | None = None,
        keep: int = DEFAULT_KEEP,
        specs: Sequence[TensorSpec] | None = None,
        pushed: Mapping[str, TensorDigest] | None = None,
    ) -> VersionRecord:
        """Make `version` loadable and remove all but the newest `keep` versions.

        Tensors may be on any device. With `specs` they are consumed one at a time, in any order. `pushed` holds the
        digests of tensors that are not written, because the engines already have them. Publishing a version again
        replaces it. Raises TrinityError if the disk is full or another process publishes to the same run.
        """
        payload = gather(named_tensors, specs)
        file, written = self._write(version, payload)
        record = payload.record(version, file, check, written | dict(pushed or {}))
        write_atomically(self._record_path(version), record.to_bytes(), self.durable)
        self._point_to(version)
        for old in self.versions()[: -max(keep, 1)]:
            if old != version:
                self._forget(old)
        return record

    @abstractmethod
    def versions(self) -> list[int]:
        """Return the loadable versions, ascending."""

    def whole(self) -> list[int]:
        """Return the versions whose tensors can be loaded: a cleaner of temporary files may have removed some."""
        whole = []
        for version in self.versions():
            with suppress(VersionGone):
                if next(self.load(version), None) is not None:
                    whole.append(version)
        return whole

    def there_at_start(self) -> list[int]:
        """Return the versions that the engines of a resumed run can load, after `rewind` and before anything is
        published."""
        return self.whole()

    @abstractmethod
    def _record_path(self, version: int) -> Path: ...

    @abstractmethod
    def _write(self, version: int, payload: Payload) -> tuple[str, dict[str, TensorDigest]]:
        """Write the tensors of `version`. Return the file for its record, and the digests of what was written."""

    @abstractmethod
    def _map(self, record: VersionRecord, record_path: Path) -> tuple[mmap.mmap, Layout]:
        """Map the file of `record` and pin it. Raises FileNotFoundError if the record is gone or was replaced."""

    @abstractmethod
    def _forget(self, version: int) -> None:
        """Remove the record of `version`; its memory is freed after the last reader."""

    def record(self, version: int) -> VersionRecord:
        """Raises VersionGone."""
        if (record := VersionRecord.read(self._record_path(version))) is None:
            raise self._gone(version)
        return record

    def _gone(self, version: int) -> VersionGone:
        return VersionGone(f"version {version} of the weights is no longer in {self.root}")

    def check(self, version: int) -> WeightCheck | None:
        """Return the weight check of `version`, or None if it has none. Raises VersionGone."""
        return self.record(version).check

    def latest(self) -> int | None:
        try:
            with stale_as_missing():
                pointed = int((self.root / LATEST_STATE_DICT).read_text())
        except (FileNotFoundError, ValueError):
            pointed = -1
        if pointed >= 0 and self.has(pointed):
            return pointed
        return max(self.versions(), default=None)

    def has(self, version: int) -> bool:
        return self._record_path(version).exists()

    def wait(self, version: int, timeout: float, stop: Callable[[], bool] | None = None) -> int | None:
        """Wait for `version` and return it, or the oldest newer version if `version` has already been removed.

        Returns None once `stop()` is true. Raises TransientFault after `timeout` seconds.
        """
        for look, _ in enumerate(poll(timeout)):
            if self.has(version):
                return version
            newer = [v for v in self.versions() if v > version] if look % LIST_EVERY == 0 else []
            if newer and not self.has(version):
                return newer[0]
            if stop is not None and stop():
                return None
        raise TransientFault(
            f"version {version} of the weights did not appear in {self.root} within {timeout:g} s (the newest "
            f"there is {self.latest()}); check that the trainer is alive, or raise synchronizer.sync_timeout"
        )

    def load(self, version: int) -> Iterator[tuple[str, torch.Tensor]]:
        """Yield the tensors of `version` with their names, as views of the mapped file without a copy.

        The memory cannot be reused while any of the tensors is alive, so do not keep them longer than needed. Writes to
        a view are private. Raises VersionGone if the version is gone, DataError if its file is damaged.
        """
        return iter(self._open(version)[1].items())

    def values(self, version: int, dtype: str) -> dict[str, int]:
        """Return tensor name → value digest in an engine of this dtype.

        Tensors that were not written (an adapter's base) are left out if their digests are of another dtype. Raises
        what `load` raises.
        """
        import torch

        record = self.record(version)
        other = {name for name, d in record.digests.items() if d.dtype != dtype and d.written}
        recast = {name: value_digest(t, dtype) for name, t in self.load(version) if name in other} if other else {}
        unwritten = {
            d.dtype for d in record.digests.values() if not d.written and vars(torch)[d.dtype].is_floating_point
        }
        fits = unwritten <= {dtype}
        return {name: d.values for name, d in record.digests.items() if d.written or fits} | recast

    def _open(self, version: int) -> tuple[VersionRecord, dict[str, torch.Tensor]]:
        path = self._record_path(version)
        for _ in poll(LOAD_SECONDS):
            record = VersionRecord.read(path)
            with suppress(FileNotFoundError), stale_as_missing():
                if record is not None:
                    return record, self._named(record, *self._map(record, path))
        raise self._gone(version)

    def _named(self, record: VersionRecord, buffer: mmap.mmap, layout: Layout) -> dict[str, torch.Tensor]:
        if layout.size != record.size:
            raise DataError(f"version {record.version} in {self.root} has {layout.size} bytes instead of {record.size}")
        tensors = dict(views(buffer, layout))
        return tensors | {alias: tensors[name] for alias, name in record.aliases.items()}

    def rewind(self, version: int) -> list[int]:
        """Remove every version newer than `version` (-1: all) and return them. Call it before the store's `rewind`."""
        gone = [v for v in self.versions() if v > version]
        self._point_to(max((v for v in self.versions() if v <= version), default=None))
        for v in gone:
            self._forget(v)
        return gone

    def remove(self) -> None:
        self.rewind(-1)

    def _point_to(self, version: int | None) -> None:
        path = self.root / LATEST_STATE_DICT
        if version is None:
            path.unlink(missing_ok=True)
        else:
            write_atomically(path, f"{version}\n".encode(), self.durable)


LOAD_SECONDS = 0.7
"""Time until a version without a record counts as gone. While a full checkpoint replaces a folder that holds only
weights, the folder briefly does not exist."""


class VersionPublisher:
    """Publishes by writing each version with all its tensors to `versions`, from which the engines load it."""

    def __init__(self, versions: WeightVersions, trainer: TrainerRank, keep: int = DEFAULT_KEEP) -> None:
        self._versions = versions
        self._trainer = trainer
        self._keep = keep

    def publish(self, version: int, check: WeightCheck) -> None:
        weights, held = self._trainer.weights, self._held()
        if self._trainer.rank == 0:
            specs = weights.specs() if weights.gathers else None
            self._versions.publish(version, weights, check, self._keep, specs, held)
        elif weights.gathers:
            for _ in weights:
                pass

    def publish_kept(self, version: int, check: WeightCheck | None, tensors: dict[str, Tensor]) -> None:
        held = self._held()
        if self._trainer.rank == 0:
            self._versions.publish(version, tensors.items(), check, self._keep, pushed=held)

    def _held(self) -> Mapping[str, TensorDigest]:
        return self._trainer.held() if self._trainer.rank == 0 or self._trainer.weights.gathers else {}


def open_versions(method: str, job_dir: Path | str) -> WeightVersions:
    """Return the versions that the run in `job_dir` publishes by `method`. Reads and writes nothing yet."""
    implementation: type[WeightVersions] = resolve_name(SYNC_METHODS[method].implementation)
    return implementation.open(Path(job_dir))


def engine_dtype(config: Config) -> str:
    """Return the dtype of the engines, which are on GPUs if this trainer is."""
    import torch

    return dtype_of(config.explorer.rollout_model.dtype, torch.cuda.is_available())


def version_count(config: Config) -> int:
    """Return how many versions of a run stay loadable; in a synchronous run as many as `sync_offset` needs."""
    return SyncSchedule.of(config).versions_kept if config.is_synchronous else DEFAULT_KEEP


def run_versions(config: Config) -> WeightVersions:
    return open_versions(config.synchronizer.sync_method, config.job_dir)
