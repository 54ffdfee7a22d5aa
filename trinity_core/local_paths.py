"""Paths: as a user writes them, where the files of this project lie, and on what kind of file system a path is."""

from __future__ import annotations

import os
from collections.abc import Iterable
from pathlib import Path, PurePath

NETWORKED = {
    "9p", "afs", "beegfs", "ceph", "cifs", "gfs2", "glusterfs", "gpfs", "lustre", "ncpfs", "nfs", "nfs4", "ocfs2",
    "orangefs", "panfs", "prl_fs", "pvfs2", "smb3", "smbfs", "vboxsf", "wekafs",
    "alluxio-fuse", "blobfuse", "blobfuse2", "curlftpfs", "davfs", "gcsfuse", "goofys", "juicefs", "mount-s3",
    "mountpoint-s3", "rclone", "s3fs", "sshfs",
}  # fmt: skip
"""File systems that other machines may write to (FUSE's without the prefix `fuse.`).

SQLite's locks and its shared index hold on a local file system only."""


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
