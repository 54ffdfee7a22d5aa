"""Paths as users write them, and atomic file writes: a reader, even after a power cut, sees a whole file or none."""

from __future__ import annotations

import errno
import hashlib
import json
import logging
import os
import shutil
import stat
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import fields
from pathlib import Path, PurePath
from typing import Any, TypeVar
from uuid import uuid4

from trinity_core.base.errors import DataError, TrinityError
from trinity_core.base.waits import retry

log = logging.getLogger(__name__)

TEMPORARY = ".tmp-"
"""Marks names of unfinished files, `.<name>.tmp-<unique>`. Readers ignore them."""

ROOM_SECONDS, ROOM_PAUSE = 1200.0, 1.0
"""Time to wait for a person to free space on a full disk, and between two attempts to write. Other processes wait
longer for the one that writes (`max_read_timeout`)."""
FULL = ("No space left", "disk is full", "file write failed", "unexpected pos")
"""Messages of libraries that meet a full disk: safetensors, SQLite, torch (the last two)."""

CHANGING_FOLDERS = threading.Lock()
"""Held by a thread that renames or removes a `global_step_N`: checkpoint saving, in another thread, takes over folders
to which versions are published."""

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


@contextmanager
def clear_errors(doing: str, path: Path, instead: str = ANOTHER_ROOT) -> Iterator[None]:
    """Turn OS errors (disk full, permission, quota) into a `TrinityError` that says what to do.

    `instead` is the alternative to making the place usable.
    """
    try:
        yield
    except OSError as error:
        reason = _REASONS.get(error.errno or 0)
        if reason is None:
            raise
        raise TrinityError(f"{doing} {path} failed: {reason.format(instead=instead)}", key=str(path)) from error
    except RuntimeError as error:  # torch reports a failed write as "... file write failed" or "... Enforce fail ..."
        if "write failed" not in str(error) and "unexpected pos" not in str(error):
            raise
        raise TrinityError(f"{doing} {path} failed: is the disk full? ({error})", key=str(path)) from error


def when_room(write: Callable[[], T], target: Path | str) -> T:
    """Call `write` until its disk has room, for at most `ROOM_SECONDS`, and return its result.

    `write` must be repeatable; `target` names what it writes to in log messages. A `write` that has itself waited for
    room in vain is not repeated.
    """
    began = time.monotonic()

    def may_pass(error: Exception) -> bool:
        return is_full(error) and time.monotonic() - began <= ROOM_SECONDS

    return retry(write, may_pass, ROOM_SECONDS, ROOM_PAUSE, notice=f"there is no space left for {target}: free some")


def is_full(error: BaseException | None) -> bool:
    """True if an error or its cause says that a disk or quota is full."""
    if error is None:
        return False
    code = error.errno if isinstance(error, OSError) else None
    return code in (errno.ENOSPC, errno.EDQUOT) or any(sign in str(error) for sign in FULL) or is_full(error.__cause__)


def cache_folder() -> Path:
    """The cache shared by this user's runs: `trinity-flows` in $XDG_CACHE_HOME or ~/.cache."""
    return Path(os.environ.get("XDG_CACHE_HOME") or expanded("~/.cache")) / "trinity-flows"


def private_folder(path: Path) -> Path:
    """Create a folder, and those above it that do not exist, without access for other accounts; return it.

    Existing folders keep their modes: their owner has decided who may read what is in them. In one that is shared with
    a group (setgid), the group keeps the access that the folder and the umask give it.
    """
    if not path.is_dir():
        if path != path.parent:
            private_folder(path.parent)
        path.mkdir(mode=0o700 | _of_group(path.parent), exist_ok=True)
    return path


def private_file(path: Path) -> None:
    """Create an empty file without access for other accounts, except a group as in `private_folder`, if there is
    none."""
    with suppress(FileExistsError):
        os.close(os.open(path, os.O_CREAT | os.O_EXCL, 0o600 | _of_group(path.parent) & 0o060))


def _of_group(folder: Path) -> int:
    mode = folder.stat().st_mode
    return mode & stat.S_IRWXG if mode & stat.S_ISGID else 0


def temporary_sibling(path: Path) -> Path:
    """Return a unique name next to `path` for an unfinished file."""
    return path.with_name(f".{path.name}{TEMPORARY}{uuid4().hex[:12]}")


def sync_file(path: Path) -> None:
    """Flush a file, or a folder's directory entries, to the disk."""
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
    """Replace the content of `path` in one step. `durable` flushes first, so that a power cut leaves old or new
    content.

    `mode` gives the permissions, subject to the umask. Waits for room on a full disk.
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
    write_atomically(path, json.dumps(value, indent=1).encode() + b"\n", durable, mode)


def read_json(path: Path) -> dict[str, Any]:
    """Read the JSON object in a file; empty if the file is missing or, with a warning, damaged."""
    try:
        content = json.loads(path.read_bytes())
    except FileNotFoundError:
        return {}
    except ValueError:
        content = None
    if isinstance(content, dict):
        return content
    log.warning("%s is damaged and is treated as missing; remove it", path)
    return {}


def from_record(cls: type[T], values: Mapping[str, Any], source: Path | str) -> T:
    """Create the dataclass `cls` from values read from `source`, a file or another place that users know.

    Raises DataError for an unknown field, which a newer release wrote.
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
    """Delete a folder by renaming it first, so that no reader sees half of it. Missing files are ignored."""

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
    """Delete unfinished files called `name` in `folder`, and return them.

    Only for the sole writer of those files: another writer's unfinished work looks the same.
    """
    gone = list(folder.glob(f".{name}{TEMPORARY}*")) if folder.is_dir() else []
    for path in gone:
        if path.is_dir() and not path.is_symlink():
            shutil.rmtree(path)
        else:
            path.unlink(missing_ok=True)
    return gone


def expanded(path: str | Path) -> Path:
    """Expand `~`. `~name` of an unknown user stays as it is: a folder of that name."""
    return Path(os.path.expanduser(path))  # noqa: PTH111 - Path.expanduser raises for an unknown user


def project_files() -> Path:
    """The folder with `configs/`, `docs/` and `prefect.yaml`: the repository root, or its copy in a wheel."""
    top = Path(__file__).parents[2]
    packaged = top / "flows" / "project"
    return packaged if packaged.exists() else top


NETWORKED = frozenset({"beegfs", "ceph", "fuse.ceph-fuse", "gpfs", "wekafs"})
"""Types of network file systems whose devices are names of their own, such as `gpfs0` or `user@fsid.cephfs=/`."""


def networked(path: Path) -> str:
    """Return the type of the network file system that holds `path`, which need not exist; "" for a local one.

    SQLite's locks and its shared index need a local file system. The device of a network file system is `host:path` or
    `//host/share`, except for those in `NETWORKED`.
    """
    import psutil

    mounts = ((disk.mountpoint, disk) for disk in psutil.disk_partitions(all=True))
    disk = mount_at(path.absolute().resolve(), mounts)
    if disk is None or not (":" in disk.device or disk.device.startswith("//") or disk.fstype in NETWORKED):
        return ""
    return disk.fstype


def mount_at(path: PurePath, mounts: Iterable[tuple[str, T]]) -> T | None:
    """Return the mount that holds an absolute path without links, given (mount point, mount) in order of mounting."""
    holding = [(len(PurePath(point).parts), mount) for point, mount in mounts if path.is_relative_to(point)]
    deepest = max((depth for depth, _ in holding), default=0)
    return next((mount for depth, mount in reversed(holding) if depth == deepest), None)
