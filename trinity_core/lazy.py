"""Large libraries: `torch`, `aiohttp` and `httpx`, imported at the first use of an attribute; lean imports.

The files of an algorithm's parts are imported wherever a configuration is checked, for the names and the arguments of
the parts; torch takes seconds to import, and only those who compute need it. Likewise each command and process that
scores answers imports operators and environments: the two libraries for HTTP were a fifth of its start. In these files
the three may be used within functions and in annotations, but not while the file itself is imported.
"""

from __future__ import annotations

import gc
import importlib
import sys
from collections.abc import Iterator
from contextlib import contextmanager
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


HIDDEN = ("scipy.signal", "mlflow")
"""vLLM takes the one for sounds, DeepSpeed the other for its autotuner; both do without what cannot be imported.
They cost an engine and a trainer worker a second or two of a core."""


OWN_ATTENTION = {"attn_implementation": None}
"""An argument with which transformers chooses attention that this machine has for a model, whatever its `config.json`
names, such as `flash_attention_2`, whose package may be missing here."""

COMPILER = ("torch._inductor.lowering",)
"""vLLM imports it to change it, and does without; where nothing is compiled it costs a second of a core."""


@contextmanager
def lean_imports(*more: str) -> Iterator[None]:
    """Import torch, transformers, vLLM or DeepSpeed within this block, and nothing that they do not need.

    `more`: modules to hide besides `HIDDEN`, unless they are imported already.

    Garbage is not collected meanwhile: the imports of an engine make 780,000 objects that stay, and Python would walk
    over all of them again and again (4 of 30 s of a core). `gc.freeze()` after them spares later collections that walk.
    """
    collecting = gc.isenabled()
    gc.disable()
    hidden = [name for name in (*HIDDEN, *more) if name not in sys.modules]
    sys.modules.update(dict.fromkeys(hidden))  # type: ignore[arg-type]
    try:
        lean_transformers()
        yield
    finally:
        for name in hidden:
            del sys.modules[name]
        if collecting:
            gc.enable()


def lean_transformers() -> None:
    """Keep transformers from importing scikit-learn and SciPy.

    It uses the one for assisted generation alone (a ROC curve), the other for the losses of object detection, and
    imports both with the first model. They cost each engine and trainer worker seconds of a core at start
    (`python -X importtime -c "import transformers.modeling_utils"`). It must be called before anything imports the
    models or the generation of transformers.
    """
    import transformers.utils
    import transformers.utils.import_utils

    def absent() -> bool:
        return False

    transformers.utils.is_sklearn_available = absent
    transformers.utils.is_scipy_available = absent
    transformers.utils.import_utils.is_sklearn_available = absent
    transformers.utils.import_utils.is_scipy_available = absent
