"""A YAML file with its overrides as a tree of plain values, with the location of every key.

One walk over YAML's nodes gives the values, the locations and the problems. It follows the schema, so that settings
of type text keep their notation: `name: 1.10` is called 1.10, and an environment variable keeps its leading zeros.
"""

from __future__ import annotations

import copy
import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import yaml
from pydantic import BaseModel

from trinity_core.config.fields import Type, type_at, type_below
from trinity_core.config.findings import (
    Code,
    ConfigError,
    Finding,
    SourceLocation,
    is_below,
    is_within,
    value_at,
    without,
)
from trinity_core.config.schema import Config
from trinity_core.config.yaml_text import Loader, shortened

Tree = dict[str, Any]

TAG = "tag:yaml.org,2002:"
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
    except IsADirectoryError:
        files = ", ".join(str(file) for file in sorted(path.glob("*.y*ml"))[:3]) or "none is in it"
        raise _unreadable(f"is a folder: give a YAML file ({files}).", str(path)) from None
    except (OSError, UnicodeDecodeError) as error:
        raise _unreadable(f"cannot be read: {error}.", str(path)) from None
    return parse(text, str(path), section)


def parse(text: str, name: str = "<text>", section: type[BaseModel] | None = Config) -> YamlSource:
    """Parse YAML text; `name` is shown in problems. Raises ConfigError."""
    walk = _Walk(name)
    try:
        walk.loader = loader = Loader(text)
        node = loader.get_single_node()
        tree = {} if node is None else walk.value(node, "", None if section is None else Type(section, (), False))
    except yaml.MarkedYAMLError as error:
        # An open quote, or a key without a colon, is noticed later than where it begins.
        begins = error.context_mark if (error.context or "").startswith("while scanning") else None
        mark = begins or error.problem_mark or error.context_mark
        fault = " ".join(filter(None, (error.context, error.problem)))
        raise _unreadable(f"is not valid YAML: {fault}.", name, mark.line + 1 if mark else None) from None
    except (yaml.YAMLError, ValueError, LookupError, RecursionError) as error:  # a text that does not fit its tag
        raise _unreadable(f"is not valid YAML: {first_line(error)}.", name) from None
    if not isinstance(tree, dict):
        raise _unreadable("must be a mapping of sections.", name)
    return walk.source(tree)


def from_values(tree: Mapping[str, Any]) -> YamlSource:
    """Return a source of Python values, taken unchanged."""
    walk = _Walk(None)
    return walk.source(walk.plain(tree, ""))


