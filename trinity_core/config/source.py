"""From a YAML file and overrides to a tree of plain values, with the line of every key."""

from __future__ import annotations

import copy
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import yaml

from trinity_core.config.problems import ConfigError, Problem, SourceLocation

Tree = dict[str, Any]

MOST_VALUES = 20_000
"""Of a file. Nine lines of aliases to aliases can stand for a billion."""


class _Loader(yaml.SafeLoader):
    """YAML with the numbers of YAML 1.2's core schema: `1e-6` is one; `1_000`, `12:30` and a date are text."""


class _Dumper(yaml.SafeDumper):
    """Quotes each text that this loader or one of YAML 1.1 would take for something else."""


_INT, _FLOAT, _TIMESTAMP = (f"tag:yaml.org,2002:{name}" for name in ("int", "float", "timestamp"))
_NUMBERS = {
    _INT: re.compile(r"^(?:[-+]?[0-9]+|0o[0-7]+|0x[0-9a-fA-F]+)$"),
    _FLOAT: re.compile(
        r"^(?:[-+]?(?:\.[0-9]+|[0-9]+(?:\.[0-9]*)?)(?:[eE][-+]?[0-9]+)?|[-+]?\.(?:inf|Inf|INF)|\.(?:nan|NaN|NAN))$"
    ),
}
_Loader.yaml_implicit_resolvers = {
    first: [(tag, pattern) for tag, pattern in resolvers if tag not in (*_NUMBERS, _TIMESTAMP)]
    for first, resolvers in yaml.SafeLoader.yaml_implicit_resolvers.items()
}
for _tag, _pattern in _NUMBERS.items():
    for _class in (_Loader, _Dumper):
        _class.add_implicit_resolver(_tag, _pattern, list("-+.0123456789"))


def _integer(loader: _Loader, node: yaml.ScalarNode) -> int:
    """Decimal also with leading zeros, which are octal in YAML 1.1; `0o17` is octal, `0x1F` hexadecimal."""
    text = str(loader.construct_scalar(node))
    try:
        return int(text) if text.lstrip("-+").isdecimal() else int(text, 0)
    except ValueError:
        digits = text.lstrip("-+").isdecimal()
        problem = f"a number of {len(text)} digits is too long" if digits else f"{shortened(text)!r} is no int"
        raise yaml.constructor.ConstructorError(None, None, problem, node.start_mark) from None


def _fitting(construct: Callable[[_Loader, yaml.ScalarNode], Any]) -> Callable[[_Loader, yaml.ScalarNode], Any]:
    """A constructor that refuses a text that its tag does not fit, as in `!!float text`."""

    def constructed(loader: _Loader, node: yaml.ScalarNode) -> Any:
        try:
            return construct(loader, node)
        except (IndexError, KeyError, ValueError):
            problem = f"{shortened(node.value)!r} is no {node.tag.rpartition(':')[2]}"
            raise yaml.constructor.ConstructorError(None, None, problem, node.start_mark) from None

    return constructed


_KEPT = {None, *(f"tag:yaml.org,2002:{name}" for name in ("null", "bool", "int", "float", "str", "seq", "map"))}
_Loader.yaml_constructors = {tag: each for tag, each in yaml.SafeLoader.yaml_constructors.items() if tag in _KEPT}
_Loader.add_constructor(_INT, _integer)
for _tag in (_FLOAT, "tag:yaml.org,2002:bool"):
    _Loader.add_constructor(_tag, _fitting(yaml.SafeLoader.yaml_constructors[_tag]))


@dataclass
class YamlSource:
    """A tree as it was written."""

    tree: Tree
    places: dict[str, SourceLocation] = field(default_factory=dict)
    """Key path → where it was written."""
    texts: dict[str, str] = field(default_factory=dict)
    """Key path → the unquoted text that the value was read from."""


def parse_value(text: str) -> Any:
    """A YAML scalar, list or mapping, as the right-hand side of an override."""
    return yaml.load(text, _Loader)  # noqa: S506 - a SafeLoader


def dump(tree: Any) -> str:
    """YAML text that `parse` reads as the same tree."""
    return yaml.dump(tree, Dumper=_Dumper, sort_keys=False, allow_unicode=True)


def dump_line(value: Any) -> str:
    """YAML text of a value on one line, as it stands behind a key."""
    style = '"' if isinstance(value, str) and "\n" in value else None
    text = yaml.dump(
        {"_": value} if not isinstance(value, list | dict) else value,
        Dumper=_Dumper,
        sort_keys=False,
        allow_unicode=True,
        width=float("inf"),
        default_flow_style=isinstance(value, list | dict),
        default_style=style,
    )
    return text.strip() if isinstance(value, list | dict) else text.partition(":")[2].strip()


