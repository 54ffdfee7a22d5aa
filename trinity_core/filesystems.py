"""On what kind of file system a path lies: SQLite's locks and its shared index hold on a local one only."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path, PurePath

import psutil

NETWORKED = {
    "9p", "afs", "beegfs", "ceph", "cifs", "gfs2", "glusterfs", "gpfs", "lustre", "ncpfs", "nfs", "nfs4", "ocfs2",
    "orangefs", "panfs", "prl_fs", "pvfs2", "smb3", "smbfs", "vboxsf", "wekafs",
    "alluxio-fuse", "blobfuse", "blobfuse2", "curlftpfs", "davfs", "gcsfuse", "goofys", "juicefs", "mount-s3",
    "mountpoint-s3", "rclone", "s3fs", "sshfs",
}  # fmt: skip
"""Types of file systems that other machines may write to; those of FUSE without their prefix `fuse.`."""


def networked(path: Path) -> str:
    """The type of the network file system that `path` lies on, or will lie on; empty if its file system is local."""
    mounts = ((each.mountpoint, each.fstype) for each in psutil.disk_partitions(all=True))
    kind = type_at(path.absolute().resolve(), mounts)
    return kind if kind.removeprefix("fuse.") in NETWORKED else ""


def type_at(path: PurePath, mounts: Iterable[tuple[str, str]]) -> str:
    """The type of the file system at an absolute path without links, given (mount point, type) in order of mounting."""
    holding = [(len(PurePath(point).parts), kind) for point, kind in mounts if path.is_relative_to(point)]
    deepest = max((depth for depth, _ in holding), default=0)
    return next((kind for depth, kind in reversed(holding) if depth == deepest), "")
