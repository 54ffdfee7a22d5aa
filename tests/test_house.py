"""The architecture holds: arrows point one way, light packages stay light, errors are not swallowed."""

from __future__ import annotations

import ast
import subprocess
import sys
from collections import Counter
from graphlib import CycleError, TopologicalSorter
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path

import pytest
from pydantic import BaseModel

from trinity_core.config.training import CriticSettings, TrainSettings
from trinity_core.registry import HOMES

ROOT = Path(__file__).parent.parent

BASE = {"config"}
PURE = BASE | {"data", "algorithms", "workflows"}
PLUMBING = PURE | {"sync", "store", "checkpoints", "tracking"}
MAY_IMPORT = {
    "config": set(),
    "data": {"config"},
    "algorithms": {"config", "data"},
    "workflows": {"config", "data"},
    "store": PURE,
    "sync": PURE,
    "checkpoints": PURE,
    "tracking": PURE,
    "pipelines": PURE,
    "inference": PLUMBING | {"pipelines"},
    "rollout": PLUMBING | {"inference", "pipelines"},
    "training": PLUMBING,
    "runtime": PLUMBING | {"inference", "rollout", "training", "pipelines"},
    "view": PLUMBING | {"training", "runtime"},
}
"""Package of `trinity_core` -> the packages of it that it may import: those below it in docs/architecture.md."""

TOP_LEVEL = {
    "trinity_core": {"trinity_core"},
    "tasks": {"trinity_core", "tasks"},
    "flows": {"trinity_core", "tasks", "flows"},
    "studio": {"trinity_core", "tasks", "studio"},
}


def sources() -> list[Path]:
    return sorted(path for top in TOP_LEVEL for path in (ROOT / top).rglob("*.py"))


def imports(path: Path) -> list[tuple[int, str]]:
    """Every absolute import in a file, also those inside functions: (line, dotted name)."""
    found = []
    for node in ast.walk(ast.parse(path.read_text(), filename=str(path))):
        if isinstance(node, ast.Import):
            found += [(node.lineno, alias.name) for alias in node.names]
        elif isinstance(node, ast.ImportFrom) and node.module and not node.level:
            found += [(node.lineno, f"{node.module}.{alias.name}") for alias in node.names]
    return found


@pytest.mark.parametrize("path", sources(), ids=lambda path: path.relative_to(ROOT).as_posix())
def test_arrows_point_one_way(path: Path) -> None:
    top, package = path.relative_to(ROOT).parts[:2]
    for line, name in imports(path):
        where = f"{path.relative_to(ROOT)}:{line} imports {name}"
        first, *rest = name.split(".")
        if first in TOP_LEVEL:
            assert first in TOP_LEVEL[top], where
        if top == "trinity_core":
            assert first != "prefect", where
        if top == first == "trinity_core" and package in MAY_IMPORT and rest and rest[0] in MAY_IMPORT:
            assert rest[0] == package or rest[0] in MAY_IMPORT[package], where


def test_class_names_are_unique() -> None:
    """A name found by grep is one thing. Private classes (`_X`) are the business of their file."""
    homes: dict[str, list[str]] = {}
    for path in sources():
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.ClassDef) and not node.name.startswith("_"):
                homes.setdefault(node.name, []).append(path.relative_to(ROOT).as_posix())
    assert {name: places for name, places in homes.items() if len(places) > 1} == {}


def test_test_names_fit_on_a_line() -> None:
    """A name of more than 60 characters hides what it says."""
    names = [
        node.name
        for path in sorted((ROOT / "tests").rglob("test_*.py"))
        for node in ast.walk(ast.parse(path.read_text()))
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef) and node.name.startswith("test_")
    ]
    assert [name for name in names if len(name) > 60] == []


def test_no_three_files_share_a_basename() -> None:
    names = Counter(path.name for path in sources() if path.name != "__init__.py")
    assert [name for name, count in names.items() if count > 2] == []


def module_imports(path: Path, modules: set[str]) -> set[str]:
    """Our modules that a file imports when it is imported: not inside functions, not for type checkers alone."""
    found = set()
    waiting: list[ast.AST] = [ast.parse(path.read_text())]
    while waiting:
        node = waiting.pop()
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            continue
        if isinstance(node, ast.If) and "TYPE_CHECKING" in ast.dump(node.test):
            waiting += node.orelse
            continue
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names} & modules
        elif isinstance(node, ast.ImportFrom) and node.module and not node.level:
            for alias in node.names:
                name = f"{node.module}.{alias.name}"
                found |= {name if name in modules else node.module} & modules
        waiting += ast.iter_child_nodes(node)
    return found


def test_imports_form_no_circle() -> None:
    """A file that another one needs to be imported does not need that one."""
    paths = {
        ".".join(path.relative_to(ROOT).with_suffix("").parts).removesuffix(".__init__"): path for path in sources()
    }
    graph = {module: module_imports(path, set(paths)) - {module} for module, path in paths.items()}
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
            assert path.parent == ROOT / "trinity_core" and path.name in BY_NAME, path
    for name in ("registry.py", "signatures.py", "lazy.py", "plugins.py"):
        found = {found for _, found in imports(ROOT / "trinity_core" / name) if found.startswith("trinity_core.")}
        assert not {found.split(".")[1] for found in found} & {*MAY_IMPORT}, name
    homes = {home.partition(":")[0].split(".")[1] for home in HOMES.values()}
    assert homes <= {"algorithms", "data", "store", "tracking", "workflows", "pipelines"}


