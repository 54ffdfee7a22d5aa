"""Checks that torch and Triton can compile."""

from __future__ import annotations

import os
import shutil
import sysconfig
from pathlib import Path

from trinity_core.base.errors import TrinityError


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
