"""The pages for readers: links lead somewhere, and commands name what exists."""

from __future__ import annotations

import re
import shlex
import subprocess
from collections.abc import Iterator
from functools import cache
from importlib import import_module
from pathlib import Path

import pytest
import typer
import yaml
from prefect import Flow
from typer.core import TyperGroup

from flows import cli
from trinity_core.algorithms import ALGORITHMS
from trinity_core.config.reference import listing

ROOT = Path(__file__).parent.parent
PAGES = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *sorted([*ROOT.glob("docs/*.md"), *ROOT.glob("examples/*.md")])]
BLOCK = re.compile(r"^```(\w*)[^\n]*\n(.*?)^```", re.MULTILINE | re.DOTALL)
LINK = re.compile(r"\]\(([^)\s]+)\)")
CODE = re.compile(r"`((?:trinity_core|flows|studio|tasks)/[a-z_/]+[a-z_.]*)`")
"""The path of a file or folder of code; pages about parts to add have NAME in such a path."""
SETTING = re.compile(r"[a-z_]+(\.[a-z_0-9]+)*=")
PROGRAM = re.compile(r"trinity|claude|prefect|make|ray|python[\d.]*|pip|uv|curl|export|cd|cp|\.|~?/.+|\w+=.+")
FREE = ("_args", "env_vars", "engine_args")
"""Settings whose keys belong to somebody else end so."""


def blocks(text: str) -> Iterator[str]:
    """The shell blocks of a page, with continued lines joined."""
    for language, block in BLOCK.findall(text):
        if language in ("bash", "sh", "shell"):
            yield block.replace("\\\n", " ")


def commands(text: str) -> Iterator[list[str]]:
    """The words of each command of a shell block."""
    text = re.sub(r"(^|\s)# .*", "", text).replace("$schedule", "")
    for command in re.split(r"\n(?=\S)|;|&&|&\s", text):
        if words := shlex.split(command):
            yield words


@cache
def settings() -> frozenset[str]:
    """The key of every setting."""
    return frozenset(re.findall(r"^([a-z_0-9.\[\]<>]+): ", listing(), re.MULTILINE))


def is_setting(key: str) -> bool:
    """True if it is the key of a setting or a section, or lies below one whose keys are not ours."""
    known = {re.sub(r"\[.*?\]|\.<.*?>", "", setting) for setting in settings()}
    while key not in known and not any(setting.startswith(f"{key}.") for setting in known):
        key, _, _ = key.rpartition(".")
        if not key or not key.endswith(FREE):
            return False
    return True


def anchors(page: Path) -> set[str]:
    """Anchors of a page's headings, as GitHub and MkDocs make them."""
    text = BLOCK.sub("", page.read_text())
    titles = re.findall(r"^#+ (.+)$", text, re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", title.lower()).replace(" ", "-") for title in titles}


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.stem)
def test_links_lead_to_a_file_and_a_heading(page: Path) -> None:
    for link in LINK.findall(BLOCK.sub("", page.read_text())):
        if link.startswith(("http://", "https://")):
            continue
        name, _, anchor = link.partition("#")
        target = (page.parent / name).resolve() if name else page
        assert target.exists(), link
        assert not anchor or anchor in anchors(target), link


@pytest.mark.parametrize("page", [page for page in PAGES if page.parent.name != "examples"], ids=lambda page: page.stem)
def test_code_that_is_named_is_there(page: Path) -> None:
    """The examples' pages name the files that their readers make."""
    assert [name for name in CODE.findall(page.read_text()) if not (ROOT / name).exists()] == []


def test_the_number_of_algorithms_is_theirs() -> None:
    assert f"[Algorithms](docs/algorithms.md): {len(ALGORITHMS)}." in (ROOT / "README.md").read_text()


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.stem)
def test_shell_blocks_are_shell_and_name_what_exists(page: Path) -> None:
    app = typer.main.get_command(cli.app)
    assert isinstance(app, TyperGroup)
    deployments = yaml.safe_load((ROOT / "prefect.yaml").read_text())["deployments"]
    names = {f"{flow_of(entry['entrypoint']).name}/{entry['name']}" for entry in deployments}
    for block in blocks(page.read_text()):
        parsed = subprocess.run(["bash", "-n"], input=block, text=True, capture_output=True)
        assert parsed.returncode == 0, f"{block}\n{parsed.stderr}"
        for words in commands(block):
            assert PROGRAM.fullmatch(words[0]), words
            if words[0] == "prefect":
                assert words[4 if words[2] == "schedule" else 3] in names, words
            elif words[0] == "trinity":
                check_command(app, words)


def flow_of(entrypoint: str) -> Flow[..., object]:
    module, _, name = entrypoint.rpartition(".")
    flow: Flow[..., object] = getattr(import_module(module), name)
    return flow


def check_command(app: TyperGroup, words: list[str]) -> None:
    """Options exist, settings have a key, configurations of the project are there."""
    group: TyperGroup = app
    _, name, *rest = words
    while isinstance(command := group.commands[name], TyperGroup):
        group, (name, *rest) = command, rest
    command.make_context(name, list(rest))
    for word in rest:
        if word.startswith("configs/"):
            assert (ROOT / word.partition(":")[0]).exists(), word
        if SETTING.match(word) and name != "import-verl":
            assert is_setting(word.partition("=")[0]), word
