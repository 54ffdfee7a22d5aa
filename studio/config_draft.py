"""A configuration being edited: its YAML text, its file, a copy that survives the page, its problems or its plan."""

from __future__ import annotations

import os
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from hashlib import sha256
from io import StringIO
from pathlib import Path
from threading import RLock
from typing import Any
from weakref import WeakValueDictionary

from ruamel.yaml import YAML
from ruamel.yaml.comments import CommentedMap, CommentedSeq

from trinity_core.base.files import expanded, read_json, write_atomically, write_json
from trinity_core.config import Config, ConfigError, Problem, config_from_text
from trinity_core.config.findings import value_at
from trinity_core.config.source import parse
from trinity_core.hosting.placement import flow_of
from trinity_core.run.preflight.stage_plan import plan_text, plans_with_pace

LISTED_DEPTH = 3
MOST_LISTED = 300
MOST_NAMED = 10
UNLISTED = ("prefect.yaml", "checkpoints", "runs", "node_modules")
"""Files that are not configurations, and folders that contain none."""
INDENTED_LIST = re.compile(r"^( *)[^\s#-][^\n]*:[^\n]*\n\1  - ", re.MULTILINE)
"""Matches list entries that are indented more than their key."""


@dataclass(slots=True, weakref_slot=True)
class ConfigDraft:
    """The text of a configuration. Comments, order and quotes are preserved where nothing changes.

    All tabs that show a file share one draft: each edit applies to the current text.
    """

    file: Path
    text: str = ""
    saved: str = ""
    """The file's content when it was last opened or saved."""
    drafts: Path | None = None
    """Folder of copies of unsaved drafts, which survive a reload of the page and a restart of Studio."""
    unkept: str = ""

    @classmethod
    def opened(cls, file: Path, drafts: Path | None = None) -> ConfigDraft:
        """Return the draft of a file with its unsaved changes; empty for a new file. Raises OSError,
        UnicodeDecodeError."""
        with EDITING:
            draft = OPEN.get(file)
            if draft is None or draft.is_saved:
                text = _read(file)
                draft = OPEN[file] = draft or cls(file, drafts=drafts)
                draft.text = draft.saved = text
                if (copy := draft._copy) and (copied := read_json(copy)):
                    draft.text, draft.saved = copied["text"], copied["saved"]
            return draft

    @property
    def is_saved(self) -> bool:
        return self.text == self.saved

    def tree(self) -> Mapping[str, Any]:
        """Return the keys as a tree of plain values. Raises ConfigError if the text is not YAML with keys."""
        return parse(self.text, self.file.name).valid_tree() if self.text.strip() else {}

    def value(self, key: str) -> Any:
        """Return the value at a dotted key, None if not given. Raises ConfigError as `tree`."""
        return value_at(self.tree(), key)

    def change(self, key: str, value: Any) -> None:
        """Write `value` at a dotted key; None removes the key. Raises as `changed`."""
        with EDITING:
            self.edit(self.text, changed(self.text, key, value))

    def edit(self, base: str, text: str) -> bool:
        """Replace `base` by `text` and keep a copy; return False if the draft's text is no longer `base`."""
        with EDITING:
            if self.text != base:
                return False
            self.text = text
            self._keep()
            return True

    def objections(self, file: Path) -> list[str]:
        """Return what a person should confirm before `file` is overwritten, as sentences; empty if nothing is lost."""
        is_edited = False
        try:
            there = _read(file)
            is_edited = file != self.file and not ConfigDraft.opened(file, self.drafts).is_saved
        except (OSError, UnicodeDecodeError):
            there = ""
        if is_edited:
            return [f"`{file.name}` has unsaved changes, which will be lost."]
        if not there or there == self.text:
            return []
        if file != self.file:
            return [f"`{file.name}` already exists and will be overwritten."]
        complaints = [] if there == self.saved else [f"`{file.name}` was changed by another program meanwhile."]
        if lost := self.lost_keys(there):
            more = f" and {len(lost) - MOST_NAMED} more" if len(lost) > MOST_NAMED else ""
            names = ", ".join(f"`{key}`" for key in lost[:MOST_NAMED])
            complaints.append(f"These keys of `{file.name}` will be lost: {names}{more}.")
        return complaints

    def lost_keys(self, there: str) -> Sequence[str]:
        """Return the dotted keys of another text that are missing here; none if that text is not YAML."""
        try:
            keys_there = ConfigDraft(self.file, there).tree()
        except ConfigError:
            return []
        try:
            remaining = set(_keys(self.tree()))
        except ConfigError:
            remaining = set()
        return [key for key in _keys(keys_there) if key not in remaining]

    def save(self, shown: str | None = None) -> bool:
        """Write the file; return False, without writing, if `shown` is given and is not the draft's text. Raises
        OSError."""
        with EDITING:
            if shown not in (None, self.text):
                return False
            self.file.parent.mkdir(parents=True, exist_ok=True)
            write_atomically(self.file, self.text.encode())
            self.saved = self.text
            self._keep()
            return True

    def save_as(self, file: Path) -> ConfigDraft:
        """Write the changes to another file and return its draft, which still finds the same plugins. Raises
        OSError."""
        with EDITING:
            other = ConfigDraft.opened(file, self.drafts)
            other.text = moved(self.text, self.file.parent, file.parent)
            other.save()
            self.discard()
            return other

    def discard(self) -> None:
        with EDITING:
            self.text = self.saved = _read(self.file)
            self._keep()

    def _keep(self) -> None:
        copy, self.unkept = self._copy, ""
        if copy is None:
            return
        try:
            if self.is_saved:
                copy.unlink(missing_ok=True)
            else:
                copy.parent.mkdir(parents=True, exist_ok=True)
                write_json(copy, {"file": str(self.file), "text": self.text, "saved": self.saved})
        except OSError as error:  # the draft itself is fine
            self.unkept = str(error)

    @property
    def _copy(self) -> Path | None:
        return self.drafts and self.drafts / f"{sha256(str(self.file).encode()).hexdigest()[:16]}.json"