def read(path: Path) -> YamlSource:
    """Read a YAML file. Raises ConfigError where it is missing, is no YAML, or has no keys."""
    try:
        text = path.read_text(encoding="utf-8")
    except FileNotFoundError:
        raise _single("there is no such file.", str(path)) from None
    except (OSError, UnicodeDecodeError) as error:
        raise _single(f"cannot be read: {error}.", str(path)) from None
    return parse(text, str(path))


def parse(text: str, name: str = "<text>") -> YamlSource:
    """Parse YAML text; `name` is shown in problems. Raises ConfigError."""
    places: dict[str, SourceLocation] = {"": SourceLocation(name)}
    problems: list[Problem] = []
    try:
        loader = _Loader(text)
        node = loader.get_single_node()
        if node is None:
            return YamlSource({}, places)
        _size(node, {})
        _mark(node, "", (), places, problems)
        if problems:
            raise ConfigError(problems)
        tree = loader.construct_document(node)
    except yaml.MarkedYAMLError as error:
        mark = error.problem_mark or error.context_mark
        line = mark.line + 1 if mark else None
        raise _single(f"is not valid YAML: {error.problem or error.context}.", name, line) from None
    except yaml.YAMLError as error:
        raise _single(f"is not valid YAML: {first_line(error)}.", name) from None
    except RecursionError:
        raise _single("is not valid YAML: it is nested too deeply.", name) from None
    if not isinstance(tree, dict):
        raise _single("must be a mapping of sections.", name)
    return YamlSource(tree, places, _texts(node))


def _texts(node: yaml.Node | None, key: str = "") -> dict[str, str]:
    """The text of every unquoted scalar below `node`, by its key."""
    if isinstance(node, yaml.ScalarNode):
        return {} if node.style else {key: node.value}
    named: list[tuple[str | int, yaml.Node]] = []
    if isinstance(node, yaml.MappingNode):
        named = [(str(name.value), value) for name, value in node.value]
    elif isinstance(node, yaml.SequenceNode):
        named = list(enumerate(node.value))
    return {path: text for name, value in named for path, text in _texts(value, join_key(key, name)).items()}


def _size(node: yaml.Node, known: dict[int, int]) -> int:
    """Values in and below a node, those of an alias again for each use. Raises ComposerError for too many."""
    if id(node) not in known:
        known[id(node)] = 1  # of an anchor within itself, which `_mark` reports
        inner: list[yaml.Node] = []
        if isinstance(node, yaml.MappingNode):
            inner = [each for pair in node.value for each in pair]
        elif isinstance(node, yaml.SequenceNode):
            inner = node.value
        known[id(node)] = 1 + sum(_size(each, known) for each in inner)
        if known[id(node)] > MOST_VALUES:
            problem = f"with its aliases it has more than {MOST_VALUES:,} values"
            raise yaml.composer.ComposerError(None, None, problem, node.start_mark)
    return known[id(node)]


def _mark(
    node: yaml.Node, key: str, above: tuple[int, ...], places: dict[str, SourceLocation], problems: list[Problem]
) -> None:
    """Note the line of every key below `node`; report keys given twice and anchors within themselves."""
    file = places[""].file
    line = node.start_mark.line + 1
    if id(node) in above:
        problems.append(Problem(key, None, "refers to itself.", file, line))
        return
    above = (*above, id(node))
    if isinstance(node, yaml.MappingNode):
        for name, value in node.value:
            path = join_key(key, str(name.value))
            line = name.start_mark.line + 1
            if path in places and name.value != "<<":
                first = places[path].line
                problems.append(Problem(path, None, f"is given twice, first in line {first}.", file, line))
            places[path] = SourceLocation(file, line)
            _mark(value, path, above, places, problems)
    elif isinstance(node, yaml.SequenceNode):
        for index, item in enumerate(node.value):
            path = join_key(key, index)
            places[path] = SourceLocation(file, item.start_mark.line + 1)
            _mark(item, path, above, places, problems)


def merge(base: Any, over: Any, whole: frozenset[str] = frozenset()) -> Any:
    """A copy of `base` with `over` laid on it: mappings key by key; lists, scalars and keys in `whole` as a whole."""
    if not (isinstance(base, dict) and isinstance(over, dict)):
        return copy.deepcopy(over)
    merged = copy.deepcopy(base)
    for name, value in over.items():
        merged[name] = merge(base[name], value, whole) if name in base and name not in whole else copy.deepcopy(value)
    return merged


