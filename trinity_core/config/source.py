"""A YAML file with its overrides as a tree of plain values, with the location of every key.

One walk over YAML's nodes produces the values, the locations and the problems. It follows the schema, so that settings
of type text keep their notation: `name: 1.10` is called 1.10, and an environment variable keeps its leading zeros.
"""

from __future__ import annotations

import copy
import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import yaml
from pydantic import BaseModel

from trinity_core.config.fields import Type
from trinity_core.config.findings import ConfigError, Finding, SourceLocation, is_below, is_within
from trinity_core.config.foreign.actions import Below
from trinity_core.config.foreign.table import type_at, type_below
from trinity_core.config.schema import Config
from trinity_core.config.yaml_text import Loader, shortened

Tree = dict[str, Any]

TAG = "tag:yaml.org,2002:"
OBJECT = "!object"
"""Tag for an object that is not a plain value; the node's text is its type."""
WHOLE = frozenset({"experience_buffer", "taskset"})
"""Keys that a stage replaces as a whole, because the path of one data set and the columns of another do not belong
together."""


@dataclass
class YamlSource:
    tree: Tree
    places: dict[str, SourceLocation] = field(default_factory=dict)
    """Key path → location."""
    problems: list[Finding] = field(default_factory=list)
    refers: bool = False
    """True if some text contains an interpolation, `${…}`."""

    def valid_tree(self) -> Tree:
        """Return the tree of a file, for inspection only. Raises ConfigError unless each key has exactly one value."""
        if problems := [problem for problem in self.problems if problem.code != "missing"]:
            raise ConfigError(problems)
        return self.tree


def read(path: Path, section: type[BaseModel] | None = Config) -> YamlSource:
    """Read a YAML file. Raises ConfigError if it is missing, is not YAML, or has no keys."""
    try:
        text = path.read_text(encoding="utf-8")
    except FileNotFoundError:
        here = " Recipes are in configs/, such as configs/gsm8k/gsm8k.yaml." if path.parts[:1] == ("examples",) else ""
        raise _unreadable(f"there is no such file.{here}", str(path)) from None
    except (OSError, UnicodeDecodeError) as error:
        raise _unreadable(f"cannot be read: {error}.", str(path)) from None
    return parse(text, str(path), section)


def parse(text: str, name: str = "<text>", section: type[BaseModel] | None = Config) -> YamlSource:
    """Parse YAML text; `name` is shown in problems. Raises ConfigError."""
    walk = _Walk(name)
    try:
        walk.loader = loader = Loader(text)
        node = loader.get_single_node()
        if node is None:
            return walk.source({})
        tree = walk.value(node, "", None if section is None else Type(section, (), False))
    except yaml.MarkedYAMLError as error:
        mark = error.problem_mark or error.context_mark
        line = mark.line + 1 if mark else None
        raise _unreadable(f"is not valid YAML: {error.problem or error.context}.", name, line) from None
    except yaml.YAMLError as error:
        raise _unreadable(f"is not valid YAML: {first_line(error)}.", name) from None
    except RecursionError:
        raise _unreadable("is not valid YAML: it is nested too deeply.", name) from None
    if not isinstance(tree, dict):
        raise _unreadable("must be a mapping of sections.", name)
    return walk.source(tree)


def from_values(tree: Mapping[str, Any]) -> YamlSource:
    """Return a source of Python values, taken unchanged."""
    walk = _Walk(None)
    return walk.source(walk.value(_Representer(sort_keys=False).represent_data(dict(tree)), "", None))


class _Representer(yaml.representer.SafeRepresenter):
    """Converts Python values to YAML nodes."""

    def plain_node(self, value: str | int | float) -> yaml.Node:
        """Represent a subtype of text or number, such as NumPy's, as the plain value."""
        kind = next(kind for kind in (str, int, float) if isinstance(value, kind))
        return self.represent_data(kind(str.__str__(value) if kind is str else value))

    def object_node(self, value: Any) -> yaml.ScalarNode:
        """Represent a value that YAML does not have."""
        return yaml.ScalarNode(OBJECT, type(value).__name__)


