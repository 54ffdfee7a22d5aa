"""Find settings of the schema that no code reads, without running it.

    python benchmarks/setting_reads.py

Prints each setting that is neither read nor listed below with a reason, each listed setting that is read after all, and
each of the trainer's settings that the trainer does not read. The exit code is 1 if there are any.

An attribute access counts for a section of the schema if its owner is known to be that section, from annotations
followed through assignments, loops and calls. If the owner is unknown, the access counts for a setting only if no other
section has one of the same name.
"""

from __future__ import annotations

import ast
import sys
from collections import defaultdict
from collections.abc import Iterable, Iterator, Sequence
from inspect import get_annotations
from pathlib import Path
from typing import NamedTuple

from measured import ROOT
from pydantic import BaseModel

from trinity_core.config.fields import settings, types_of
from trinity_core.config.schema import Config
from trinity_core.config.training import CriticSettings, TrainSettings

CONFIG = ROOT / "trinity_core/config"
SAYING = ("schema", "foreign", "import_verl", "rules")
"""Folders that declare, rename, import or check settings."""
CHECKING = ("notices", "reference", "json_schema")
"""Files of `config` that do."""

ENGINES = ("RolloutModelConfig", "AuxiliaryModelConfig")
OTHERWISE_READ = (
    ("inference/settings.py takes them over by name", ENGINES, "gpu_memory_utilization kv_cache_gib enforce_eager"),
    ("inference/settings.py takes it over by name", ENGINES, "enable_prefix_caching"),
    ("both of its values mean the same here, as its doc says", ENGINES, "engine_type"),
    ("both of its values mean the same here, as its doc says", ["TrainerConfig"], "trainer_type"),
    ("config/load.py puts the file in its place", ["TrainerConfig"], "trainer_config_path"),
    ("the schema's property weight_points reads it", ["TasksetConfig"], "weight_by_step"),
    ("config/load.py merges the stage's sections into the run's", ["StageConfig"],
     "mode algorithm model cluster buffer explorer trainer synchronizer data_processor"),
    ("a notice says that it has no effect", ["AuxiliaryModelConfig"], "enable_history"),
    ("a notice says that it has no effect", ["TrainerConfig"], "ulysses_sequence_parallel_size"),
    ("a notice says that it has no effect", ["TaskPipelineConfig"], "num_process"),
)  # fmt: skip
"""Why, sections, settings: not read as an attribute of their section."""

GIVE_BACK = {"with_values", "as_written", "model_copy", "model_validate", "values", "items"}
"""Methods that return what they are called on, or what it holds."""
HAND_ON = {"sorted", "list", "tuple", "reversed", "enumerate", "zip", "chain"}
"""Functions that return what they are given, or what it holds."""


class Kind(NamedTuple):
    """What an expression is, holds or lists: a section."""

    section: str
    exact: bool
    """False if it may be a subclass as well: known from an annotation rather than from the place in the schema."""


class Read(NamedTuple):
    """A setting."""

    section: str
    name: str


def main() -> None:
    read = setting_reads(running_files())
    unread = {
        Read(name, setting)
        for name, cls in SCHEMA.items()
        for setting in types_of(cls).keys() - _empty_sections(cls)
        if Read(name, setting) not in read
    }
    listed = {Read(name, setting) for _, names, words in OTHERWISE_READ for name in names for setting in words.split()}
    for setting in sorted(unread - listed):
        print(f"{setting.section}.{setting.name} is read nowhere")
    for setting in sorted(listed - unread):
        print(f"{setting.section}.{setting.name} is read, or gone: take it off the list in {Path(__file__).name}")
    trainer = _attributes(*(ROOT / "trinity_core" / name for name in ("training", "runtime")))
    vain = [f"{cls.__name__}.{name}" for cls in TRAINER for name in cls.model_fields if name not in trainer]
    for name in vain:
        print(f"{name} is read by no trainer")
    print(f"{len(read)} settings are read, {len(unread & listed)} are listed with a reason")
    sys.exit(unread != listed or bool(vain))


def running_files() -> list[Path]:
    """The source but what only declares or checks settings."""
    files = [path for top in ("trinity_core", "flows", "tasks") for path in sorted((ROOT / top).rglob("*.py"))]
    return [
        path
        for path in files
        if path.parent.name not in SAYING and not (path.parent == CONFIG and path.stem in CHECKING)
    ]


