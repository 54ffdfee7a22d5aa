"""The YAML of configurations: the numbers of YAML 1.2's core schema, and plain values only."""

from __future__ import annotations

import re
from typing import Any

import yaml


class Loader(yaml.SafeLoader):
    """Loads YAML with the numbers of YAML 1.2's core schema: `1e-6` is a number; `1_000`, `12:30` and dates are
    text."""


class Dumper(yaml.SafeDumper):
    """Quotes each text that this loader or one for YAML 1.1 would read as something else."""


_INT, _FLOAT, _TIMESTAMP = (f"tag:yaml.org,2002:{name}" for name in ("int", "float", "timestamp"))
_NUMBERS = {
    _INT: re.compile(r"^(?:[-+]?[0-9]+|0o[0-7]+|0x[0-9a-fA-F]+)$"),
    _FLOAT: re.compile(
        r"^(?:[-+]?(?:\.[0-9]+|[0-9]+(?:\.[0-9]*)?)(?:[eE][-+]?[0-9]+)?|[-+]?\.(?:inf|Inf|INF)|\.(?:nan|NaN|NAN))$"
    ),
}
Loader.yaml_implicit_resolvers = {
    first: [(tag, pattern) for tag, pattern in resolvers if tag not in (*_NUMBERS, _TIMESTAMP)]
    for first, resolvers in yaml.SafeLoader.yaml_implicit_resolvers.items()
}
for _tag, _pattern in _NUMBERS.items():
    for _class in (Loader, Dumper):
        _class.add_implicit_resolver(_tag, _pattern, list("-+.0123456789"))


def _integer(loader: Loader, node: yaml.ScalarNode) -> int:
    """Parse an integer. Leading zeros stay decimal (octal in YAML 1.1); `0o17` is octal, `0x1F` hexadecimal."""
    text = str(loader.construct_scalar(node))
    return int(text) if text.lstrip("-+").isdecimal() else int(text, 0)


_KEPT = {None, *(f"tag:yaml.org,2002:{name}" for name in ("null", "bool", "int", "float", "str", "seq", "map"))}
Loader.yaml_constructors = {tag: each for tag, each in yaml.SafeLoader.yaml_constructors.items() if tag in _KEPT}
Loader.add_constructor(_INT, _integer)


def parse_value(text: str) -> Any:
    """Parse a YAML scalar, list or mapping, as on the right-hand side of an override. Raises YAMLError."""
    try:
        return yaml.load(text, Loader)  # noqa: S506 - a SafeLoader
    except (ValueError, LookupError) as error:  # a text that does not fit its tag
        raise yaml.YAMLError(str(error)) from None


def dump(tree: Any) -> str:
    """Return YAML text that `parse` reads as the same tree."""
    return yaml.dump(tree, Dumper=Dumper, sort_keys=False, allow_unicode=True)


def dump_line(value: Any) -> str:
    """Return YAML text of a value on one line, as it follows a key."""
    style = '"' if isinstance(value, str) and "\n" in value else None
    text = yaml.dump(
        {"_": value} if not isinstance(value, list | dict) else value,
        Dumper=Dumper,
        sort_keys=False,
        allow_unicode=True,
        width=float("inf"),
        default_flow_style=isinstance(value, list | dict),
        default_style=style,
    )
    return text.strip() if isinstance(value, list | dict) else text.partition(":")[2].strip()


def shortened(text: str, limit: int = 120) -> str:
    return text if len(text) <= limit else f"{text[:limit]}…"
