"""The parameters of flows: types that Prefect's UI shows as a form and validates before a run starts."""

from __future__ import annotations

from typing import Annotated, Any

from pydantic import BeforeValidator, Field, GetJsonSchemaHandler, TypeAdapter, ValidationError, WithJsonSchema
from pydantic.fields import FieldInfo
from pydantic.json_schema import JsonSchemaValue
from pydantic_core import CoreSchema

from tasks.prefect_api import MAIN_SETTINGS
from trinity_core.base.errors import TrinityError
from trinity_core.config.fields import setting_at


def shown(title: str, description: str) -> FieldInfo:
    """Set a parameter's title and description in the UI.

    They are extra schema keys, because Prefect replaces a field's title by the parameter's name, and takes descriptions
    only from the flow's docstring.
    """
    shown: FieldInfo = Field(json_schema_extra={"title": title, "description": description})
    return shown


Override = Annotated[str, Field(pattern=r"^[^=]*[^=.\[\]\s][^=]*=", examples=["buffer.total_steps=100"])]
"""One setting, as `dotted.key=value`, as `load_config` accepts it."""


def _digits_as_text(value: object) -> object:
    return str(value) if type(value) is int else value


Name = Annotated[
    str, BeforeValidator(_digits_as_text), WithJsonSchema({"anyOf": [{"type": "string"}, {"type": "integer"}]})
]
"""A name that may consist of digits: Prefect's command line reads `--param run=20240101` as a number."""

ConfigFile = Annotated[
    str, Field(min_length=1), shown("Configuration", "YAML file of the run, from the folder of `trinity up`")
]
ConfigFiles = Annotated[
    list[ConfigFile],
    Field(min_length=1),
    shown("Configurations", "YAML files: one with mode: train, the others with mode: explore"),
]
Overrides = Annotated[
    list[Override],
    shown(
        "Overrides", "Settings laid over the file, such as buffer.total_steps=100; replaces the deployment's own list"
    ),
]
StageName = Annotated[Name, shown("Stage", "Stage of a configuration that has several; else empty")]
ModelPath = Annotated[str, shown("Model", "Hub name or folder in place of the configuration's model; empty: that one")]
CheckpointDir = Annotated[
    str, shown("Checkpoints", "Another run's folder, or one of its global_step_N; empty: the configuration's run")
]
RunName = Annotated[Name, shown("Run", "Name of the run whose checkpoints are scored; empty: the configuration's")]
BaseModelDir = Annotated[
    str, shown("Base model", "Folder of the base model, only for checkpoints that lack their config.json")
]
MergeAdapters = Annotated[bool, shown("Merge adapters", "Write whole models, of LoRA adapters and their base")]
CHOICES = (
    "base (the model before training), latest, missing (checkpoints without a score), all, or a step; empty: as "
    "explorer.bench_on_latest_checkpoint says"
)
WHICH = r"^(base|latest|missing|all|\d+|)$"
Which = Annotated[
    str,
    Field(pattern=WHICH),
    BeforeValidator(_digits_as_text),
    WithJsonSchema({"anyOf": [{"type": "string", "pattern": WHICH}, {"type": "integer", "minimum": 0}]}),
    shown("Which checkpoints", CHOICES),
]

NO_OVERRIDES: list[str] = []


def _main(name: str, title: str, more: str = "") -> FieldInfo:
    """Return the form field of a main setting, with the setting's own doc (and `more`), bounds and names."""
    setting = setting_at(MAIN_SETTINGS[name])
    doc = setting.doc.replace("`", "").removesuffix(".")
    about: dict[str, Any] = {"title": title, "description": f"Empty: as configured. {doc}{more}."}
    if setting.names:
        about["examples"] = list(setting.names)
    low: Any = setting.bounds.low if setting.bounds else None
    above = bool(setting.bounds and setting.bounds.above)

    shown: FieldInfo = Field(gt=low if above else None, ge=None if above else low, json_schema_extra=about)
    return shown


class _WithoutDefault(dict[str, Any]):
    """A JSON Schema to which pydantic adds no default."""

    def __setitem__(self, key: str, value: Any) -> None:
        if key != "default":
            super().__setitem__(key, value)


class _Optional:
    """Marks a type that may be None without saying so in the schema.

    For the type null the form shows `Property is type "None"`. A default null it would send, which Prefect refuses for
    a field of another type, while it takes null for one without a default.
    """

    def __get_pydantic_json_schema__(self, core: CoreSchema, handler: GetJsonSchemaHandler) -> JsonSchemaValue:
        kinds = [kind for kind in handler(core)["anyOf"] if kind != {"type": "null"}]
        return _WithoutDefault(kinds[0] if len(kinds) == 1 else {"anyOf": kinds})


RunTitle = Annotated[Name, _main("name", "Name: a new one starts a new run", "; it replaces Prefect's Run Name")]
AlgorithmType = Annotated[
    str | None, _main("algorithm_type", "Algorithm", "; for instance grpo, opmd, ppo or sft"), _Optional()
]
LearningRate = Annotated[float | None, _main("lr", "Learning rate"), _Optional()]
TotalSteps = Annotated[int | None, _main("total_steps", "Training steps"), _Optional()]
BatchSize = Annotated[int | None, _main("batch_size", "Batch size"), _Optional()]
RepeatTimes = Annotated[int | None, _main("repeat_times", "Rollouts per task"), _Optional()]


def check_which(which: str) -> None:
    """Reject an invalid `which` before the flow starts. Raises TrinityError."""
    try:
        TypeAdapter(Which).validate_python(which)
    except ValidationError:
        raise TrinityError(f"--which {which!r} is none of the choices: {CHOICES}.", key="--which") from None
