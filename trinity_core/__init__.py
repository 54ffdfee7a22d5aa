"""Trinity Flows: reinforcement fine-tuning of language models as Prefect pipelines.

    from trinity_core import train

is a run from a script or a notebook (docs/python.md). Importing this package is cheap: torch, vllm, deepspeed, ray,
mlflow and prefect are imported where they are used.
"""

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from trinity_core.runtime.python_call import TrainResult, train

__version__ = "0.1.0"
__all__ = ["TrainResult", "train"]


def __getattr__(name: str) -> Any:
    if name in __all__:
        from trinity_core.runtime import python_call

        return getattr(python_call, name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
