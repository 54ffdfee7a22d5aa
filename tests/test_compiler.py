"""What a killed compiler leaves in torch's cache: found by its length, removed unless it is being written."""

from __future__ import annotations

import subprocess
from pathlib import Path

import filelock
import pytest

from trinity_core.compiler import is_whole_library, remove_cut_off_libraries


@pytest.fixture(scope="module")
def library(tmp_path_factory: pytest.TempPathFactory) -> bytes:
    """A real shared library."""
    folder = tmp_path_factory.mktemp("library")
    (folder / "one.cpp").write_text('extern "C" int one() { return 1; }\n')
    subprocess.run(["g++", "-shared", "-fPIC", "-o", "one.so", "one.cpp"], cwd=folder, check=True)
    return (folder / "one.so").read_bytes()


def test_a_library_that_is_cut_off_is_known(library: bytes, tmp_path: Path) -> None:
    path = tmp_path / "one.so"
    path.write_bytes(library)
    assert is_whole_library(path) and is_whole_library(tmp_path / "gone.so")
    for length in (0, 1, 63, 64, len(library) // 2, len(library) - 1):
        path.write_bytes(library[:length])
        assert not is_whole_library(path), length
    path.write_bytes(bytes(len(library)))
    assert not is_whole_library(path), "room was made, and nothing written"


def test_only_what_nobody_writes_is_removed(library: bytes, tmp_path: Path) -> None:
    for name, length in (("whole", len(library)), ("empty", 0), ("half", 99), ("written", 99)):
        path = tmp_path / name[:2] / f"{name}.main.so"
        path.parent.mkdir(exist_ok=True)
        path.write_bytes(library[:length])
    (tmp_path / "locks").mkdir()
    with filelock.FileLock(tmp_path / "locks/written.lock"):
        removed = remove_cut_off_libraries(tmp_path)
    assert {path.name for path in removed} == {"empty.main.so", "half.main.so"}
    assert {path.name for path in tmp_path.glob("*/*.so")} == {"whole.main.so", "written.main.so"}
    assert remove_cut_off_libraries(tmp_path / "no such folder") == []


@pytest.mark.slow
def test_torchs_libraries_are_where_they_are_looked_for(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Compiled for one kernel: without vectors, and without a header that is compiled first."""
    import torch
    import torch._inductor.config

    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", str(tmp_path))
    quick = {"compile_threads": 1, "cpp_cache_precompile_headers": False, "cpp.vec_isa_ok": False}
    with torch._inductor.config.patch(quick):
        assert torch.compile(lambda x: x.sin() + 1)(torch.zeros(64)).tolist() == [1.0] * 64
    libraries = sorted(tmp_path.glob("*/*.main.so"))
    for path in libraries:
        path.unlink()  # this process has loaded it
        path.touch()
    assert libraries and set(remove_cut_off_libraries(tmp_path)) >= set(libraries)
