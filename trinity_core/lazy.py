"""`torch`, `aiohttp` and `httpx`, imported when one of their attributes is first used.

Every check of a configuration imports the files of the algorithms' parts for their names and arguments; torch takes
seconds to import, and only computation needs it. Likewise each command and scoring process imports operators and
environments, where the two HTTP libraries were a fifth of the start time. Files that import from here may use the three
modules in functions and annotations, but not at import time.
"""

from __future__ import annotations

import importlib
from types import ModuleType
from typing import TYPE_CHECKING, Any

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
