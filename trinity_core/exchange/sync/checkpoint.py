"""The sync method `checkpoint`: versions in the checkpoint folders, for runs and nodes that share a disk.

Version n is `global_step_n/actor/weights.safetensors`. The folder may also hold the full checkpoint of that step. If
not, it is removed once the version is no longer among the newest.
"""

from __future__ import annotations

import errno
import mmap
import os
from pathlib import Path

from trinity_core.base.files import (
    CHANGING_FOLDERS,
    clear_errors,
    private_folder,
    remove_tree,
    sync_file,
    temporary_sibling,
    when_room,
)
from trinity_core.base.layout import MANIFEST, JobLayout
from trinity_core.exchange.sync.tensorfile import Layout, TensorDigest, read_layout, write
from trinity_core.exchange.sync.versions import Payload, VersionRecord, WeightVersions

WEIGHTS, RECORD = "weights.safetensors", "weights.json"


class CheckpointVersions(WeightVersions):
    durable = True

    @classmethod
    def open(cls, job_dir: Path) -> CheckpointVersions:
        return cls(job_dir)

    def _write(self, version: int, payload: Payload) -> tuple[str, dict[str, TensorDigest]]:
        folder = self._record_path(version).parent
        with clear_errors("publishing weights to", folder):
            private_folder(folder)
            temporary = temporary_sibling(folder / WEIGHTS)
            try:
                with temporary.open("wb", buffering=0) as file:
                    reserve(file.fileno(), payload.layout.size, temporary)
                    written = write(file.fileno(), payload.layout, payload.tensors, self.digest_dtype)
                    os.fsync(file.fileno())
                self._record_path(version).unlink(missing_ok=True)
                temporary.replace(folder / WEIGHTS)
            finally:
                temporary.unlink(missing_ok=True)
            sync_file(folder)
        return WEIGHTS, written

    def versions(self) -> list[int]:
        return [step for step in JobLayout(self.root).steps() if self.has(step)]

    def remove(self) -> None:
        """Keep all versions: other runs or nodes may still need the weights on disk."""

    def _record_path(self, version: int) -> Path:
        return JobLayout(self.root).actor(version) / RECORD

    def _forget(self, version: int) -> None:
        record = self._record_path(version)
        folder = JobLayout(self.root).step(version)
        with CHANGING_FOLDERS:
            record.unlink(missing_ok=True)
            (record.parent / WEIGHTS).unlink(missing_ok=True)
            if not (folder / MANIFEST).exists():
                remove_tree(folder)

    def _map(self, record: VersionRecord, record_path: Path) -> tuple[mmap.mmap, Layout]:
        with (record_path.parent / record.file).open("rb") as file:
            if VersionRecord.read(record_path) != record:
                raise FileNotFoundError(record.file)
            buffer = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_COPY)
        return buffer, read_layout(buffer)


def reserve(file: int, size: int, path: Path) -> None:
    """Allocate `size` bytes in advance: the tensors can be iterated only once, so a full disk must show up earlier."""
    try:
        when_room(lambda: os.posix_fallocate(file, 0, size), path)
    except OSError as error:
        if error.errno not in (errno.EOPNOTSUPP, errno.EINVAL):  # not supported by the file system
            raise