@pytest.mark.parametrize("path", sources(), ids=lambda path: path.relative_to(ROOT).as_posix())
def test_no_error_is_caught_blindly(path: Path) -> None:
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.ExceptHandler):
            assert node.type is not None, f"{path}:{node.lineno} catches everything"
            names = {n.id for n in ast.walk(node.type) if isinstance(n, ast.Name)}
            if "BaseException" in names or "Exception" in names:
                assert passes_on(node), f"{path}:{node.lineno} swallows errors"


def passes_on(handler: ast.ExceptHandler) -> bool:
    """True if a handler raises, logs with the traceback, or keeps the error: in a future or an attribute `…error`."""

    def is_the_error(node: ast.expr) -> bool:
        return isinstance(node, ast.Name) and node.id == handler.name

    for node in ast.walk(handler):
        if isinstance(node, ast.Raise):
            return True
        if isinstance(node, ast.Assign) and is_the_error(node.value):
            return any(isinstance(target, ast.Attribute) and target.attr.endswith("error") for target in node.targets)
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute):
            kept = node.func.attr == "set_exception" and any(map(is_the_error, node.args))
            logged = any(keyword.arg == "exc_info" and is_the_error(keyword.value) for keyword in node.keywords)
            if kept or logged or node.func.attr == "exception":
                return True
    return False


@pytest.mark.parametrize(
    ("body", "passed_on"),
    [
        ("raise", True),
        ("raise ValueError from e", True),
        ("self._error = e", True),
        ("future.set_exception(e)", True),
        ("log.warning('x', exc_info=e)", True),
        ("log.exception('x')", True),
        ("self._error = None", False),
        ("found = e", False),
        ("log.warning('x: %s', e)", False),
        ("pass", False),
    ],
)
def test_what_counts_as_passing_an_error_on(body: str, passed_on: bool) -> None:
    tree = ast.parse(f"try:\n    f()\nexcept Exception as e:\n    {body}")
    [handler] = (node for node in ast.walk(tree) if isinstance(node, ast.ExceptHandler))
    assert passes_on(handler) == passed_on


ENDLESS = {"join", "wait", "acquire", "communicate"}
"""Methods that wait for ever if they are given no argument."""
LIMITED = {"run", "check_call", "check_output", "call", "urlopen", "get", "FileLock"}
"""Functions of `subprocess`, `urllib`, `ray` and `filelock` that do so without a `timeout`."""
LIMITED_ELSEWHERE = {
    "inference/pool.py", "inference/async_llm.py", "workflows/command.py", "flows/local/connection.py",
}  # fmt: skip
"""Waits of coroutines that their callers limit, and for a server that `wait` gives 3 minutes."""


def endless_waits(source: str) -> list[int]:
    """The lines of calls that wait without a limit."""
    found = []
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
            found.append(node.lineno)
    return found


@pytest.mark.parametrize(
    ("call", "endless"),
    [
        ("thread.join()", True),
        ("', '.join(names)", False),
        ("event.wait(5)", False),
        ("process.wait()", True),
        ("lock.acquire(timeout=3)", False),
        ("ray.get(ref)", True),
        ("ray.get(ref, timeout=3)", False),
        ("subprocess.run(command, check=True)", True),
        ("known.get(name)", False),
        ("FileLock(path)", True),
    ],
)
def test_what_counts_as_an_endless_wait(call: str, endless: bool) -> None:
    assert bool(endless_waits(call)) == endless


@pytest.mark.parametrize("path", sources(), ids=lambda path: path.relative_to(ROOT).as_posix())
def test_no_wait_is_endless(path: Path) -> None:
    """Whoever waits for another process must be able to say in the end who is missing."""
    if not path.as_posix().endswith(tuple(LIMITED_ELSEWHERE)):
        assert endless_waits(path.read_text()) == [], path


@pytest.mark.parametrize(
    "module",
    [
        "trinity_core",
        "trinity_core.config",
        "trinity_core.cli",
        "trinity_core.sync.schedule",
        "trinity_core.algorithms",
    ],
)
def test_light_modules_import_nothing_heavy(module: str) -> None:
    heavy = ("torch", "vllm", "deepspeed", "ray", "mlflow", "prefect", "transformers", "datasets")
    program = f"import sys, {module}; print([m for m in {heavy!r} if m in sys.modules])"
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True, cwd=ROOT)
    assert done.stdout.strip() == "[]"


@pytest.mark.parametrize("settings", [TrainSettings, CriticSettings])
def test_what_the_trainer_is_told_it_uses(settings: type[BaseModel]) -> None:
    """A setting that nothing reads is one that a user gives in vain."""
    read = {
        node.attr
        for top in ("trinity_core/training", "trinity_core/runtime")
        for path in (ROOT / top).rglob("*.py")
        for node in ast.walk(ast.parse(path.read_text()))
        if isinstance(node, ast.Attribute)
    }
    assert settings.model_fields.keys() <= read


BENCHMARKS = sorted((ROOT / "benchmarks").rglob("*.py"))


@pytest.mark.parametrize("path", BENCHMARKS, ids=lambda path: path.relative_to(ROOT).as_posix())
def test_benchmarks_import_what_there_is(path: Path) -> None:
    """Also inside functions: what a benchmark needs moves, and nobody runs it for weeks."""
    ours = [(line, name.rpartition(".")) for line, name in imports(path) if name.split(".")[0] in TOP_LEVEL]
    for line, (module, _, name) in ours:
        if module:
            home = import_module(module)
            found = hasattr(home, name) or (hasattr(home, "__path__") and find_spec(f"{module}.{name}"))
            assert found, f"{path.relative_to(ROOT)}:{line}: {module} has no {name}"
