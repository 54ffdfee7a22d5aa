"""The architecture: imports point one way, nothing grows too long, no wait is endless."""

from __future__ import annotations

import ast
import functools
from graphlib import CycleError, TopologicalSorter
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path

import pytest

from trinity_core.base.registry import HOMES

ROOT = Path(__file__).parent.parent

PURE = {"base", "config", "data", "algorithms", "workflows"}
SIDES = PURE | {"exchange", "pipelines"}
MAY_IMPORT = {
    "base": set(),
    "config": {"base"},
    "data": {"base", "config"},
    "algorithms": {"base", "config", "data"},
    "workflows": {"base", "config", "data"},
    "compat": PURE,
    "exchange": PURE,
    "pipelines": PURE,
    "rollout": SIDES,
    "training": SIDES,
    "hosting": SIDES | {"rollout", "training"},
    "results": SIDES | {"rollout", "training", "hosting"},
    "run": SIDES | {"rollout", "training", "hosting", "results"},
    "view": SIDES | {"training", "results", "run"},
}
"""Room of `trinity_core` -> the rooms of it that it may import: those below it in docs/architecture.md."""
ON_TOP = {"__init__.py", "cli.py"}

TOP_LEVEL = {
    "trinity_core": {"trinity_core"},
    "tasks": {"trinity_core", "tasks"},
    "flows": {"trinity_core", "tasks", "studio", "flows"},
    "studio": {"trinity_core", "tasks", "studio"},
}


def sources() -> list[Path]:
    return sorted(path for top in TOP_LEVEL for path in (ROOT / top).rglob("*.py"))


@functools.cache
def imports(path: Path) -> list[tuple[int, str]]:
    """Every absolute import in a file, also those inside functions: (line, dotted name)."""
    lines = []
    for node in ast.walk(ast.parse(path.read_text(), filename=str(path))):
        if isinstance(node, ast.Import):
            lines += [(node.lineno, alias.name) for alias in node.names]
        elif isinstance(node, ast.ImportFrom) and node.module and not node.level:
            lines += [(node.lineno, f"{node.module}.{alias.name}") for alias in node.names]
    return lines


def test_arrows_point_one_way() -> None:
    wrong = []
    for path in sources():
        top, package = path.relative_to(ROOT).parts[:2]
        for line, name in imports(path):
            first, *rest = name.split(".")
            ours = top == first == "trinity_core" and package not in ON_TOP and bool(rest) and rest[0] in MAY_IMPORT
            if (
                (first in TOP_LEVEL and first not in TOP_LEVEL[top])
                or (top == "trinity_core" and first == "prefect")
                or (ours and rest[0] not in MAY_IMPORT.get(package, set()) | {package})
            ):
                wrong.append(f"{path.relative_to(ROOT)}:{line} imports {name}")
    assert wrong == []


def test_imports_form_no_circle() -> None:
    """Also counted: imports inside functions and for type checkers alone."""
    paths = {
        ".".join(path.relative_to(ROOT).with_suffix("").parts).removesuffix(".__init__"): path for path in sources()
    }
    graph = {
        module: {name if name in paths else name.rpartition(".")[0] for _, name in imports(path)} & {*paths} - {module}
        for module, path in paths.items()
    }
    try:
        TopologicalSorter(graph).prepare()
    except CycleError as error:
        pytest.fail(f"a circle of imports: {' imports '.join(reversed(error.args[1]))}")


BY_NAME = {"registry.py", "lazy.py", "plugins.py"}
"""Files of `trinity_core` that import modules by a name in a string, which no test of the arrows can see."""


def test_modules_are_imported_by_name_at_the_bottom_only() -> None:
    """The files that do so lie below all packages, and what the registries import belongs to the named parts."""
    for path in sources():
        source = path.read_text()
        if path.is_relative_to(ROOT / "trinity_core") and ("import_module" in source or "spec_from_file" in source):
            assert path.parent == ROOT / "trinity_core" / "base" and path.name in BY_NAME, path
    homes = {home.partition(":")[0].split(".")[1] for home in HOMES.values()}
    assert homes <= {"algorithms", "data", "exchange", "workflows", "pipelines"}


LONGEST_FILE, LONGEST_FUNCTION = 500, 60