class _Walk:
    """Walks over the nodes of a file or an override, or over Python values."""

    def __init__(self, file: str | None, has_lines: bool = True) -> None:
        self._file, self._has_lines = file, has_lines
        self._places = {"": SourceLocation(file)}
        self._problems: list[Finding] = []
        self._merged: set[yaml.Node] = set()
        self._refers = False
        self.loader = Loader("")

    def source(self, tree: Tree) -> YamlSource:
        """Return the tree with everything collected during the walk."""
        return YamlSource(tree, self._places, self._problems, self._refers)

    def value(self, node: yaml.Node, key: str, typed: Type | None) -> Any:
        """Return the value of a node at a key. Unusable values are reported and become None.

        Raises YAMLError, and ValueError or LookupError for a text that does not fit its tag.
        """
        if isinstance(node, yaml.ScalarNode):
            keeps_text = typed is not None and typed.plain is str and _plain_text(node)
            return node.value if keeps_text else self._checked(self.loader.construct_object(node), key, node)
        if isinstance(node, yaml.MappingNode) and node.tag == f"{TAG}map":
            self._merge(node, key)
            entries: list[tuple[str | int, yaml.Node, yaml.Node]] = [
                (name.value or "null", name, value) for name, value in node.value
            ]
        elif isinstance(node, yaml.SequenceNode) and node.tag == f"{TAG}seq":
            entries = [(index, item, item) for index, item in enumerate(node.value)]
        else:
            problem = f"{node.tag.removeprefix(TAG)} is no kind of value here"
            raise yaml.constructor.ConstructorError(None, None, problem, node.start_mark)
        values = {}
        for name, name_node, value in entries:
            path = join_key(key, name)
            self._places[path] = replace(self._place(name_node), text=_plain_text(value), variable=_variable(value))
            values[name] = self.value(value, path, type_below(typed, name))
        return values if isinstance(node, yaml.MappingNode) else list(values.values())

    def plain(self, value: Any, key: str) -> Any:
        """Return a Python value as YAML has it: a subtype of text or number, such as NumPy's, as the plain value."""
        self._places.setdefault(key, SourceLocation(self._file))
        if isinstance(value, Mapping):
            parts = {"null" if name is None else str(name): part for name, part in value.items()}
            return {name: self.plain(part, join_key(key, name)) for name, part in parts.items()}
        if isinstance(value, list | tuple):
            return [self.plain(part, join_key(key, index)) for index, part in enumerate(value)]
        if value is None or isinstance(value, bool):
            return value
        if isinstance(value, str):
            return self._checked(str.__str__(value), key)
        for kind in (int, float):
            if isinstance(value, kind):
                return kind(value)
        message = f"must be text, a number, true, false or null, not a {type(value).__name__}."
        return self._problem(key, "wrong-type", message)

    def _merge(self, node: yaml.MappingNode, key: str) -> None:
        """Put the entries that `<<` merges into a mapping, after a look for keys that it gives twice itself."""
        if node in self._merged:
            return
        self._merged.add(node)
        first: dict[str, yaml.Node] = {}
        for name, _ in node.value:
            if not isinstance(name, yaml.ScalarNode):
                raise yaml.constructor.ConstructorError(None, None, "found unhashable key", name.start_mark)
            if name.value in first:
                line = self._place(first[name.value]).line
                since = f", first in line {line}" if line else ""
                self._problem(join_key(key, name.value), "duplicate-key", f"is given twice{since}.", name)
            first[name.value] = name
        self.loader.flatten_mapping(node)

    def _checked(self, value: Any, key: str, node: yaml.Node | None = None) -> Any:
        if value == "???":
            return self._problem(key, "missing", "must be given.", node)
        if isinstance(value, str) and "${" in value:
            from omegaconf import OmegaConf
            from omegaconf.errors import OmegaConfBaseException

            self._refers = True
            try:
                OmegaConf.create({"_": value})
            except OmegaConfBaseException as error:
                return self._problem(key, "unresolved", f"cannot be read: {first_line(error)}.", node)
        return value

    def _place(self, node: yaml.Node | None) -> SourceLocation:
        has_line = self._has_lines and node is not None and node.start_mark is not None
        return SourceLocation(self._file, node.start_mark.line + 1 if has_line and node is not None else None)

    def _problem(self, key: str, code: Code, message: str, node: yaml.Node | None = None) -> None:
        self._problems.append(Finding(key, None, code, message).at(self._place(node)))


def nested(key: str, value: Any) -> Any:
    """Return `{"a": {"b": value}}` for the key `a.b`."""
    for part in reversed(key.split(".")):
        value = {part: value}
    return value


def merge(base: Any, over: Any, whole: frozenset[str] = frozenset()) -> Any:
    """Return a copy of `base` with `over` merged in: mappings key by key; lists, scalars and keys in `whole` as a
    whole."""
    if not (isinstance(base, dict) and isinstance(over, dict)):
        return copy.deepcopy(over)
    merged = copy.deepcopy(base)
    for name, value in over.items():
        merged[name] = merge(base[name], value, whole) if name in base and name not in whole else copy.deepcopy(value)
    return merged


def inherited(above: Mapping[str, Any], of_stage: Mapping[str, Any]) -> Tree:
    """Return what a stage inherits from the sections above: without the parts of another algorithm or another
    length."""
    base: Tree = copy.deepcopy(dict(above))
    algorithm, usual = of_stage.get("algorithm"), base.get("algorithm")
    if isinstance(algorithm, dict) and isinstance(usual, dict):
        same = algorithm.get("algorithm_type") in (None, usual.get("algorithm_type", Config().algorithm.algorithm_type))
        base["algorithm"] = usual if same else {name: usual[name] for name in usual if name == "optimizer"}
    lengths = (("buffer", "total_steps"), ("buffer", "total_epochs"))
    if any(isinstance(of_stage.get(section), dict) and name in of_stage[section] for section, name in lengths):
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
        parts = re.findall(r"[^.\[\]]+", key.strip())
        finding = Finding("", shortened(text), "bad-override", "an override must read key.path=value.")
        file = f"override '{shortened(text)}'"
        try:
            if equals and parts:
                _override(source, parts, raw, file)
                continue
        except (yaml.YAMLError, ValueError, RecursionError):
            finding = Finding(key, raw, "unreadable", "the value is not valid YAML.")
        except LookupError as error:
            finding = Finding(key, raw, "bad-override", str(error.args[0]))
        problems.append(finding.at(SourceLocation(file)))
    if problems:
        raise ConfigError(problems)