EDITING = RLock()
"""Held while a draft is changed: each tab's page runs in its own thread."""
OPEN: WeakValueDictionary[Path, ConfigDraft] = WeakValueDictionary()
"""The drafts that tabs show, by file."""


def _read(file: Path) -> str:
    return file.read_text(encoding="utf-8") if file.exists() else ""


def _keys(tree: Mapping[str, Any], above: str = "") -> Iterator[str]:
    for name, value in tree.items():
        key = f"{above}{name}"
        yield from _keys(value, f"{key}.") if isinstance(value, Mapping) and value else [key]


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
    *path, name = key.split(".")
    section = tree
    for part, following in zip(path, key.split(".")[1:], strict=True):
        node = _child(section, part)
        if node is None:
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


def _child(section: CommentedMap | CommentedSeq, part: str) -> Any:
    if isinstance(section, CommentedMap):
        return section.get(part)
    return section[int(part)] if int(part) < len(section) else None


def moved(text: str, source: Path, target: Path) -> str:
    """Return the text of a file in folder `source` for one in `target`, so that a `plugin_dir` next to it is still
    found."""
    try:
        folder = value_at(parse(text).valid_tree(), "plugin_dir")
    except ConfigError:
        return text
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
    files = sorted(_yaml_files(root, LISTED_DEPTH), key=lambda path: (len(path.parts), path))
    return [path.relative_to(root) for path in files[:MOST_LISTED]]


def _yaml_files(folder: Path, depth: int) -> Iterator[Path]:
    for path in folder.iterdir():
        if path.name.startswith(".") or path.name in UNLISTED:
            continue
        if path.is_dir() and depth and not path.is_symlink():
            yield from _yaml_files(path, depth - 1)
        elif path.suffix in (".yaml", ".yml") and path.is_file():
            yield path


@dataclass(frozen=True, slots=True)
class CheckedDraft:
    """Either all problems, or the configuration with its plan."""

    problems: list[Problem]
    config: Config | None = None
    plan: str = ""
    flow: str = ""
    unplaced: str = ""
    """Why this machine cannot run it, or ""."""
    measurable: bool = False
    """True if this machine can measure a time that the plan lacks."""
    text: str = ""


def checked(text: str, file: Path | None = None) -> CheckedDraft:
    """Check a configuration's YAML text, as content of `file`, without loading modules of its `plugin_dir`."""
    try:
        config = config_from_text(text, name=str(file or "<text>"))
    except ConfigError as error:
        return CheckedDraft(error.problems, text=text)
    plans = plans_with_pace(config)
    unplaced = " ".join(dict.fromkeys(plan.unplaced for plan in plans if plan.unplaced))
    measurable = not unplaced and any(plan.pace is None and not plan.immeasurable for plan in plans)
    return CheckedDraft([], config, plan_text(plans), flow_of(config), unplaced, measurable, text)


def by_field(problems: Iterable[Problem], keys: Iterable[str]) -> dict[str, list[Problem]]:
    """Return key → its problems, with list indices as `.0`; problems of keys outside the form are under ""."""
    problems_by_field: dict[str, list[Problem]] = {}
    shown = set(keys)
    for problem in problems:
        key = re.sub(r"\[(\d+)\]", r".\1", problem.key)
        problems_by_field.setdefault(key if key in shown else "", []).append(problem)
    return problems_by_field


def by_section(problems: Iterable[Problem]) -> dict[str, int]:
    """Return first part of a key → number of problems below it; keys without a section are under `run`."""
    counts: dict[str, int] = {}
    for problem in problems:
        section = problem.key.partition(".")[0].partition("[")[0] if "." in problem.key else "run"
        counts[section] = counts.get(section, 0) + 1
    return counts