def _attributes(*folders: Path) -> set[str]:
    """The names of all attributes that the files of these folders look up."""
    trees = [ast.parse(path.read_text()) for folder in folders for path in folder.rglob("*.py")]
    return {node.attr for tree in trees for node in ast.walk(tree) if isinstance(node, ast.Attribute)}


def _empty_sections(section: type[BaseModel]) -> set[str]:
    """The sections without settings of their own, which hold veRL's spellings alone."""
    return {setting.name for setting in settings(section) if setting.section and not types_of(setting.section)}


def schema_sections(cls: type[BaseModel] = Config) -> Iterator[type[BaseModel]]:
    """Every class of the schema."""
    yield cls
    for setting in settings(cls):
        if setting.section is not None:
            yield from schema_sections(setting.section)


SCHEMA = {cls.__name__: cls for cls in schema_sections()}
TRAINER = (TrainSettings, CriticSettings)
SECTIONS = SCHEMA | {cls.__name__: cls for cls in TRAINER}
"""Class by name; the last two take keys of the schema over under the same names."""
OWNERS: dict[str, list[str]] = defaultdict(list)
"""The sections that have a setting of a name."""
for _section, _cls in SCHEMA.items():
    for _name in types_of(_cls):
        OWNERS[_name].append(_section)


def setting_reads(files: Iterable[Path]) -> set[Read]:
    """Every setting that one of these files reads."""
    trees = [ast.parse(file.read_text(), filename=str(file)) for file in files]
    members = _members(trees)
    found: set[Read] = set()
    for tree in trees:
        _Reader(members, found).visit(tree)
    return found


def _members(trees: Iterable[ast.Module]) -> dict[str, Kind]:
    """What functions return and attributes hold, by name, where all of one name agree."""
    known: dict[str, set[Kind | None]] = defaultdict(set)
    for node in (node for tree in trees for node in ast.walk(tree)):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            known[node.name].add(_annotated(node.returns))
        elif isinstance(node, ast.AnnAssign) and isinstance(node.target, ast.Name):
            known[node.target.id].add(_annotated(node.annotation))
    return {name: kind for name, kinds in known.items() if len(kinds) == 1 for kind in kinds if kind}


def _annotated(annotation: ast.expr | None) -> Kind | None:
    """The one section in an annotation, such as that of `list[TasksetConfig] | None`."""
    nodes = list(ast.walk(annotation)) if annotation is not None else []
    words = {node.id for node in nodes if isinstance(node, ast.Name)}
    words |= {node.attr for node in nodes if isinstance(node, ast.Attribute)}
    known = words & SECTIONS.keys()
    return Kind(known.pop(), False) if len(known) == 1 else None


def _inherits(cls: type[BaseModel], name: str) -> type:
    """The class that declares a setting."""
    return next(base for base in cls.__mro__ if name in get_annotations(base))


def _named(name: str) -> Kind | None:
    """The section that is under a key, wherever in the schema that key is."""
    sections = {section for owner in OWNERS.get(name, ()) if (section := types_of(SCHEMA[owner])[name].section)}
    return Kind(sections.pop().__name__, True) if len(sections) == 1 else None


def _owners(kind: Kind | None, name: str) -> Iterator[str]:
    """The sections whose setting an attribute is."""
    if kind is None:
        if len(OWNERS.get(name, ())) == 1:
            yield from OWNERS[name]
        return
    cls = SECTIONS[kind.section]
    if name not in types_of(cls):
        return
    if kind.section not in SCHEMA:
        yield from (owner for owner in OWNERS.get(name, ()) if _inherits(SCHEMA[owner], name) is _inherits(cls, name))
    elif kind.exact:
        yield kind.section
    else:
        yield from (owner for owner in OWNERS[name] if issubclass(SCHEMA[owner], cls))


