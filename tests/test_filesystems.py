"""The type of file system that a path lies on, from the table of mounts."""

from pathlib import PurePosixPath

from hypothesis import given
from hypothesis import strategies as st

from trinity_core.files import networked, type_at

names = st.sampled_from(["a", "b", "ab"])
folders = st.lists(names, max_size=3).map(lambda parts: PurePosixPath("/", *parts))


@given(st.lists(st.tuples(folders, st.sampled_from(["ext4", "nfs", "cifs"]))), folders)
def test_the_type_is_that_of_the_nearest_folder_with_a_mount(mounts, path):
    kinds = dict(mounts)
    nearest = next((kinds[folder] for folder in (path, *path.parents) if folder in kinds), "")
    assert type_at(path, [(str(point), kind) for point, kind in mounts]) == nearest


def test_the_mounts_of_this_machine_are_read(tmp_path):
    assert networked(tmp_path / "run.db") == "", "the tests' own folder is local"