_PLAIN = (type(None), str, bool, int, float, list, tuple, dict)
_Representer.yaml_representers = {kind: _Representer.yaml_representers[kind] for kind in _PLAIN}
_Representer.yaml_multi_representers = {
    **dict.fromkeys((str, int, float), _Representer.plain_node),  # type: ignore[arg-type]
    **{kind: _Representer.yaml_representers[kind] for kind in (list, dict)},
    object: _Representer.object_node,  # type: ignore[dict-item]
}


class _Walk:
    """Walks over the nodes of a file, an override, or Python values."""

    def __init__(self, file: str | None, has_lines: bool = True) -> None:
        self._file, self._has_lines = file, has_lines
        self._places = {"": SourceLocation(file)}
        self._problems: list[Finding] = []
        self._refers = False
        self.loader = Loader("")

    def source(self, tree: Tree) -> YamlSource:
        """Return the tree with everything collected during the walk."""
        return YamlSource(tree, self._places, self._problems, self._refers)

    def value(self, node: yaml.Node, key: str, typed: Type | Below | None, above: tuple[yaml.Node, ...] = ()) -> Any:
        """Return the value of a node at a key. Unusable values are reported and become None.

        Raises YAMLError for a text that does not fit its tag.
        """
        if isinstance(node, yaml.ScalarNode):
            return self._scalar(node, key, typed)
        if node.tag != f"{TAG}{'map' if isinstance(node, yaml.MappingNode) else 'seq'}":
            return self.loader.construct_object(node, deep=True)  # raises
        if node in above:
            return self._problem(node, key, "recursive", "refers to itself.")
        above = (*above, node)
        if isinstance(node, yaml.MappingNode):
            return {
                name: self.value(value, join_key(key, name), type_below(typed, name), above)
                for name, value in self._entries(node, key, above).items()
            }
        values = []
        for index, item in enumerate(node.value):
            self._places[join_key(key, index)] = self._place(item)
            values.append(self.value(item, join_key(key, index), type_below(typed, index), above))
        return values

    def _entries(self, node: yaml.MappingNode, key: str, above: tuple[yaml.Node, ...]) -> dict[str, yaml.Node]:
        """Return the entries of a mapping, including those merged by `<<`; their locations are recorded."""
        inherited: dict[str, yaml.Node] = {}
        own: dict[str, yaml.Node] = {}
        merges: list[yaml.Node] = []
        for name_node, value in node.value:
            if name_node.tag == f"{TAG}merge":
                if merges:
                    self._twice(
                        name_node, join_key(key, "<<"), self._place(merges[0]), "; write one, <<: [*one, *other]"
                    )
                merges.append(name_node)
                inherited |= self._merged(value, key, above)
                continue
            if not isinstance(name_node, yaml.ScalarNode):
                raise yaml.constructor.ConstructorError(None, None, "found unhashable key", name_node.start_mark)
            name = name_node.value or "null"
            path = join_key(key, name)
            if name in own:
                self._twice(name_node, path, self._places[path])
            own[name] = value
            self._places[path] = self._place(name_node)
        return {**inherited, **own}

    def _merged(self, node: yaml.Node, key: str, above: tuple[yaml.Node, ...]) -> dict[str, yaml.Node]:
        """Return the entries that `<<: *anchor` or `<<: [*one, *other]` merges; the first anchor wins."""
        merged: dict[str, yaml.Node] = {}
        for mapping in reversed(node.value) if isinstance(node, yaml.SequenceNode) else [node]:
            if not isinstance(mapping, yaml.MappingNode):
                problem = f"expected a mapping for merging, but found {type(mapping).__name__}"
                raise yaml.constructor.ConstructorError(None, None, problem, mapping.start_mark)
            if mapping in above:
                self._problem(mapping, join_key(key, "<<"), "recursive", "refers to itself.")
            else:
                merged |= self._entries(mapping, key, (*above, mapping))
        return merged

    def _scalar(self, node: yaml.ScalarNode, key: str, typed: Type | Below | None) -> Any:
        is_number = node.tag in (f"{TAG}int", f"{TAG}float", f"{TAG}bool")
        if is_number and not node.style and isinstance(typed, Type) and typed.plain is str:
            return node.value
        if node.tag == OBJECT:
            message = f"must be text, a number, true, false or null, not a {node.value}."
            return self._problem(node, key, "wrong-type", message)
        value = self.loader.construct_object(node)
        if not isinstance(value, str):
            return value
        if value == "???":
            return self._problem(node, key, "missing", "must be given.")
        self._refers |= "${" in value
        return value

    def _place(self, node: yaml.Node) -> SourceLocation:
        mark = node.start_mark if self._has_lines else None
        return SourceLocation(self._file, mark.line + 1 if mark is not None else None)

    def _twice(self, node: yaml.Node, key: str, first: SourceLocation, remedy: str = "") -> None:
        since = f", first in line {first.line}" if first.line else ""
        self._problem(node, key, "duplicate-key", f"is given twice{since}{remedy}.")

    def _problem(self, node: yaml.Node, key: str, code: Any, message: str) -> None:
        self._problems.append(Finding(key, None, code, message).at(self._place(node)))


