"""What a killed compiler leaves in torch's cache: found by its length, removed unless it is being written."""

from __future__ import annotations

import os
import subprocess
import sys
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


SCRIPT = """
import os, sys
from pathlib import Path
import torch, torch._inductor.compile_fx
from trinity_core.compiler import prepare_to_compile

def compiles(prepared=False):
    # As in a process of its own; its error goes to stderr.
    if not (child := os.fork()):
        try:
            if prepared:
                prepare_to_compile("the test", "leave it out")
            assert torch.compile(lambda x: x.sin() + 1)(torch.zeros(64)).tolist() == [1.0] * 64
        except Exception as error:
            print(error, file=sys.stderr, flush=True)
            os._exit(1)
        os._exit(0)
    return os.waitpid(child, 0)[1] == 0

assert compiles()
libraries = [*Path(sys.argv[1]).glob("*/*.main.so")]
for path in libraries:
    path.write_bytes(b"")
assert libraries and not compiles()
assert compiles(prepared=True)
"""


@pytest.mark.slow
def test_torch_compiles_again_what_was_cut_off(tmp_path: Path) -> None:
    """The files and locks are where torch has them: without the removal its next process ends in "file too short"."""
    small = {"COMPILE_THREADS": "1", "CPP_CACHE_PRECOMPILE_HEADERS": "0", "VEC_ISA_OK": "0"}  # for one kernel
    own = {"CACHE_DIR": str(tmp_path), **small}
    environment = os.environ | {f"TORCHINDUCTOR_{name}": value for name, value in own.items()}
    command = [sys.executable, "-c", SCRIPT, str(tmp_path)]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0 and "file too short" in done.stderr, done.stderr
