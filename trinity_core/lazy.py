"""`torch`, `aiohttp` and `httpx`, imported at the first use of one of their attributes.

The files of an algorithm's parts are imported wherever a configuration is checked, for the names and the arguments of
the parts; torch takes seconds to import, and only those who compute need it. Likewise each command and process that
scores answers imports operators and environments: the two libraries for HTTP were a fifth of its start. In these files
the three may be used within functions and in annotations, but not while the file itself is imported.
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
        """Stands for a module; every attribute is the module's own at the time it is read."""

        def __getattr__(self, name: str) -> Any:
            if name.startswith("__"):  # asked for by tools that look at every module, such as inspect
                raise AttributeError(name)
            return getattr(importlib.import_module(self.__name__), name)

        def __reduce__(self) -> tuple[Any, ...]:
            """As the module itself: Ray pickles a function of a script or notebook with the modules that it uses."""
            return importlib.import_module, (self.__name__,)

    torch, aiohttp, httpx = (LazyModule(name) for name in ("torch", "aiohttp", "httpx"))
