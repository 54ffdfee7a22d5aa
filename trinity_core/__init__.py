"""Trinity Flows: reinforcement fine-tuning of language models as Prefect pipelines.

    from trinity_core import train

is a run from a script or a notebook (docs/python.md). Importing this package is cheap: torch, vllm, deepspeed, ray,
mlflow and prefect are imported where they are used.
"""

import os
from typing import TYPE_CHECKING, Any

from trinity_core.version import __version__

if TYPE_CHECKING:
    from trinity_core.run.python_call import TrainResult, train

__all__ = ["TrainResult", "__version__", "train"]
QUIET = {
    "DO_NOT_TRACK": "1",  # Prefect's clients, vLLM, Hugging Face
    "MLFLOW_DISABLE_TELEMETRY": "true",
    "PREFECT_SERVER_ANALYTICS_ENABLED": "false",
    "RAY_USAGE_STATS_ENABLED": "0",
    "STREAMLIT_BROWSER_GATHER_USAGE_STATS": "false",
}
"""No process of ours reports to the makers of the packages that it uses, unless the user has set these otherwise. They
are set here because every process imports this package first, and the packages read them when they are imported."""
for name, value in QUIET.items():
    os.environ.setdefault(name, value)


def __getattr__(name: str) -> Any:
    if name in __all__:
        from trinity_core.run import python_call

        return getattr(python_call, name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
