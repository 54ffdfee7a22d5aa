"""The parameters of flows: types that Prefect's UI shows as a form and checks before a run starts."""

from __future__ import annotations

from typing import Annotated

from pydantic import AfterValidator, Field, StrictInt, TypeAdapter, ValidationError

from trinity_core.errors import TrinityError

RETRIES = 2
"""Further attempts after a transient fault, each from the latest checkpoint."""
RETRY_DELAY = 5
"""Seconds before each."""

Override = Annotated[str, Field(pattern=r"^[^=]*[^=.\[\]\s][^=]*=", examples=["trainer.total_steps=100"])]
"""One setting, as `dotted.key=value`: what `load_config` takes for one."""

Name = Annotated[str | StrictInt, AfterValidator(str)]
"""A name that may consist of digits: Prefect's command line reads `--param run=20240101` as a number."""

ConfigFile = Annotated[str, Field(title="Configuration", description="YAML file of the run", min_length=1)]
Overrides = Annotated[
    list[Override], Field(title="Overrides", description="Settings laid over the file, each as dotted.key=value")
]
StageName = Annotated[Name, Field(title="Stage", description="Stage of a configuration that has several")]
ModelPath = Annotated[str, Field(title="Model", description="Model to start from in place of the configuration's")]
CheckpointDir = Annotated[
    str, Field(title="Checkpoints", description="Another run's folder, or one of its global_step_N")
]
RunName = Annotated[
    Name,
    Field(title="Run", description="Run whose checkpoints are meant, where it is called otherwise than configured"),
]
BaseModelDir = Annotated[str, Field(title="Base model", description="For checkpoints that lack their config.json")]
CHOICES = "base (the model before training), latest, missing (checkpoints without a score), all, or a step"
Which = Annotated[
    Annotated[str, Field(pattern=r"^(base|latest|missing|all|\d+)$")] | Annotated[StrictInt, Field(ge=0)],
    AfterValidator(str),
    Field(title="Which", description=CHOICES),
]

NO_OVERRIDES: list[str] = []


def check_which(which: str) -> None:
    """Say now what the flow would say once it runs. Raises TrinityError where `which` is no `Which`."""
    try:
        TypeAdapter(Which).validate_python(which)
    except ValidationError:
        raise TrinityError(f"--which {which!r} is none of the choices: {CHOICES}.") from None