def override(source: YamlSource, overrides: Sequence[str]) -> YamlSource:
    """Apply `key.path=value` in order. A list entry is named by its index, `name` or `stage_name`.

    Raises ConfigError for texts that are no override.
    """
    tree, places, texts = _unshared(source.tree), dict(source.places), dict(source.texts)
    problems: list[Problem] = []
    for text in overrides:
        key, equals, raw = text.partition("=")
        shown = f"override '{shortened(text)}'"
        parts = re.findall(r"[^.\[\]]+", key.strip())
        if not equals or not parts:
            problems.append(Problem("", shortened(text), "an override must read key.path=value.", shown))
            continue
        try:
            node = yaml.compose(raw, _Loader)
            if faults := _faults(node, key.strip(), shown):
                problems += faults
                continue
            value = parse_value(raw)
            path = _assign(tree, parts, value)
        except (yaml.YAMLError, RecursionError):
            problems.append(Problem(key, raw, "the value is not valid YAML.", shown))
        except LookupError as error:
            problems.append(Problem(key, raw, str(error.args[0]), shown))
        else:
            places = {known: place for known, place in places.items() if not _below(known, path)}
            places |= spread(value, path, SourceLocation(shown))
            texts = {known: text for known, text in texts.items() if known != path and not _below(known, path)}
            texts |= _texts(node, path)
    if problems:
        raise ConfigError(problems)
    return YamlSource(tree, places, texts)


def _unshared(value: Any) -> Any:
    """A copy in which nothing is there twice: what YAML writes once and uses again (`*columns`) is set one by one."""
    if isinstance(value, dict):
        return {name: _unshared(inner) for name, inner in value.items()}
    return [_unshared(inner) for inner in value] if isinstance(value, list) else value


def _faults(node: yaml.Node | None, key: str, shown: str) -> list[Problem]:
    """What `_mark` reports of the value of an override, which has no lines."""
    problems: list[Problem] = []
    if node is not None:
        _size(node, {})
        _mark(node, key, (), {"": SourceLocation(shown)}, problems)
    return [replace(problem, line=None) for problem in problems]


def spread(node: Any, key: str, place: SourceLocation) -> dict[str, SourceLocation]:
    """The same place for a key and for every key below it."""
    places = {key: place}
    if isinstance(node, dict):
        node = {str(name): value for name, value in node.items()}
    for name, value in node.items() if isinstance(node, dict) else enumerate(node) if isinstance(node, list) else ():
        places |= spread(value, join_key(key, name), place)
    return places


def _below(key: str, path: str) -> bool:
    return key.startswith((f"{path}.", f"{path}["))


def _assign(tree: Tree, parts: Sequence[str], value: Any) -> str:
    """Set a value, creating sections on the way; returns the key path. Raises LookupError with a sentence."""
    node: Any = tree
    path = ""
    for depth, part in enumerate(parts):
        last = depth == len(parts) - 1
        if isinstance(node, list):
            index = _index(node, part, path)
            path = f"{path}[{index}]"
            if last:
                node[index] = value
            else:
                node = node[index]
        elif isinstance(node, dict):
            path = f"{path}.{part}" if path else part
            if last:
                node[part] = value
            else:
                node[part] = {} if node.get(part) is None else node[part]
                node = node[part]
        else:
            raise LookupError(f"{path} is a single value, it has no key '{part}'.")
    return path


def _index(items: list[Any], part: str, path: str) -> int:
    """The position of a list entry by its index or name."""
    if part.isdigit() and int(part) < len(items):
        return int(part)
    for index, item in enumerate(items):
        if isinstance(item, dict) and part in (item.get("name"), item.get("stage_name")):
            return index
    raise LookupError(f"{path} has {len(items)} entries and none is called '{part}'.")


def join_key(key: str, part: str | int) -> str:
    """The key of an entry below a key."""
    if isinstance(part, int):
        return f"{key}[{part}]"
    return f"{key}.{part}" if key else part


def shortened(text: str, limit: int = 120) -> str:
    """The text, or its beginning."""
    return text if len(text) <= limit else f"{text[:limit]}…"


def first_line(error: Exception) -> str:
    """The first line of an error's text, without a full stop."""
    return str(error).partition("\n")[0].rstrip(".")


def _single(message: str, file: str, line: int | None = None) -> ConfigError:
    return ConfigError([Problem("", None, message, file, line)])
