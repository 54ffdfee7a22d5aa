"""The examples of CONTRIBUTING.md, followed to the letter in a copy of the repository."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
PAGE = (ROOT / "CONTRIBUTING.md").read_text()
COPIED = ("trinity_core", "tasks", "flows", "studio", "configs", "prefect.yaml", "tests/contributing_helpers.py")
PRELUDE = "from contributing_helpers import accepts, experiences, refuses, scripted\n"

BLOCK = re.compile(r"^([^\n]+):\n\n```\w+\n(.*?)^```$", re.DOTALL | re.MULTILINE)
NEW_FILE = re.compile(r"New file `([^`]+)`")
INSERTION = re.compile(r"In `([^`]+)`, after the line that begins with `([^`]+)`")


def sections() -> dict[str, str]:
    """Title of each "## A …" → its text."""
    parts = re.split(r"^## (An? .+)$", PAGE, flags=re.MULTILINE)
    return dict(zip(parts[1::2], parts[2::2], strict=True))


def insert_after(path: Path, start: str, code: str) -> None:
    """Insert code below the one line that begins with `start`, and below the doc literal under it."""
    lines = path.read_text().splitlines(keepends=True)
    [index] = [i for i, line in enumerate(lines) if line.startswith(start)]
    while lines[index].rstrip().endswith("(") or (
        index + 1 < len(lines) and lines[index + 1].lstrip().startswith('"""')
    ):
        index += 1
    path.write_text("".join([*lines[: index + 1], code, *lines[index + 1 :]]))


@pytest.fixture
def copy(tmp_path: Path) -> Path:
    for name in COPIED:
        source, target = ROOT / name, tmp_path / name
        if source.is_dir():
            shutil.copytree(source, target, ignore=shutil.ignore_patterns("__pycache__"))
        else:
            target.parent.mkdir(exist_ok=True)
            shutil.copy(source, target)
    return tmp_path


@pytest.mark.parametrize("title", sections())
def test_example_works_as_written(title: str, copy: Path) -> None:
    tried = False
    for lead, code in BLOCK.findall(sections()[title]):
        if found := NEW_FILE.fullmatch(lead):
            (copy / found[1]).parent.mkdir(exist_ok=True)
            assert not (copy / found[1]).exists(), f"{found[1]} is there already"
            (copy / found[1]).write_text(code)
        elif found := INSERTION.fullmatch(lead):
            insert_after(copy / found[1], found[2], code)
        else:
            assert lead == "Try it", lead
            tried = True
            run(copy, code)
    assert tried, f"'{title}' is never tried"


def run(folder: Path, code: str) -> None:
    (folder / "try_it.py").write_text(PRELUDE + code)
    paths = os.pathsep.join(str(folder / name) for name in ("", "tests", "plugins"))
    done = subprocess.run(
        [sys.executable, "try_it.py"], cwd=folder, env={**os.environ, "PYTHONPATH": paths}, capture_output=True,
        text=True, timeout=300,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr[-3000:]


def test_table_names_every_example() -> None:
    linked = re.findall(r"^\| \[(an? [^\]]+)\]\(#([a-z-]+)\)", PAGE, flags=re.MULTILINE)
    assert {name.capitalize() for name, _ in linked} == {title.capitalize() for title in sections()}
    assert all(anchor == name.lower().replace(" ", "-") for name, anchor in linked)


def test_new_files_are_within_two_per_row() -> None:
    """A part costs one new file and one line at most."""
    for title, text in sections().items():
        leads = [lead for lead, _ in BLOCK.findall(text)]
        assert sum(bool(NEW_FILE.fullmatch(lead)) for lead in leads) <= 1, title
        assert sum(bool(INSERTION.fullmatch(lead)) for lead in leads) <= 1, title
