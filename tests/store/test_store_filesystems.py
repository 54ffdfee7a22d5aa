"""Where a SQLite store may lie: on a local file system only. The table of mounts has its type."""

from pathlib import Path, PurePosixPath
from types import SimpleNamespace

import psutil
import pytest
from hypothesis import given
from hypothesis import strategies as st

from trinity_core.base.errors import TrinityError
from trinity_core.base.files import mount_at, networked
from trinity_core.exchange.store.store import ExperienceStore


@pytest.fixture
def on(monkeypatch, tmp_path):
    """Makes the temporary folder one of this device and type of file system; returns it."""

    def mount(device: str, kind: str) -> Path:
        mounts = [SimpleNamespace(mountpoint=str(tmp_path.resolve()), device=device, fstype=kind)]
        monkeypatch.setattr(psutil, "disk_partitions", lambda all: mounts)
        return tmp_path

    return mount


@pytest.mark.parametrize(
    "device, kind",
    [
        ("host:/export", "nfs"),
        ("[fd00::1]:/export", "nfs4"),
        ("//host/share", "cifs"),
        ("10.0.0.1@tcp:/fs", "lustre"),
        ("10.0.0.1:6789:/", "ceph"),
        ("me@host:/home/me", "fuse.sshfs"),
        ("admin@b3acfc0d-575f-41d3-9c91-0e7ed3dbb3fa.cephfs=/", "ceph"),
        ("ceph-fuse", "fuse.ceph-fuse"),
        ("beegfs_nodev", "beegfs"),
        ("gpfs0", "gpfs"),
        ("default", "wekafs"),
    ],
)
def test_sqlite_on_a_network_file_system_is_refused(on, device, kind):
    folder = on(device, kind)
    with pytest.raises(TrinityError) as error:
        ExperienceStore.open(f"sqlite:///{folder}/buffer/store.db")
    assert not list(folder.iterdir()) and "\n" not in str(error.value)


@pytest.mark.parametrize(
    "device, kind",
    [("/dev/sda1", "ext4"), ("tmpfs", "tmpfs"), ("overlay", "overlay"), ("tank/home", "zfs"), ("/dev/sdb", "fuseblk")],
)
def test_sqlite_on_a_local_file_system_is_used(on, device, kind):
    ExperienceStore.open(f"sqlite:///{on(device, kind)}/buffer/store.db").close()


names = st.sampled_from(["a", "b", "ab"])
folders = st.lists(names, max_size=3).map(lambda parts: PurePosixPath("/", *parts))


@given(st.lists(st.tuples(folders, st.sampled_from(["ext4", "nfs", "cifs"]))), folders)
def test_the_mount_is_that_of_the_nearest_folder_with_one(mounts, path):
    kinds = dict(mounts)
    nearest = next((kinds[folder] for folder in (path, *path.parents) if folder in kinds), None)
    assert mount_at(path, [(str(point), kind) for point, kind in mounts]) == nearest


def test_a_link_to_a_network_file_system_is_followed(on):
    folder = on("host:/export", "nfs4")
    (folder / "here").mkdir()
    link = folder.parent / f"{folder.name}_link"
    link.symlink_to(folder / "here")
    assert networked(link / "run.db") == "nfs4"
