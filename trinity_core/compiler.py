"""Checks before a compilation that torch can compile on the CPU, and recovers from a killed compiler."""

from __future__ import annotations

import logging
import os
import shutil
from pathlib import Path

from trinity_core.errors import TrinityError

log = logging.getLogger(__name__)

HEADER_BYTES = 64
"""Size of the header of a 64-bit ELF file."""


def prepare_to_compile(setting: str, otherwise: str) -> None:
    """Raise `TrinityError` without a C++ compiler (`setting` needs one); else remove what a killed one has left."""
    require_compiler(setting, otherwise)
    for cache in caches():
        remove_cut_off_libraries(cache)


def caches() -> list[Path]:
    """The folders where torch keeps compiled code: its own, and those that vLLM gives it."""
    from torch._inductor.runtime.cache_dir_utils import cache_dir

    vllm = Path(os.environ.get("VLLM_CACHE_ROOT") or "~/.cache/vllm").expanduser()
    return [Path(cache_dir()), *vllm.glob("torch_compile_cache/**/inductor_cache")]


def require_compiler(setting: str, otherwise: str) -> None:
    """Raise `TrinityError` without a C++ compiler. `setting` is the setting that needs one."""
    compilers = [os.environ.get("CXX", ""), "g++", "clang++"]
    if not any(name and shutil.which(name) for name in compilers):
        raise TrinityError(
            f"{setting}: on the CPU the model is then compiled, which needs g++ or clang++, and there is none; install "
            f"one, or {otherwise}"
        )


def remove_cut_off_libraries(cache: Path) -> list[Path]:
    """Remove what a compiler that was killed has left in torch's cache of compiled code; what was removed.

    torch takes a file that is there for whole, so each later compilation of the same code would end in "file too
    short". A file that is being written stays: who writes `<key>.main.so` holds the lock `locks/<key>.lock`.
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
    """Whether an ELF library or object has all its bytes: it ends with the table of its sections. True if it is gone.

    By the ELF specification the 64-bit header has the table's offset at byte 40, the size and the number of its
    entries at bytes 58 and 60.
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
