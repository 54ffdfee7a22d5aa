"""The JSON Schema of a configuration file, for editors: `trinity schema --json`, shipped as `configs/schema.json`.

It is pydantic's schema of the sections, and allows what a file may contain before it is resolved: `${…}` in place of
any value, null for the default of a section or a list, numbers where text is wanted, and other systems' keys.
Arguments of a part (`policy_loss_fn_args`) are not checked here.
"""

from __future__ import annotations

import json
from typing import Any

from pydantic import BaseModel
from pydantic.json_schema import GenerateJsonSchema

from trinity_core.config.fields import Setting, sections, settings
from trinity_core.config.foreign.table import accepted_keys
from trinity_core.config.foreign.verl_keys import SECTIONS
from trinity_core.config.schema import Config, StageConfig

Schema = dict[str, Any]

DIALECT = "https://json-schema.org/draft/2020-12/schema"
INTERPOLATION: Schema = {
    "type": "string",
    "pattern": r"\$\{.+\}",
    "description": "`${oc.env:NAME,default}` or `${other.key}`",
}
ANY = {"$ref": "#/$defs/Interpolation"}
NULL = {"type": "null"}
STANDARD = {"ge": "minimum", "gt": "exclusiveMinimum", "le": "maximum", "lt": "exclusiveMaximum"}
"""Bounds that pydantic writes under its own names after a BeforeValidator."""
ABOUT = ("description", "default", "unit", "examples")


class _Generate(GenerateJsonSchema):
    """Suppresses warnings about defaults: pydantic cannot serialise a frozen dict."""

    ignored_warning_kinds = {"non-serializable-default", "skipped-choice"}  # noqa: RUF012


def json_schema() -> Schema:
    """The JSON Schema (draft 2020-12) of a configuration file."""
    plain = Config.model_json_schema(schema_generator=_Generate)
    models = {cls.__name__: cls for _, cls in sections()}
    definitions = plain.pop("$defs") | {Config.__name__: plain}
    defs = {name: _section(models[name], schema) for name, schema in sorted(definitions.items())}
    whole = defs.pop(Config.__name__)
    stage = defs[StageConfig.__name__]["properties"]
    for name in whole["properties"].keys() & stage.keys():  # a stage has the sections of a configuration
        stage[name] = whole["properties"][name] | {"description": stage[name]["description"]}
    defs["Interpolation"] = INTERPOLATION
    return {"$schema": DIALECT, "title": "Trinity Flows configuration", **whole, "$defs": defs}


def text() -> str:
    return json.dumps(json_schema(), indent=1, ensure_ascii=False) + "\n"


def _section(cls: type[BaseModel], schema: Schema) -> Schema:
    native = {setting.name: _property(setting, schema["properties"][setting.name]) for setting in settings(cls)}
    foreign = {name: {"deprecated": True, "description": text} for name, text, _ in accepted_keys(cls)}
    return {
        "type": "object",
        "description": schema["description"],
        "properties": native | foreign,
        "additionalProperties": cls in SECTIONS,
    }


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
    kind = schema.get("type")
    if "anyOf" in schema:
        options = [option for inner in schema["anyOf"] for option in _written(inner).get("anyOf", [_written(inner)])]
        unit = {"unit": schema["unit"]} if "unit" in schema else {}
        return {"anyOf": [option for index, option in enumerate(options) if option not in options[:index]], **unit}
    if "enum" in schema or kind in ("integer", "number", "boolean"):
        return {"anyOf": [schema, ANY]}
    if kind == "string":  # keeps its notation, even where YAML reads a number or a bool; an interpolation is text
        return {"type": ["string", "number", "boolean"]}
    for below in ("items", "additionalProperties"):
        if isinstance(schema.get(below), dict):
            schema[below] = _written(schema[below])
    if "prefixItems" in schema:
        schema["prefixItems"] = [_written(item) for item in schema["prefixItems"]]
    can_be_null = kind in ("array", "object") and "prefixItems" not in schema
    return {"anyOf": [schema, ANY, *([NULL] if can_be_null or "$ref" in schema else [])]} if schema else schema
