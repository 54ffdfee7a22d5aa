"""The JSON Schema of a configuration file, for editors: `trinity schema --json`, shipped as `configs/schema.json`.

A file may contain more than a resolved configuration: `${…}` in place of any value, null for the default of a section
or a list, and numbers where text is wanted.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

from pydantic import BaseModel
from pydantic.json_schema import GenerateJsonSchema

from trinity_core.base.registry import registry_of
from trinity_core.config.algorithm_types import ALGORITHMS, PARTS
from trinity_core.config.fields import Setting, sections, settings
from trinity_core.config.foreign.table import accepted_keys
from trinity_core.config.schema import (
    AlgorithmConfig,
    Config,
    MonitorConfig,
    OperatorConfig,
    ReplayBufferConfig,
    StageConfig,
    TasksetConfig,
)

Schema = dict[str, Any]

DIALECT = "https://json-schema.org/draft/2020-12/schema"
INTERPOLATION: Schema = {
    "type": "string",
    "pattern": r"\$\{.+\}",
    "description": "`${oc.env:NAME,default}` or `${other.key}`",
}
ANY = {"$ref": "#/$defs/Interpolation"}
NULL = {"type": "null"}
SCALARS = ["string", "number", "boolean"]
"""Text keeps its notation, even where YAML reads a number or a bool."""
STANDARD = {"ge": "minimum", "gt": "exclusiveMinimum", "le": "maximum"}
"""Bounds that pydantic writes under its own names after a BeforeValidator."""
ABOUT = ("description", "default", "unit", "examples")


NAMED: dict[type[BaseModel], list[tuple[str, str, str]]] = {
    AlgorithmConfig: [(part, f"{part}_args", f"algorithm.{part}") for part in PARTS],
    MonitorConfig: [("monitor_type", "monitor_args", "monitor.monitor_type")],
    TasksetConfig: [
        ("default_workflow_type", "workflow_args", "default_workflow_type"),
        ("default_reward_fn_type", "reward_fn_args", "default_reward_fn_type"),
    ],
    ReplayBufferConfig: [("priority_fn", "priority_fn_args", "replay_buffer.priority_fn")],
    OperatorConfig: [("name", "args", "operators")],
}
"""Section → (setting that names a part, setting with its arguments, key of its registry)."""
SHARED = ("sample_strategy", "monitor_type")
"""Settings whose arguments may also belong to another part: `mix` accepts those of its inner strategy."""


class _Generate(GenerateJsonSchema):
    """Suppresses warnings about defaults: pydantic cannot serialise a frozen dict."""

    ignored_warning_kinds = {"non-serializable-default", "skipped-choice"}  # noqa: RUF012


def json_schema() -> Schema:
    """The JSON Schema (draft 2020-12) of a configuration file."""
    plain = Config.model_json_schema(schema_generator=_Generate)
    models = {cls.__name__: cls for _, cls in sections()}
    definitions = plain.pop("$defs") | {Config.__name__: plain}
    defs = {name: _section(models[name], schema, definitions) for name, schema in sorted(definitions.items())}
    whole = defs.pop(Config.__name__)
    stage = defs[StageConfig.__name__]["properties"]
    for name in whole["properties"].keys() & stage.keys():  # a stage has the sections of a configuration
        stage[name] = whole["properties"][name] | {"description": stage[name]["description"]}
    defs["Interpolation"] = INTERPOLATION
    return {"$schema": DIALECT, "title": "Trinity Flows configuration", **whole, "$defs": defs}


def _section(cls: type[BaseModel], schema: Schema, definitions: dict[str, Schema]) -> Schema:
    return {
        "type": "object",
        "description": schema["description"],
        "properties": {
            **{setting.name: _property(setting, schema["properties"][setting.name]) for setting in settings(cls)},
            **{
                name: {**_spelled(native, definitions), "deprecated": True, "description": text}
                for name, text, native in accepted_keys(cls)
            },
        },
        "additionalProperties": False,
        **({"allOf": [*_conditions(cls)]} if cls in NAMED else {}),
    }


def _spelled(native: str, definitions: dict[str, Schema]) -> Schema:
    """Return the schema for another spelling of a key: that of `native` if it is a setting, else anything."""
    section, _, name = native.rpartition(".")
    cls = dict(sections()).get(section)
    if cls is None or name not in cls.model_fields:
        return {}
    value = {key: part for key, part in definitions[cls.__name__]["properties"][name].items() if key not in ABOUT}
    return _options([_written(value), NULL])


def _conditions(cls: type[BaseModel]) -> Iterator[Schema]:
    """Yield, for each built-in name of the settings in `NAMED`: if it is given, the arguments match its model."""
    for name, args, key in NAMED[cls]:
        registry = registry_of(key)
        for known in registry:
            model = registry.arguments(registry[known], known)
            if model is not None and (model.model_fields or model.model_config.get("extra") != "allow"):
                schema = _inlined(model.model_json_schema(schema_generator=_Generate))
                if name in SHARED:
                    schema.pop("additionalProperties", None)
                condition = {"anyOf": [_named(name, known), *_implied(cls, name, known)]}
                yield {"if": condition, "then": {"properties": {args: _arguments(schema)}}}


def _named(name: str, value: str) -> Schema:
    return {"properties": {name: {"const": value}}, "required": [name]}


def _implied(cls: type[BaseModel], name: str, value: str) -> Iterator[Schema]:
    """Yield the condition for an omitted part: an `algorithm_type` with this default. Without that key nothing follows,
    because a stage inherits the type."""
    if cls is AlgorithmConfig:
        types = [algorithm for algorithm, known in ALGORITHMS.items() if vars(known)[name] == value]
        yield {"properties": {name: {"const": None}, "algorithm_type": {"enum": types}}, "required": ["algorithm_type"]}


def _arguments(schema: Schema) -> Schema:
    """Return the schema of a part's arguments as they may be written."""
    properties = {name: _argument(argument) for name, argument in schema.get("properties", {}).items()}
    forbids = {"additionalProperties": False} if schema.get("additionalProperties") is False else {}
    return _options([{"type": "object", "properties": properties, **forbids}, ANY, NULL])