def _override(source: YamlSource, parts: Sequence[str], raw: str, file: str) -> None:
    """Set one value. Raises YAMLError, or LookupError with a sentence."""
    node = _composed(raw)
    _inherit(source, parts)
    owner, path = _owner(source.tree, parts)
    key, walk = key_of(path), _Walk(file, has_lines=False)
    owner[path[-1]] = None if node is None else walk.value(node, key, type_at(Config, path))
    new = walk.source({})
    others = {name: location for name, location in source.places.items() if not is_below(name, key)}
    below = {name: location for name, location in new.places.items() if name}
    source.places = others | below | {key: SourceLocation(file, text=_plain_text(node))}
    # A key that the file gives twice stays wrong whatever is laid on it.
    source.problems = without(source.problems, key) + new.problems
    source.refers |= new.refers


def _composed(raw: str) -> yaml.Node | None:
    """Return the node of an override's value, None without one. Raises YAMLError.

    `#` does not start a comment here, because folder names may contain it.
    """
    node = yaml.compose(raw, Loader)
    if "#" in raw and (node is None or (isinstance(node, yaml.ScalarNode) and not node.style)):
        return yaml.compose(json.dumps(raw.strip(), ensure_ascii=False), Loader)
    return node


def _plain_text(node: yaml.Node | None) -> str:
    """Return the text of an unquoted number, true or false; "" for other nodes."""
    if not isinstance(node, yaml.ScalarNode) or node.style:
        return ""
    return node.value if node.tag in (f"{TAG}int", f"{TAG}float", f"{TAG}bool") else ""


def _variable(node: yaml.Node) -> str:
    """Return the environment variable that a text begins with, as in `${oc.env:NAME,default}`; "" without one."""
    match = re.match(r"\$\{oc\.env:\s*(\w+)", node.value) if isinstance(node, yaml.ScalarNode) else None
    return match[1] if match else ""


def _inherit(source: YamlSource, parts: Sequence[str]) -> None:
    """Copy into a stage the inherited list, or section of `WHOLE`, that an override below `parts` would otherwise
    replace. Raises LookupError if there is no such stage."""
    if parts[0] != "stages" or not isinstance(source.tree.get("stages"), list):
        return
    stage = source.tree["stages"][_index(source.tree["stages"], parts[1], "stages")] if len(parts) > 3 else None
    for depth in range(3, len(parts)):
        above, part = value_at(source.tree, parts[2:depth]), parts[depth - 1]
        if isinstance(above, list) or (part in WHOLE and isinstance(above, dict)):
            if value_at(stage, parts[2:depth]) is None:
                owner, path = _owner(source.tree, parts[:depth])
                owner[path[-1]] = copy.deepcopy(above)
                old, new = ".".join(parts[2:depth]), key_of(path)
                inherited = {name: location for name, location in source.places.items() if is_within(name, old)}
                source.places |= {new + name[len(old) :]: location for name, location in inherited.items()}
            return


def _owner(tree: Tree, parts: Sequence[str]) -> tuple[Any, tuple[str | int, ...]]:
    """Return the section or list that contains a key, creating it if needed, and the key's path.

    Raises LookupError with a sentence.
    """
    node: Any = tree
    path: tuple[str | int, ...] = ()
    for part in parts:
        if path:  # of what contains this part
            if isinstance(node, dict) and node.get(path[-1]) is None:
                typed = type_at(Config, path)
                node[path[-1]] = [] if typed is not None and typed.entry_key == "[i]" else {}
            node = node[path[-1]]
        if not isinstance(node, dict | list):
            raise LookupError(f"{key_of(path)} is a single value, it has no key '{part}'.")
        path = (*path, _index(node, part, key_of(path)) if isinstance(node, list) else part)
    return node, path


def _index(items: list[Any], part: str, path: str) -> int:
    """Return the position of a list entry, given its name (which may be a number) or else its index."""
    for index, item in enumerate(items):
        if part in [str(value_at(item, name)) for name in ("name", "stage_name")]:
            return index
    if part.isdigit() and int(part) < len(items):
        return int(part)
    whole = "" if items else f" Give the whole list: {path}=[…]."
    raise LookupError(f"{path} has {len(items)} entries and none is called '{part}'.{whole}")


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
