"""Checks that torch and Triton can compile, and cleans up after a killed compiler."""

from __future__ import annotations

import logging
import os
import shutil
import sysconfig
from pathlib import Path

from trinity_core.errors import TrinityError

log = logging.getLogger(__name__)

HEADER_BYTES = 64


def prepare_to_compile(setting: str, otherwise: str) -> None:
    """Check for a C++ compiler as `require_compiler` does, and remove the incomplete libraries of a killed one."""
    require_compiler(setting, otherwise)
    for cache in caches():
        remove_cut_off_libraries(cache)


def caches() -> list[Path]:
    """Return the folders where torch caches compiled code: its own, and those that vLLM uses."""
    from torch._inductor.runtime.cache_dir_utils import cache_dir

    vllm = Path(os.environ.get("VLLM_CACHE_ROOT") or "~/.cache/vllm").expanduser()
    return [Path(cache_dir()), *vllm.glob("torch_compile_cache/**/inductor_cache")]


def require_compiler(setting: str, otherwise: str) -> None:
    """Raise TrinityError if there is no C++ compiler. `setting` is the setting that needs one; `otherwise` the
    alternative."""
    compilers = [os.environ.get("CXX", ""), "g++", "clang++"]
    if not any(name and shutil.which(name) for name in compilers):
        raise TrinityError(
            f"{setting}: on the CPU the model is then compiled, which needs g++ or clang++, and there is none; install "
            f"one, or {otherwise}"
        )


def missing_for_triton() -> str:
    """Return what Triton lacks to build its launcher at the first kernel on a GPU, and the remedy; "" if nothing.

    It takes CC, gcc or clang, and Python.h of this Python (triton/runtime/build.py).
    """
    if not any(name and shutil.which(name) for name in (os.environ.get("CC", ""), "gcc", "clang")):
        return "there is no C compiler: install gcc (Debian's package build-essential)"
    headers = Path(sysconfig.get_paths()["include"])
    if not (headers / "Python.h").is_file():
        return f"there is no {headers / 'Python.h'}: install Python's headers (Debian's package python3-dev)"
    return ""


def remove_cut_off_libraries(cache: Path) -> list[Path]:
    """Remove incomplete libraries that a killed compiler left in torch's cache, and return them.

    torch assumes that an existing file is complete, so each later compilation of the same code would fail with "file
    too short". Files that are still being written stay: the writer of `<key>.main.so` holds the lock
    `locks/<key>.lock`.
    """
    import filelock

    removed = []
    for path in sorted([*cache.glob("*/*.so"), *cache.glob("*/*.o")]):
        lock = filelock.FileLock(cache / "locks" / f"{path.name.partition('.')[0]}.lock", timeout=0)
        if is_whole_library(path):
            continue
        try:
            with lock:
                if not is_whole_library(path):
                    path.unlink(missing_ok=True)
                    removed.append(path)
        except filelock.Timeout:
            continue
    if removed:
        log.warning("%d compiled files in %s were cut off and are compiled again", len(removed), cache)
    return removed


def is_whole_library(path: Path) -> bool:
    """True if an ELF library or object is complete, that is, reaches to the end of its section table. True if it is
    gone.

    In a 64-bit ELF header, byte 40 holds the table's offset, bytes 58 and 60 the size and number of its entries.
    """
    try:
        with path.open("rb") as opened:
            header = opened.read(HEADER_BYTES)
            size = os.fstat(opened.fileno()).st_size
    except FileNotFoundError:
        return True
    if len(header) < HEADER_BYTES or header[:4] != b"\x7fELF":
        return False
    offset, entry, entries = (int.from_bytes(header[a:b], "little") for a, b in ((40, 48), (58, 60), (60, 62)))
    return offset > 0 and size >= offset + entry * entries
