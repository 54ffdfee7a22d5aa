"""Paths as users write them, and files that a reader, or the next start after a power cut, sees whole or not at all."""

from __future__ import annotations

import errno
import hashlib
import json
import logging
import os
import shutil
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import fields
from pathlib import Path, PurePath
from typing import Any, TypeVar
from uuid import uuid4

from trinity_core.errors import DataError, TrinityError
from trinity_core.waits import retry

log = logging.getLogger(__name__)

TEMPORARY = ".tmp-"
"""Mark in the name of everything half written, `.<name>.tmp-<unique>`; nothing that is read ever has it."""

ROOM_SECONDS, ROOM_PAUSE = 1200.0, 1.0
"""Time for a person to free space on a full disk, which is less than others wait for the process that writes
(`max_read_timeout`); and between two attempts to write."""
FULL = ("No space left", "disk is full", "file write failed", "unexpected pos")
"""Parts of the messages of libraries that found a disk full: safetensors, SQLite, and the last two torch."""

CHANGING_FOLDERS = threading.Lock()
"""Held by a thread that renames or removes a `global_step_N`: versions are published to folders that checkpoints, which
another thread names, take over."""

T = TypeVar("T")

_REASONS = {
    errno.ENOSPC: "there is no space left; free some or {instead}",
    errno.EDQUOT: "the disk quota is used up; free some or {instead}",
    errno.EFBIG: "the file would be larger than the limit of the process or file system (see `ulimit -f`)",
    errno.EACCES: "permission is denied; make the folder writable or {instead}",
    errno.EPERM: "the operation is not permitted; make the folder writable or {instead}",
    errno.EROFS: "the file system is read-only; {instead}",
    errno.EEXIST: "a file is in the way of a folder; move it or {instead}",
    errno.ENOTDIR: "a file is in the way of a folder; move it or {instead}",
}
ANOTHER_ROOT = "choose another checkpoint_root_dir"
"""What a user can do where a run's folder cannot be made usable."""
NETWORKED = {
    "9p", "afs", "beegfs", "ceph", "cifs", "gfs2", "glusterfs", "gpfs", "lustre", "ncpfs", "nfs", "nfs4", "ocfs2",
    "orangefs", "panfs", "prl_fs", "pvfs2", "smb3", "smbfs", "vboxsf", "wekafs",
    "alluxio-fuse", "blobfuse", "blobfuse2", "curlftpfs", "davfs", "gcsfuse", "goofys", "juicefs", "mount-s3",
    "mountpoint-s3", "rclone", "s3fs", "sshfs",
}  # fmt: skip
"""File systems that other machines may write to (FUSE's without the prefix `fuse.`).

SQLite's locks and its shared index hold on a local file system only."""


@contextmanager
def clear_errors(doing: str, path: Path, instead: str = ANOTHER_ROOT) -> Iterator[None]:
    """Turn the system's refusals (disk full, permission, quota) into a `TrinityError` that says what to do.

    `instead` is what the user can do if the place cannot be made usable.
    """
    try:
        yield
    except OSError as error:
        reason = _REASONS.get(error.errno or 0)
        if reason is None:
            raise
        raise TrinityError(f"{doing} {path} failed: {reason.format(instead=instead)}") from error
    except RuntimeError as error:  # torch reports a failed write as "... file write failed" or "... Enforce fail ..."
        if "write failed" not in str(error) and "unexpected pos" not in str(error):
            raise
        raise TrinityError(f"{doing} {path} failed while writing: is the disk full? ({error})") from error


def when_room(write: Callable[[], T], target: Path | str) -> T:
    """What `write` returns, called again as long as the disk that it writes to is full, at most `ROOM_SECONDS`.

    `write` must be repeatable; `target` is what it writes to, for people. A `write` that has itself waited for room in
    vain is not called again.
    """
    began = time.monotonic()

    def may_pass(error: Exception) -> bool:
        return is_full(error) and time.monotonic() - began <= ROOM_SECONDS

    return retry(write, may_pass, ROOM_SECONDS, ROOM_PAUSE, notice=f"there is no room to write {target}: free some")


def is_full(error: BaseException | None) -> bool:
    """True if an error, or the one that it comes from, says that a disk or quota is full."""
    if error is None:
        return False
    code = error.errno if isinstance(error, OSError) else None
    return code in (errno.ENOSPC, errno.EDQUOT) or any(sign in str(error) for sign in FULL) or is_full(error.__cause__)


def cache_folder() -> Path:
    """What later runs of this user may use again: `trinity-flows` below $XDG_CACHE_HOME or ~/.cache."""
    return Path(os.environ.get("XDG_CACHE_HOME") or expanded("~/.cache")) / "trinity-flows"