def _argument(schema: Schema) -> Schema:
    about = {name: schema[name] for name in ABOUT if name in schema}
    if section := next((option for option in schema.get("anyOf", []) if "properties" in option), None):
        return {**_arguments(section), **about}
    return {**_written({name: value for name, value in schema.items() if name not in ABOUT}), **about}


def _inlined(schema: Schema) -> Schema:
    """Return the schema with each reference replaced by its entry of `$defs`."""
    defs = schema.pop("$defs", {})

    def put_in(value: Any) -> Any:
        if isinstance(value, list):
            return [put_in(item) for item in value]
        if not isinstance(value, dict):
            return value
        section = defs.get(str(value.get("$ref", "")).rpartition("/")[2])
        return put_in(section) if section else {name: put_in(item) for name, item in value.items()}

    inlined: Schema = put_in(schema)
    return inlined


def text() -> str:
    return json.dumps(json_schema(), indent=1, ensure_ascii=False) + "\n"


def _property(setting: Setting, schema: Schema) -> Schema:
    about = {name: schema[name] for name in ABOUT if name in schema} | {"description": setting.doc}
    if setting.section is None or setting.entry is not None:
        about["default"] = setting.default
    if setting.names:
        about["examples"] = list(setting.names)
    return {**_written({name: value for name, value in schema.items() if name not in ABOUT}), **about}


def _written(schema: Schema) -> Schema:
    """Return the schema of how a value may be written."""
    schema = {STANDARD.get(name, name): value for name, value in schema.items() if name != "title"}
    if "anyOf" in schema:
        return _options([_written(option) for option in schema["anyOf"]], schema.get("unit"))
    kind = schema.get("type")
    inner: Schema
    if "enum" in schema or kind in ("integer", "number", "boolean"):
        return _options([schema, ANY])
    if kind == "string":
        return {"type": SCALARS}  # an interpolation is text
    if kind == "array":
        inner = {"items": _written(schema["items"])} if "items" in schema else {}
        if "prefixItems" in schema:
            inner["prefixItems"] = [_written(item) for item in schema["prefixItems"]]
        return _options([schema | inner, ANY, *([] if "prefixItems" in schema else [NULL])])
    if kind == "object":
        values = schema.get("additionalProperties")
        inner = {"additionalProperties": _written(values)} if isinstance(values, dict) else {}
        return _options([schema | inner, ANY, NULL])
    return _options([schema, ANY, NULL]) if "$ref" in schema else schema


def _options(schemas: list[Schema], unit: str | None = None) -> Schema:
    """Return a schema that allows any of these, flattened and without duplicates."""
    flat: list[Schema] = []
    for schema in schemas:
        flat += [option for option in schema.get("anyOf", [schema]) if option not in flat]
    return {"anyOf": flat, **({"unit": unit} if unit else {})}
