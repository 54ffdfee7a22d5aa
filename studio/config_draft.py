"""A configuration file that is edited: its YAML text, its problems or its plan."""

from __future__ import annotations

import os
import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from io import StringIO
from itertools import pairwise
from pathlib import Path
from typing import Any

from ruamel.yaml import YAML
from ruamel.yaml.comments import CommentedMap, CommentedSeq

from trinity_core.base.files import expanded, write_atomically
from trinity_core.config import Config, ConfigError, Finding, config_from_text
from trinity_core.config.findings import value_at
from trinity_core.config.source import parse
from trinity_core.run.preflight.stage_plan import plan_text, plans_with_pace

LISTED_DEPTH = 3
MOST_LISTED = 300
UNLISTED = ("prefect.yaml", "checkpoints", "runs", "node_modules")
"""Files that are not configurations, and folders that contain none."""
INDENTED_LIST = re.compile(r"^( *)[^\s#-][^\n]*:[^\n]*\n\1  - ", re.MULTILINE)
"""Matches list entries that are indented more than their key."""


@dataclass(frozen=True, slots=True)
class ConfigDraft:
    """A configuration file. Each change is written at once, into the text that the file has by then, so that several
    tabs and an editor may work on one file. Comments, order and quotes are preserved where nothing changes."""

    file: Path

    @property
    def text(self) -> str:
        """The file's content; empty for a new file. Raises OSError, UnicodeDecodeError."""
        return self.file.read_text(encoding="utf-8") if self.file.exists() else ""

    def tree(self) -> Mapping[str, Any]:
        """Return the keys as a tree of plain values. Raises ConfigError if the text is not YAML with keys."""
        return parse(text, self.file.name).valid_tree() if (text := self.text).strip() else {}

    def value(self, key: str) -> Any:
        """Return the value at a dotted key, None if not given. Raises ConfigError as `tree`."""
        return value_at(self.tree(), key)

    def change(self, key: str, value: Any) -> None:
        """Write `value` at a dotted key; None removes the key. Raises OSError, and as `changed`."""
        self.write(changed(self.text, key, value))

    def write(self, text: str) -> None:
        """Replace the text. Raises OSError."""
        self.file.parent.mkdir(parents=True, exist_ok=True)
        write_atomically(self.file, text.encode())


def changed(text: str, key: str, value: Any) -> str:
    """Return YAML text with `value` at a dotted key; None removes the key. Missing sections are created.

    Comments, order and quotes of everything else are preserved. A number in the key is a list index, at most one past
    the end. Raises ruamel.yaml.error.YAMLError if the text is not YAML, ValueError if a section on the way holds no
    keys.
    """
    yaml = YAML()
    yaml.preserve_quotes = True
    yaml.width = 1 << 20
    if INDENTED_LIST.search(text):
        yaml.indent(mapping=2, sequence=4, offset=2)
    tree = yaml.load(text)
    tree = CommentedMap() if tree is None else tree
    section, name = tree, key.rpartition(".")[2]
    for part, following in pairwise(key.split(".")):
        if (node := value_at(section, [part])) is None:
            if value is None:
                return text
            node = CommentedSeq() if following.isdigit() else CommentedMap()
            if isinstance(section, CommentedSeq):
                section.append(node)
            else:
                section[part] = node
        if not isinstance(node, CommentedSeq if following.isdigit() else CommentedMap):
            raise ValueError(f"{key}: '{part}' holds no keys in this file.")
        section = node
    if value is None:
        section.pop(name, None)
    else:
        section[name] = value
    out = StringIO()
    yaml.dump(tree, out)
    return out.getvalue()


def moved(text: str, source: Path, target: Path) -> str:
    """Return the text of a file in folder `source` for one in `target`, so that a `plugin_dir` next to it is still
    found."""
    folder = value_at(parse(text).valid_tree(), "plugin_dir")
    if source == target or not isinstance(folder, str) or expanded(folder).is_dir() or not (source / folder).is_dir():
        return text
    beside = (source / folder).resolve()
    relative = os.path.relpath(beside, target.resolve())
    # A relative path is looked up in the current directory first.
    first = expanded(relative).resolve()
    is_near = beside.is_relative_to(Path.cwd()) and (first == beside or not first.is_dir())
    return changed(text, "plugin_dir", relative if is_near else str(beside))


def yaml_files(root: Path) -> list[Path]:
    """Return YAML files below a folder, as paths relative to it, those of the folder itself first."""

    def is_listed(name: str) -> bool:
        return not name.startswith(".") and name not in UNLISTED

    files: list[Path] = []
    for folder, below, names in os.walk(root):
        here = Path(folder).relative_to(root)
        below[:] = filter(is_listed, below) if len(here.parts) < LISTED_DEPTH else ()
        files += [here / name for name in filter(is_listed, names) if name.endswith((".yaml", ".yml"))]
    return sorted(files, key=lambda path: (len(path.parts), path))[:MOST_LISTED]


@dataclass(frozen=True, slots=True)
class CheckedDraft:
    """Either all problems, or the configuration with its plan."""

    problems: list[Finding]
    config: Config | None = None
    plan: str = ""
    unplaced: str = ""
    """Why this machine cannot run it, or ""."""


def checked(text: str, file: Path | None = None) -> CheckedDraft:
    """Check a configuration's YAML text, as content of `file`, without loading modules of its `plugin_dir`."""
    try:
        config = config_from_text(text, name=str(file or "<text>"))
    except ConfigError as error:
        return CheckedDraft(error.problems)
    plans = plans_with_pace(config)
    unplaced = " ".join(dict.fromkeys(plan.unplaced for plan in plans if plan.unplaced))
    return CheckedDraft([], config, plan_text(plans), unplaced)


def by_field(problems: Iterable[Finding]) -> dict[str, list[Finding]]:
    """Return key → its problems, with list indices as `.0`."""
    problems_by_field: dict[str, list[Finding]] = {}
    for problem in problems:
        problems_by_field.setdefault(re.sub(r"\[(\d+)\]", r".\1", problem.key), []).append(problem)
    return problems_by_field
