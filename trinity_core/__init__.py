"""Trinity Flows: reinforcement fine-tuning of language models as Prefect pipelines.

Importing this package is cheap: torch, vllm, deepspeed, ray, mlflow and prefect are imported where they are used.
"""

__version__ = "0.1.0"
