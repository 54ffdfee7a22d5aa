"""Recipes for new configurations: the YAML files of `configs/`, with what each does and needs."""

from __future__ import annotations

import os
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import lru_cache
from itertools import takewhile
from pathlib import Path
from typing import Any

from studio.config_draft import changed, checked, moved
from trinity_core.base.files import project_files
from trinity_core.config import ConfigError
from trinity_core.config.findings import value_at
from trinity_core.config.source import parse

HEADER = re.compile(r"# yaml-language-server:[^\n]*\n")
"""First line of a recipe, by which editors complete and check it; its path is relative to the file's folder."""
SCHEMA = "configs/schema.json"
FALLBACK = re.compile(r"\$\{oc\.env:\w+,([^}]*)\}")
"""A value that a variable may replace."""
FIRST = ("quickstart", "gsm8k", "gsm8k/one_gpu", "lora/one_gpu")
"""Recipes for a first run, as in the README."""
PARAGRAPH = re.compile(r"# \S")
"""A line of the leading comment's first paragraph; indented commands and tables follow it."""


@dataclass(frozen=True, slots=True)
class Recipe:
    """A configuration that runs unchanged."""

    file: Path
    text: str
    about: str
    needs: str

    @property
    def title(self) -> str:
        """Its name in the list: its folder's, plus its own if that differs."""
        name, folder = self.file.stem, self.file.parent.name
        return name if name == folder else f"{folder}/{name}"

    def text_for(self, file: Path, root: Path) -> str:
        """Return its text for a new file, which also names the run. A part keeps its name, because the parts share
        it. Plugins next to the recipe, and the schema, are those in the project `root` if it has them."""
        source, schema = self.file.parent, root / SCHEMA
        if source.is_relative_to(project_files()):
            in_project = root / source.relative_to(project_files())
            source = in_project if in_project.is_dir() else source
        text = moved(self.text, source, file.parent)
        shown = os.path.relpath(schema, file.parent) if schema.is_file() else project_files() / SCHEMA
        header, config = f"# yaml-language-server: $schema={shown}\n", checked(text, file).config
        return header + (text if config and config.is_part else changed(text, "name", file.stem))


def recipes() -> list[Recipe]:
    """Return all recipes but unreadable ones, which may be being written: those for a first run, those that need no
    GPU, the others."""
    files = sorted((project_files() / "configs").glob("*/[!.]*.yaml"))
    listed = [recipe for file in files if (recipe := recipe_of(file)) is not None]
    places = {title: index for index, title in enumerate(FIRST)}
    return sorted(listed, key=lambda recipe: (places.get(recipe.title, len(FIRST)), "no GPU" not in recipe.needs))


def recipe_of(file: Path) -> Recipe | None:
    """Return a file as a recipe; None if it is not YAML with keys, or does not exist."""
    return _recipe(file, file.stat().st_mtime_ns) if file.exists() else None


@lru_cache(maxsize=256)
def _recipe(file: Path, _changed: int) -> Recipe | None:
    try:
        text = HEADER.sub("", file.read_text(encoding="utf-8"))
        tree = parse(text, file.name).valid_tree()
    except (OSError, UnicodeDecodeError, ConfigError):
        return None
    about = " ".join(line.lstrip("# ") for line in takewhile(PARAGRAPH.match, text.splitlines()))
    return Recipe(file, text, about, " · ".join(_needs(tree)))


def _needs(tree: Mapping[str, Any]) -> Iterator[str]:
    written = tree.get("stages")
    listed = [stage for stage in written if isinstance(stage, Mapping)] if isinstance(written, list) else []
    stages = [str(stage.get("stage_name", "")) for stage in listed]
    yield " → ".join(stages) if stages else str(value_at(tree, "algorithm.algorithm_type") or tree.get("mode"))
    if model := value_at(tree, "model.model_path"):
        yield "model " + FALLBACK.sub(r"\1", model)
    gpus = value_at(tree, "cluster.gpu_per_node")
    yield f"{gpus} GPU{'s' if gpus != 1 else ''}" if gpus else "no GPU"