def test_files_and_functions_are_short() -> None:
    """Most files have 100 to 300 lines."""
    too_long = []
    for path in sources():
        tree, source = ast.parse(path.read_text()), path.read_text()
        lengths = [("the file", len(source.splitlines()), LONGEST_FILE)]
        lengths += [
            (node.name, (node.end_lineno or node.lineno) - node.lineno + 1, LONGEST_FUNCTION)
            for node in ast.walk(tree)
            if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)
        ]
        where = path.relative_to(ROOT)
        too_long += [f"{where}: {name} has {lines} lines" for name, lines, most in lengths if lines > most]
    assert too_long == []


PAGES_LINES = 3600
"""Lines of Studio and of the page of rollouts, scripts and styles too: a new part takes the place of another."""


def test_the_pages_grow_no_further_and_have_one_table() -> None:
    files = [path for top in ("studio", "trinity_core/view") for path in (ROOT / top).rglob("*")]
    texts = {path: path.read_text() for path in files if path.suffix in (".py", ".js", ".css", ".html")}
    assert sum(text.count("\n") for text in texts.values()) <= PAGES_LINES
    assert [path.name for path, text in texts.items() if "dataframe(" in text] == ["run_table.py"]


ENDLESS = {"join", "wait", "acquire", "communicate"}
"""Methods that wait for ever if they are given no argument."""
LIMITED = {"run", "check_call", "check_output", "call", "urlopen", "get", "FileLock"}
"""Functions of `subprocess`, `urllib`, `ray` and `filelock` that do so without a `timeout`."""
LIMITED_ELSEWHERE = {
    "trinity_core/rollout/inference/pool.py",
    "trinity_core/rollout/inference/async_llm.py",
    "flows/local/connection.py",
}
"""Waits of coroutines that their callers limit, and for a server that `wait` gives 3 minutes."""


def endless_waits(source: str) -> list[int]:
    """The lines of calls that wait without a limit."""
    waits = []
    for node in ast.walk(ast.parse(source)):
        if not isinstance(node, ast.Call) or not isinstance(node.func, ast.Attribute | ast.Name):
            continue
        name = node.func.attr if isinstance(node.func, ast.Attribute) else node.func.id
        owner = (
            node.func.value.id if isinstance(node.func, ast.Attribute) and isinstance(node.func.value, ast.Name) else ""
        )
        named = {keyword.arg for keyword in node.keywords}
        limited = name in LIMITED and (owner in ("subprocess", "ray") or name in ("urlopen", "FileLock"))
        if (name in ENDLESS and not node.args and not named) or (limited and "timeout" not in named):
            waits.append(node.lineno)
    return waits


def test_no_wait_is_endless() -> None:
    """Whoever waits for another process must be able to say in the end who is missing."""
    assert endless_waits("ray.get(r)\nsubprocess.run(c)\nFileLock(p)\nknown.get(n)\nray.get(r, timeout=3)") == [1, 2, 3]
    lines = {path.relative_to(ROOT).as_posix(): endless_waits(path.read_text()) for path in sources()}
    waits = {path: places for path, places in lines.items() if places}
    assert waits.keys() == LIMITED_ELSEWHERE, waits


def test_benchmarks_import_what_there_is() -> None:
    """Also inside functions, and helpers of tests: what a benchmark needs moves, and nobody runs it for weeks."""
    missing = []
    for path in sorted((ROOT / "benchmarks").rglob("*.py")):
        for line, name in imports(path) if path.parent.name != "peers" else ():  # those have packages of their own
            helper = Path(*name.split(".")[:-1] or [name])
            homes = [ROOT / folder / f"{helper}.py" for folder in ("benchmarks", "tests", "tests/view", "tests/chaos")]
            if not any(home.is_file() for home in homes) and find_spec(helper.parts[0]) is None:
                missing.append(f"{path.relative_to(ROOT)}:{line}: there is no {name}")
        ours = [(line, name.rpartition(".")) for line, name in imports(path) if name.split(".")[0] in TOP_LEVEL]
        for line, (module, _, name) in ours:
            home = import_module(module or name)
            if module and not hasattr(home, name) and not (hasattr(home, "__path__") and find_spec(f"{module}.{name}")):
                missing.append(f"{path.relative_to(ROOT)}:{line}: {module} has no {name}")
    assert missing == []