def merge(base: Any, over: Any, whole: frozenset[str] = frozenset()) -> Any:
    """Return a copy of `base` with `over` merged in: mappings key by key; lists, scalars and keys in `whole` as a
    whole."""
    if not (isinstance(base, dict) and isinstance(over, dict)):
        return copy.deepcopy(over)
    merged = copy.deepcopy(base)
    for name, value in over.items():
        merged[name] = merge(base[name], value, whole) if name in base and name not in whole else copy.deepcopy(value)
    return merged


def inherited(above: Mapping[str, Any], own: Mapping[str, Any]) -> Tree:
    """Return what a stage inherits from the sections above: without the parts of another algorithm or another
    length."""
    base: Tree = copy.deepcopy(dict(above))
    algorithm, usual = own.get("algorithm"), base.get("algorithm")
    if isinstance(algorithm, dict) and isinstance(usual, dict):
        same = algorithm.get("algorithm_type") in (None, usual.get("algorithm_type", Config().algorithm.algorithm_type))
        base["algorithm"] = usual if same else {name: usual[name] for name in usual if name == "optimizer"}
    lengths = (("buffer", "total_steps"), ("buffer", "total_epochs"), ("trainer", "total_steps"))
    if any(isinstance(own.get(section), dict) and name in own[section] for section, name in lengths):
        for section, name in lengths:
            if isinstance(base.get(section), dict):
                base[section].pop(name, None)
    return base


def override(source: YamlSource, overrides: Sequence[str]) -> None:
    """Apply `key.path=value` in order. A list entry is named by its `name` or `stage_name`, or else its index.

    Within a list, or a key that a stage replaces as a whole, a stage's override starts from the inherited value. Raises
    ConfigError for invalid overrides.
    """
    problems: list[Finding] = []
    for text in overrides:
        key, equals, raw = text.partition("=")
        place = SourceLocation(f"override '{shortened(text)}'")
        parts = re.findall(r"[^.\[\]]+", key.strip())
        if not equals or not parts:
            finding = Finding("", shortened(text), "bad-override", "an override must read key.path=value.")
            problems.append(finding.at(place))
            continue
        try:
            _override(source, parts, raw, place.file)
        except (yaml.YAMLError, RecursionError):
            problems.append(Finding(key, raw, "unreadable", "the value is not valid YAML.").at(place))
        except LookupError as error:
            problems.append(Finding(key, raw, "bad-override", str(error.args[0])).at(place))
    if problems:
        raise ConfigError(problems)