class _Reader(ast.NodeVisitor):
    """Walks a file, with what its names stand for."""

    def __init__(self, members: dict[str, Kind], found: set[Read]) -> None:
        self.members, self.found = members, found
        self.names: dict[str, Kind | None] = {}
        self.fields: dict[str, Kind | None] = {}

    def visit_ClassDef(self, node: ast.ClassDef) -> None:
        before, self.fields = self.fields, {}
        self.generic_visit(node)
        self.fields = before

    def visit_FunctionDef(self, node: ast.FunctionDef | ast.AsyncFunctionDef) -> None:
        before, signature = self.names, node.args
        arguments = (*signature.posonlyargs, *signature.args, *signature.kwonlyargs)
        self.names = before | {argument.arg: _annotated(argument.annotation) for argument in arguments}
        for statement in node.body:
            self.visit(statement)
        self.names = before

    visit_AsyncFunctionDef = visit_FunctionDef

    def visit_Assign(self, node: ast.Assign) -> None:
        for target in node.targets:
            self._bind(target, node.value)
        self.generic_visit(node)

    def visit_AnnAssign(self, node: ast.AnnAssign) -> None:
        if isinstance(node.target, ast.Name) and (kind := _annotated(node.annotation)):
            self.names[node.target.id] = self.fields[node.target.id] = kind
        self.generic_visit(node)

    def visit_NamedExpr(self, node: ast.NamedExpr) -> None:
        self._bind(node.target, node.value)
        self.generic_visit(node)

    def visit_For(self, node: ast.For) -> None:
        self._bind(node.target, node.iter)
        self.generic_visit(node)

    def _comprehension(self, node: ast.ListComp | ast.SetComp | ast.GeneratorExp | ast.DictComp) -> None:
        for generator in node.generators:
            self._bind(generator.target, generator.iter)
        self.generic_visit(node)

    visit_ListComp = visit_SetComp = visit_GeneratorExp = visit_DictComp = _comprehension

    def visit_Attribute(self, node: ast.Attribute) -> None:
        self.found |= {Read(owner, node.attr) for owner in _owners(self._kind(node.value), node.attr)}
        self.generic_visit(node)

    def _bind(self, target: ast.expr, value: ast.expr) -> None:
        if isinstance(target, ast.Name):
            self.names[target.id] = self._kind(value) or self.names.get(target.id)
        elif isinstance(target, ast.Attribute):
            self.fields[target.attr] = self._kind(value)
        elif isinstance(target, ast.Tuple):
            parts = value.elts if isinstance(value, ast.Tuple) and len(value.elts) == len(target.elts) else None
            zipped = value.args if isinstance(value, ast.Call) and len(value.args) == len(target.elts) else None
            for place, part in enumerate(target.elts):
                self._bind(part, (parts or zipped or [value] * len(target.elts))[place])

    def _first(self, nodes: Sequence[ast.expr]) -> Kind | None:
        return next((kind for node in nodes if (kind := self._kind(node))), None)

    def _kind(self, node: ast.expr) -> Kind | None:
        match node:
            case ast.Name(id=name):
                return self.names.get(name)
            case ast.Attribute(value=owner, attr=name):
                kind = self._kind(owner)
                if kind and name in types_of(SECTIONS[kind.section]):
                    section = types_of(SECTIONS[kind.section])[name].section
                    return Kind(section.__name__, True) if section else None
                own = self.fields.get(name) if isinstance(owner, ast.Name) and owner.id == "self" else None
                return own or self.members.get(name) or _named(name)
            case ast.Call(func=ast.Attribute(value=owner, attr=name)) if name in GIVE_BACK:
                return self._kind(owner)
            case ast.Call(func=ast.Name(id=name) | ast.Attribute(attr=name), args=given):
                if name in SECTIONS:
                    return Kind(name, True)
                return self._first(given) if name in HAND_ON else self.members.get(name)
            case ast.Subscript(value=inner) | ast.Starred(value=inner) | ast.Await(value=inner):
                return self._kind(inner)
            case ast.BoolOp(values=parts) | ast.Tuple(elts=parts) | ast.List(elts=parts):
                return self._first(parts)
            case ast.IfExp(body=one, orelse=other) | ast.BinOp(left=one, right=other):
                return self._first([one, other])
            case ast.ListComp(elt=inner) | ast.GeneratorExp(elt=inner) | ast.NamedExpr(value=inner):
                return self._kind(inner)
        return None


if __name__ == "__main__":
    main()
