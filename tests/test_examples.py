"""The pages of examples/, followed to the letter in a copy of the repository."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

ROOT = Path(__file__).parent.parent
PAGES = sorted((ROOT / "examples").glob("*.md"))
CODE = ("trinity_core", "tasks", "flows", "studio", "configs", "prefect.yaml", "tests/example_helpers.py")
ALL = (
    *CODE,
    "tests",
    "docs",
    "requirements",
    "benchmarks",
    "Makefile",
    "pyproject.toml",
    "README.md",
    "CONTRIBUTING.md",
    "examples",
)
PRELUDE = "from example_helpers import accepts, experiences, refuses, scripted\n"
TRY_EACH = """
import os, runpy, sys
import example_helpers, torch  # for all of them
for name in sys.argv[1:]:
    child = os.fork()
    if not child:
        runpy.run_path(name)
        os._exit(0)
    assert os.waitpid(child, 0)[1] == 0, name
"""
TESTS_OF_PARTS = (
    "tests/test_house.py",
    "tests/test_registry.py",
    "tests/config/test_config_reference.py",
    "tests/algorithms/test_algorithm_types.py",
)
"""Tests that look at every part: those that a new one could fail."""

BLOCK = re.compile(r"^([^\n]+):\n\n```\w+\n(.*?)^```$", re.DOTALL | re.MULTILINE)
NEW_FILE = re.compile(r"New file `([^`]+)`")
INSERTION = re.compile(r"In `([^`]+)`, after the line that begins with `(.+)`")


def sections() -> dict[str, str]:
    """Name of each page → its text."""
    return {path.stem: path.read_text() for path in PAGES}


def insert_after(path: Path, start: str, code: str) -> None:
    """Insert code below the one line that begins with `start`, and below the doc literal under it."""
    lines = path.read_text().splitlines(keepends=True)
    [index] = [i for i, line in enumerate(lines) if line.startswith(start)]
    while lines[index].rstrip().endswith("(") or (
        index + 1 < len(lines) and lines[index + 1].lstrip().startswith('"""')
    ):
        index += 1
    path.write_text("".join([*lines[: index + 1], code, *lines[index + 1 :]]))


def copy_into(folder: Path, names: Sequence[str]) -> None:
    for name in names:
        source, target = ROOT / name, folder / name
        if source.is_dir():
            # With its bytecode, which stays valid, but for what another process is writing.
            shutil.copytree(source, target, dirs_exist_ok=True, ignore=shutil.ignore_patterns("*.pyc.*"))
        else:
            target.parent.mkdir(exist_ok=True)
            shutil.copy(source, target)


def add(title: str, folder: Path) -> list[str]:
    """Write what a section's example adds; returns the code to try it with."""
    to_try = []
    for lead, code in BLOCK.findall(sections()[title]):
        if match := NEW_FILE.fullmatch(lead):
            (folder / match[1]).parent.mkdir(exist_ok=True)
            assert not (folder / match[1]).exists(), f"{match[1]} is there already"
            (folder / match[1]).write_text(code)
        elif match := INSERTION.fullmatch(lead):
            if (folder / match[1]).exists():
                insert_after(folder / match[1], match[2], code)
        else:
            assert lead == "Try it", lead
            to_try.append(code)
    return to_try


def run(folder: Path, *command: str) -> None:
    paths = os.pathsep.join(str(folder / name) for name in ("", "tests", "plugins"))
    done = subprocess.run(
        command, cwd=folder, env={**os.environ, "PYTHONPATH": paths}, capture_output=True, text=True, timeout=500
    )
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-3000:]


def test_examples_work_as_written_together(tmp_path: Path) -> None:
    """Each in a process of its own, and then the tests that look at every part."""
    copy_into(tmp_path, ALL)
    names = []
    for title in sections():
        to_try = add(title, tmp_path)
        assert to_try, f"'{title}' is never tried"
        for number, code in enumerate(to_try):
            names.append(f"try {title} {number}.py")
            (tmp_path / names[-1]).write_text(PRELUDE + code)
    run(tmp_path, sys.executable, "-c", TRY_EACH, *names)
    for name in names:
        (tmp_path / name).unlink()
    run(tmp_path, "make", "generated", f"PY={sys.executable}")
    told = ("-q", "-x", "-p", "no:cacheprovider")
    run(tmp_path, sys.executable, "-m", "pytest", *told, *TESTS_OF_PARTS)


def test_contributing_links_every_example() -> None:
    linked = re.findall(r"^\| \[[^\]]+\]\(examples/(\w+)\.md\)", (ROOT / "CONTRIBUTING.md").read_text(), re.MULTILINE)
    assert sorted(linked) == sorted(sections())


def test_new_files_are_within_two_per_row() -> None:
    """A part costs one new file, one line of code and one line of documentation at most."""
    for name, text in sections().items():
        leads = [lead for lead, _ in BLOCK.findall(text)]
        into = [match[1] for lead in leads if (match := INSERTION.fullmatch(lead))]
        assert sum(bool(NEW_FILE.fullmatch(lead)) for lead in leads) <= 1, name
        assert sum(name.startswith("docs/") for name in into) <= 1, name
        assert sum(not name.startswith("docs/") for name in into) <= 1, name
