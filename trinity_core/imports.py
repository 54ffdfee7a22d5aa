"""What our libraries need not import, look for or find at a start: optional parts, garbage, attention."""

from __future__ import annotations

import gc
import sys
from collections.abc import Iterator
from contextlib import contextmanager

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
