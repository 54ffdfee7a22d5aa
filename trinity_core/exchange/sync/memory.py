"""The sync method `memory`: versions in a few reused slots of shared memory, so that publishing costs one copy.

Allocating a page of shared memory costs three times as much as copying into it (`benchmarks/weight_sync.py`), so slots
and their mappings are reused. A slot is written only while no record names it *and* no process has it mapped: readers
hold a shared `flock` on the slot, the writer an exclusive one. A mapping keeps its open file, and with it the lock,
until its last tensor is freed or the process ends, so a killed reader leaves nothing to clean up. A killed writer
leaves a slot that no record names. A killed run leaves a folder whose publisher lock is free; the next publisher
removes it.

`filelock` cannot replace these locks: it has no shared `flock` that a mapping can carry, and it would create the lock
file in folders that the clean-up must only inspect.
"""

from __future__ import annotations

import errno
import fcntl
import hashlib
import logging
import mmap
import os
import shutil
import stat
import tempfile
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import IO, Any, Self
from uuid import uuid4

from trinity_core.base.errors import TrinityError
from trinity_core.base.files import clear_errors, when_room
from trinity_core.base.waits import poll
from trinity_core.exchange.pinned import pin, unpin
from trinity_core.exchange.sync.tensorfile import Layout, TensorDigest, fill, read_layout
from trinity_core.exchange.sync.versions import Payload, VersionRecord, WeightVersions

SHARED_MEMORY = Path("/dev/shm")  # noqa: S108 - a private sub-folder is made and its owner checked
PREFIX = "trinity-"
LOCK = "publisher.lock"
LOCK_SECONDS = 5.0
"""How long a publisher waits while another run removes a killed run's files from the same folder."""
log = logging.getLogger(__name__)


def memory_root(job_dir: Path, shared_memory: Path = SHARED_MEMORY) -> Path:
    """Return the run's folder in shared memory, or in the temporary directory if there is no shared memory."""
    name = f"{PREFIX}{hashlib.sha256(str(Path(job_dir).resolve()).encode()).hexdigest()[:16]}"
    if shared_memory.is_dir() and os.access(shared_memory, os.W_OK):
        return shared_memory / name
    log.warning("there is no writable %s: weights go through %s", shared_memory, tempfile.gettempdir())
    return Path(tempfile.gettempdir()) / name


def sweep(root: Path) -> None:
    """Remove the folders next to `root` that this user's killed runs left, that is, those whose publisher lock is
    free."""
    for folder in root.parent.glob(f"{PREFIX}*"):
        with suppress(OSError):  # it has no lock yet, or has been removed
            if folder != root and not folder.is_symlink() and folder.stat().st_uid == os.getuid():
                _remove_abandoned(folder)


def _remove_abandoned(folder: Path) -> None:
    """Remove `folder` while holding its lock. The lock file goes last, so that the next sweep can finish an interrupted
    removal."""
    lock = _hold(folder, "r+b")
    if lock is None:
        return
    with lock:
        shutil.rmtree(_spill_of(folder), ignore_errors=True)
        gone = folder.rename(
            folder.with_name(f"{PREFIX}{uuid4().hex}")
        )  # frees the name at once for the run's next attempt
        for path in gone.iterdir():
            if path.name != LOCK:
                path.unlink()
        shutil.rmtree(gone)
    log.info("removed %s, left by a killed run", folder)


def _hold(folder: Path, mode: str) -> IO[bytes] | None:
    """Take and return the folder's publisher lock; None if another process holds it or has replaced the folder."""
    lock: IO[bytes] = (folder / LOCK).open(mode)
    if _locked(lock, fcntl.LOCK_EX) and os.path.samestat(os.fstat(lock.fileno()), (folder / LOCK).stat()):
        return lock
    lock.close()
    return None


def _spill_of(root: Path) -> Path:
    return Path(tempfile.gettempdir()) / f"{root.name}-spill"


def _private(folder: Path) -> Path:
    with clear_errors("making", folder), suppress(FileExistsError):
        folder.mkdir(mode=0o700, parents=True)
    if not _is_own(folder):
        raise TrinityError(f"{folder} does not belong to you; weights are not put there. Remove it, or move the run")
    return folder


def _is_own(folder: Path) -> bool:
    """False for a link or another user's folder, whose owner could read what is put there.

    Raises FileNotFoundError if another run's sweep has just removed it.
    """
    status = folder.lstat()
    return stat.S_ISDIR(status.st_mode) and status.st_uid == os.getuid()


