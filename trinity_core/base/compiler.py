"""Checks that torch can compile on the CPU."""

from __future__ import annotations

import os
import shutil

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