def temporary_sibling(path: Path) -> Path:
    """A new name next to `path` that marks what is half written."""
    return path.with_name(f".{path.name}{TEMPORARY}{uuid4().hex[:12]}")


def sync_file(path: Path) -> None:
    """Flush a file, or a folder's list of names, to the disk."""
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


def file_digest(path: Path) -> str:
    """SHA-256 of a file's content, in hexadecimal."""
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def write_atomically(path: Path, data: bytes, durable: bool = True, mode: int = 0o666) -> None:
    """Replace `path` by `data` in one step; `durable` flushes it first, so that a power cut leaves old or new.

    `mode` says who may read and write it, as far as the process's umask lets them. Waits for room on a full disk.
    """
    when_room(lambda: _write_whole(path, data, durable, mode), path)


def _write_whole(path: Path, data: bytes, durable: bool, mode: int) -> None:
    temporary = temporary_sibling(path)
    with clear_errors("writing", path):
        try:
            with open(temporary, "wb", opener=lambda name, flags: os.open(name, flags, mode)) as file:
                file.write(data)
                if durable:
                    file.flush()
                    os.fsync(file.fileno())
            temporary.replace(path)
        finally:
            temporary.unlink(missing_ok=True)
        if durable:
            sync_file(path.parent)


def write_json(path: Path, value: Any, durable: bool = True, mode: int = 0o666) -> None:
    """`write_atomically` for JSON."""
    write_atomically(path, json.dumps(value, indent=1).encode() + b"\n", durable, mode)


def read_json(path: Path) -> dict[str, Any] | None:
    """The JSON object in a file; None if the file is missing or, with a warning, damaged."""
    try:
        content = json.loads(path.read_bytes())
    except FileNotFoundError:
        return None
    except ValueError:
        content = None
    if isinstance(content, dict):
        return content
    log.warning("%s is damaged and is taken as missing; remove it", path)
    return None


def from_record(cls: type[T], values: Mapping[str, Any], source: Path | str) -> T:
    """The dataclass `cls` of the values that `source` holds, a file or another place that people know.

    Raises DataError if it has no field for one of them: a newer release wrote that.
    """
    try:
        return cls(**values)
    except TypeError:
        unknown = values.keys() - {field.name for field in fields(cls)}  # type: ignore[arg-type]
        if not unknown:
            raise
        raise DataError(
            f"{source} was written by a newer release (unknown: {', '.join(sorted(unknown))}): continue with that one",
            key=str(source),
        ) from None


def remove_tree(path: Path) -> None:
    """Delete a folder so that no reader sees half of it: it first takes a temporary name. Missing is fine, and so is
    what another process deletes within it meanwhile."""

    def ignore_missing(_function: Any, _path: str, error: Any) -> None:
        if not isinstance(error[1], FileNotFoundError):
            raise error[1]

    temporary = temporary_sibling(path)
    with clear_errors("removing", path):
        try:
            path.rename(temporary)
        except FileNotFoundError:
            return
        shutil.rmtree(temporary, onerror=ignore_missing)


def remove_leftovers(folder: Path, name: str = "*") -> list[Path]:
    """Delete what a killed writer of files called `name` left half written in `folder`; return what went.

    Only for the one writer of those files: another's unfinished work looks the same.
    """
    gone = list(folder.glob(f".{name}{TEMPORARY}*")) if folder.is_dir() else []
    for path in gone:
        if path.is_dir() and not path.is_symlink():
            shutil.rmtree(path)
        else:
            path.unlink(missing_ok=True)
    return gone


def expanded(path: str | Path) -> Path:
    """The path with `~` as the user's home. `~name` of an unknown user stays as it is: a folder of that name."""
    return Path(os.path.expanduser(path))  # noqa: PTH111 - Path.expanduser raises for an unknown user


def project_files() -> Path:
    """The folder that holds `configs/`, `docs/` and `prefect.yaml`: a clone's top, or their place in a wheel."""
    top = Path(__file__).parent.parent
    packaged = top / "flows" / "project"
    return packaged if packaged.exists() else top


def networked(path: Path) -> str:
    """The type of the network file system that `path` lies on, or will lie on; empty if its file system is local."""
    import psutil

    mounts = ((disk.mountpoint, disk.fstype) for disk in psutil.disk_partitions(all=True))
    kind = type_at(path.absolute().resolve(), mounts)
    return kind if kind.removeprefix("fuse.") in NETWORKED else ""


def type_at(path: PurePath, mounts: Iterable[tuple[str, str]]) -> str:
    """The type of the file system at an absolute path without links, given (mount point, type) in order of mounting."""
    holding = [(len(PurePath(point).parts), kind) for point, kind in mounts if path.is_relative_to(point)]
    deepest = max((depth for depth, _ in holding), default=0)
    return next((kind for depth, kind in reversed(holding) if depth == deepest), "")