def _locked(file: IO[bytes], kind: int) -> bool:
    try:
        fcntl.flock(file, kind | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    return True


@dataclass
class _Slot:
    """The writer's side of a slot: its open file and writable mapping, kept so that the pages stay allocated."""

    path: Path
    file: IO[bytes]
    map: mmap.mmap | None = None
    pinned: int = 0
    """Its address if CUDA has pinned it."""

    def sized(self, size: int) -> mmap.mmap:
        """Return the mapping, resized to `size` allocated bytes: a sparse file would raise SIGBUS when memory runs
        out."""
        if self.map is None or len(self.map) != size:
            self.unmap()
            os.ftruncate(self.file.fileno(), size)
            os.posix_fallocate(self.file.fileno(), 0, size)
            self.map = mmap.mmap(self.file.fileno(), size)
            self.pinned = pin(self.map)
        return self.map

    def unmap(self) -> None:
        if self.pinned:
            unpin(self.pinned)
        self.map, self.pinned = None, 0


class MemoryVersions(WeightVersions):
    """Versions in slots of shared memory. Slots that do not fit there go to `spill`.

    Records are in `root`. So are the slots, unless `shared` names another folder for them.
    """

    def __init__(self, root: Path, spill: Path | None = None, shared: Path | None = None) -> None:
        super().__init__(root)
        self._shared = shared or root
        self._spill = spill or _spill_of(self._shared)
        self._slots: dict[Path, _Slot] = {}
        self._owner: IO[bytes] | None = None

    @classmethod
    def open(cls, job_dir: Path) -> Self:
        return cls(memory_root(job_dir))

    def publish(self, *args: Any, **kwargs: Any) -> VersionRecord:
        record = super().publish(*args, **kwargs)
        self._trim()
        return record

    def _write(self, version: int, payload: Payload) -> tuple[str, dict[str, TensorDigest]]:
        self._take_publisher_lock()
        if self.root == self._shared:
            _private(self.root)
        else:  # the run's folder, which on a network file system may have another owner
            self.root.mkdir(parents=True, exist_ok=True)
        slot = self._free_slot(payload.layout.size)
        try:
            written = fill(slot.sized(payload.layout.size), payload.layout, payload.tensors, self.digest_dtype)
        finally:
            fcntl.flock(slot.file, fcntl.LOCK_UN)
        return str(slot.path), written

    def versions(self) -> list[int]:
        return sorted(int(path.stem.removeprefix("version_")) for path in self.root.glob("version_*.json"))

    def remove(self) -> None:
        """Remove every version and the folder; readers keep what they have mapped."""
        for slot in self._slots.values():
            slot.unmap()
        self._slots.clear()
        self._owner = None
        for folder in {self.root, self._shared, self._spill}:
            shutil.rmtree(folder, ignore_errors=True)

    def _record_path(self, version: int) -> Path:
        return self.root / f"version_{version}.json"

    def _forget(self, version: int) -> None:
        self._record_path(version).unlink(missing_ok=True)

    def _map(self, record: VersionRecord, record_path: Path) -> tuple[mmap.mmap, Layout]:
        with Path(record.file).open("rb") as file:
            # Lock first, then read the record: if it still names this slot, nobody can write to the slot any more.
            if not _locked(file, fcntl.LOCK_SH) or VersionRecord.read(record_path) != record:
                raise FileNotFoundError(record.file)
            buffer = mmap.mmap(file.fileno(), record.size, access=mmap.ACCESS_COPY)
        return buffer, read_layout(buffer)

    def _take_publisher_lock(self) -> None:
        if self._owner is not None:
            return
        sweep(self._shared)
        for _ in poll(LOCK_SECONDS, 0.02):
            with suppress(FileNotFoundError):  # another run's sweep has just removed the folder
                self._owner = _hold(_private(self._shared), "wb")
            if self._owner is not None:
                return
        raise TrinityError(f"another process publishes weights to {self._shared}; is this run already in progress?")

    def _named_slots(self) -> set[Path]:
        records = (VersionRecord.read(self._record_path(version)) for version in self.versions())
        return {Path(record.file) for record in records if record is not None}

    def _slot_paths(self) -> list[Path]:
        paths: list[Path] = []
        for folder in (self._shared, self._spill):
            with suppress(FileNotFoundError):
                paths += folder.glob("slot_*.safetensors") if _is_own(folder) else ()
        return sorted(paths)

    def _slot(self, path: Path) -> _Slot:
        if path not in self._slots:
            self._slots[path] = _Slot(path, path.open("r+b" if path.exists() else "w+b", buffering=0))
        return self._slots[path]

    def _free_slot(self, size: int) -> _Slot:
        """Return a slot of `size` bytes that no record names and no reader has mapped, locked for writing."""
        in_use = self._named_slots()
        for path in self._slot_paths():
            if path not in in_use and _locked(self._slot(path).file, fcntl.LOCK_EX):
                try:
                    self._slot(path).sized(size)
                    return self._slot(path)
                except OSError as error:
                    if error.errno != errno.ENOSPC:
                        raise
                    self._drop(path)
        return self._new_slot(size)

    def _new_slot(self, size: int) -> _Slot:
        for folder in (self._shared, self._spill):
            slot = self._slot(_private(folder) / f"slot_{uuid4().hex[:8]}.safetensors")
            fcntl.flock(slot.file, fcntl.LOCK_EX)
            try:
                with clear_errors("reserving memory for weights in", folder):
                    reserve = partial(slot.sized, size)
                    when_room(reserve, folder) if folder == self._spill else reserve()
                return slot
            except TrinityError:
                self._drop(slot.path)
                if folder == self._spill:
                    raise
                log.warning("%s has no room for %d bytes of weights: they go through %s", folder, size, self._spill)
        raise AssertionError("unreachable: the last folder returns or raises")

    def _drop(self, path: Path) -> None:
        if slot := self._slots.pop(path, None):
            slot.unmap()
        path.unlink(missing_ok=True)

    def _trim(self) -> None:
        """Delete free slots but one; a slow reader of old versions made them necessary for a while."""
        in_use, free = self._named_slots(), []
        for path in self._slot_paths():
            if path not in in_use and _locked(self._slot(path).file, fcntl.LOCK_EX):
                fcntl.flock(self._slot(path).file, fcntl.LOCK_UN)
                free.append(path)
        for path in free[1:]:
            self._drop(path)