def _override(source: YamlSource, parts: Sequence[str], raw: str, file: str | None) -> None:
    """Set one value. Raises YAMLError, or LookupError with a sentence."""
    node = _composed(raw)
    _inherit(source, parts)
    owner, path = _owner(source.tree, parts)
    key, walk = key_of(path), _Walk(file, has_lines=False)
    value = None if node is None else walk.value(node, key, type_at(Config, path))
    owner[path[-1]] = value
    new = walk.source({})
    kept = {known: place for known, place in source.places.items() if not is_below(known, key)}
    source.places = kept | {known: place for known, place in new.places.items() if known} | {key: SourceLocation(file)}
    # A key that the file gives twice stays wrong whatever is laid on it.
    stays = [
        problem for problem in source.problems if problem.code == "duplicate-key" or not is_within(problem.key, key)
    ]
    source.problems = stays + new.problems
    source.refers |= new.refers


def _composed(raw: str) -> yaml.Node | None:
    """Return the node of an override's value, None without one. Raises YAMLError.

    `#` does not start a comment here, because folder names may contain it.
    """
    node = yaml.compose(raw, Loader)
    if "#" in raw and (node is None or (isinstance(node, yaml.ScalarNode) and not node.style)):
        return yaml.compose(json.dumps(raw.strip(), ensure_ascii=False), Loader)
    return node


def _inherit(source: YamlSource, parts: Sequence[str]) -> None:
    """Copy into a stage the inherited values that an override below `parts` would otherwise replace.

    Raises LookupError if there is no such stage.
    """
    listed = source.tree.get("stages")
    if parts[0] != "stages" or len(parts) < 4 or not isinstance(listed, list):
        return
    above: Any = source.tree
    stage: Any = listed[_index(listed, parts[1], "stages")]
    for depth, part in enumerate(parts[2:-1], start=3):
        above = above.get(part)
        stage = stage.get(part) if isinstance(stage, dict) else stage
        if stage is None and (isinstance(above, list) or (part in WHOLE and isinstance(above, dict))):
            owner, path = _owner(source.tree, parts[:depth])
            owner[path[-1]] = copy.deepcopy(above)
            old, new = ".".join(parts[2:depth]), key_of(path)
            inherited = {known: place for known, place in source.places.items() if is_within(known, old)}
            source.places |= {new + known[len(old) :]: place for known, place in inherited.items()}
            return
        if not isinstance(above, dict):
            return


def _owner(tree: Tree, parts: Sequence[str]) -> tuple[Any, tuple[str | int, ...]]:
    """Return the section or list that contains a key, creating it if needed, and the key's path.

    Raises LookupError with a sentence.
    """
    node: Any = tree
    path: tuple[str | int, ...] = ()
    for depth, part in enumerate(parts):
        if not isinstance(node, dict | list):
            raise LookupError(f"{key_of(path)} is a single value, it has no key '{part}'.")
        name = _index(node, part, key_of(path)) if isinstance(node, list) else part
        path = (*path, name)
        if depth < len(parts) - 1:
            if isinstance(node, dict) and node.get(name) is None:
                node[name] = {}
            node = node[name]
    return node, path


def _index(items: list[Any], part: str, path: str) -> int:
    """Return the position of a list entry, given its name (which may be a number) or else its index."""
    for index, item in enumerate(items):
        names = (item.get("name"), item.get("stage_name")) if isinstance(item, dict) else ()
        if part in [str(name) for name in names if name is not None]:
            return index
    if part.isdigit() and int(part) < len(items):
        return int(part)
    raise LookupError(f"{path} has {len(items)} entries and none is called '{part}'.")


def join_key(key: str, part: str | int) -> str:
    if isinstance(part, int):
        return f"{key}[{part}]"
    return f"{key}.{part}" if key else part


def key_of(path: Sequence[str | int], above: str = "") -> str:
    """`("a", 0, "b")` → `a[0].b`, below the key `above` if given."""
    for part in path:
        above = join_key(above, part)
    return above


def first_line(error: Exception) -> str:
    """Return the first line of an error's text, without a full stop."""
    return str(error).partition("\n")[0].rstrip(".")


def _unreadable(message: str, file: str, line: int | None = None) -> ConfigError:
    return ConfigError([Finding("", None, "unreadable", message).at(SourceLocation(file, line))])
