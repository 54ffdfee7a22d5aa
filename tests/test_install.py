"""`requirements/install.sh` with a stand-in for Python, and the requirements against what the code imports."""

from __future__ import annotations

import ast
import os
import re
import shutil
import subprocess
import sys
from collections.abc import Mapping
from functools import cache
from importlib import metadata
from importlib.metadata import packages_distributions, requires
from pathlib import Path

import pytest
from packaging.requirements import Requirement

ROOT = Path(__file__).parent.parent
PYTHON = """#!/bin/sh
# The system's Python: it makes an environment, whose Python has pip.
echo "$*" >>calls
case "$*" in
"-m venv --clear .venv")
    rm -rf .venv && mkdir -p .venv/bin
    printf '#!/bin/sh\\n' >.venv/bin/python
    cp .venv/bin/python .venv/bin/uv
    chmod +x .venv/bin/python .venv/bin/uv ;;
esac
"""
WITHOUT_PIP = "#!/bin/sh\ncase \"$*\" in '-m pip'*) echo 'No module named pip' >&2; exit 1 ;; esac\n"


def program(path: Path, text: str) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text)
    path.chmod(0o755)


@pytest.fixture
def root(tmp_path: Path) -> Path:
    """A fresh checkout."""
    (tmp_path / "requirements").mkdir()
    for script in ("install.sh", "compile.py"):
        shutil.copy(ROOT / "requirements" / script, tmp_path / "requirements")
    for kind in ("cpu", "gpu"):
        (tmp_path / f"requirements/{kind}.txt").write_text("uv==1\ntorch==2\n")
    (tmp_path / "pyproject.toml").touch()
    program(tmp_path / "python", PYTHON)
    return tmp_path


def install(root: Path) -> int:
    """How often an environment was made, by an installation that succeeds."""
    (root / "calls").write_text("")
    env = {**os.environ, "PYTHON": str(root / "python")}
    done = subprocess.run([root / "requirements/install.sh"], env=env, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    return (root / "calls").read_text().count("-m venv")


def test_environment_is_created_once(root: Path) -> None:
    assert [install(root), install(root)] == [1, 0]
    (root / "pyproject.toml").write_text("# other pins")
    assert install(root) == 0


@pytest.mark.parametrize("left", [WITHOUT_PIP, "#!/nowhere/python\n"])
def test_incomplete_environment_is_recreated(left: str, root: Path) -> None:
    program(root / ".venv/bin/python", left)
    assert install(root) == 1


def test_without_a_compiler_all_else_is_installed(root: Path) -> None:
    for name, pins in (("dev", ""), ("agents", ""), ("openenv", ""), ("environments", "gymnasium==1\npycosat==0\n")):
        (root / f"requirements/{name}.txt").write_text(pins)
    assert install(root) == 1
    uv = '#!/bin/sh\nfor last in "$@"; do :; done\ncase "$last" in *.txt) ! grep pycosat "$last" ;; esac\n'
    program(root / ".venv/bin/uv", uv)
    env = {**os.environ, "PYTHON": str(root / "python")}
    script = [root / "requirements/install.sh", "dev"]
    done = subprocess.run(script, env=env, capture_output=True, text=True, timeout=60)
    assert done.returncode == 0 and "without pycosat" in done.stderr
    assert (root / ".venv/without-pycosat.txt").read_text() == "gymnasium==1\n"


@pytest.mark.parametrize(
    ("shown", "code"), [("CUDA Version: 12.8 ", 1), ("CUDA Version: 13.0 ", 0), ("CUDA UMD Version: 12.4", 1), ("", 0)]
)
def test_an_old_driver_is_refused_before_anything_is_installed(shown: str, code: int, root: Path) -> None:
    table = f"| NVIDIA-SMI 550.54.15   Driver Version: 550.54.15   {shown} |"
    program(root / "bin/nvidia-smi", f'#!/bin/sh\n[ "$1" = -L ] && echo "GPU 0: H100" || echo "{table}"\n')
    env = {**os.environ, "PYTHON": str(root / "python"), "PATH": f"{root / 'bin'}:{os.environ['PATH']}"}
    done = subprocess.run([root / "requirements/install.sh"], env=env, capture_output=True, text=True)
    assert done.returncode == code and (root / ".venv").exists() == (code == 0)


USED_WITHOUT_IMPORT = {
    "mypy": "run by make check",
    "pytest-timeout": "`timeout` in pyproject.toml",
    "pytest-xdist": "`-n` in Makefile",
    "ruff": "run by make",
    "types-pyyaml": "mypy's types of PyYAML",
    "uv": "run by requirements/install.sh",
}
OURS = {"flows", "studio", "tasks", "trinity_core", "answer_side", "tests_side", "sandbox_rpc"}
"""The last three stand beside the program of a sandbox, which imports no package of ours."""


def distributions(*names: str) -> set[str]:
    """The packages that requirements files name, without versions and extras."""
    lines = (line for name in names for line in (ROOT / "requirements" / name).read_text().splitlines())
    return {normalised(re.split(r"[\[=<>~ ;]", line)[0]) for line in lines if line and line[0] not in "#-"}


def normalised(name: str) -> str:
    return re.sub("[_.]", "-", name.lower())


def imported(*folders: str) -> set[str]:
    """Top-level packages that Python files below `folders` import, within functions too; not the standard library."""
    names: set[str] = set()
    for path in (path for folder in folders for path in (ROOT / folder).rglob("*.py")):
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.Import):
                names |= {alias.name.partition(".")[0] for alias in node.names}
            elif isinstance(node, ast.ImportFrom) and node.module and not node.level:
                names.add(node.module.partition(".")[0])
    return names - set(sys.stdlib_module_names) - OURS


@cache
def installed() -> Mapping[str, list[str]]:
    return packages_distributions()


def providers(package: str) -> set[str]:
    """The installed distributions that an import comes from; none if it is not installed."""
    return set(map(normalised, installed().get(package, ())))


def test_every_requirement_is_used() -> None:
    packages = imported("trinity_core", "tasks", "flows", "studio", "benchmarks", "tests")
    used = set().union(*map(providers, packages))
    assert distributions("core.in", "dev.in") - used == set(USED_WITHOUT_IMPORT)


def test_every_import_is_a_direct_requirement() -> None:
    direct = distributions("core.in", "cpu.in", "gpu.in")
    extra = distributions("environments.txt", "data-juicer.txt")
    unlisted = {top for top in imported("trinity_core", "tasks", "flows", "studio") if not providers(top) & direct}
    assert {top for top in unlisted if not {name := normalised(top).replace("_", "-"), f"py-{name}"} & extra} == set()


@pytest.mark.parametrize("kind", ["cpu", "gpu"])
def test_every_requirement_is_pinned(kind: str) -> None:
    assert distributions("core.in", f"{kind}.in") <= distributions(f"{kind}.txt")


def pins(kind: str) -> dict[str, str]:
    """Package → version in a pinned file."""
    pins = re.findall(r"^([\w.-]+)==([^\s;]+)", (ROOT / f"requirements/{kind}.txt").read_text(), re.M)
    return {normalised(name): version for name, version in pins}


def test_no_two_gpu_packages_bring_the_same_file(tmp_path: Path) -> None:
    """uv installs in parallel, so the last one written would win. Only wheels of CUDA's Python modules (100 MB); the
    libraries have a folder each."""
    shared = [
        f"{name}=={version}" for name, version in pins("gpu").items() if name.startswith(("cuda-", "nvidia-cutlass"))
    ]
    command = [Path(sys.executable).with_name("uv"), "pip", "install", "-q", "--no-deps", "--target", tmp_path]
    platform = ["--python-platform", "x86_64-manylinux_2_28", "--python-version", "3.11"]
    subprocess.run([*command, *platform, *shared], check=True, timeout=300)
    owners: dict[str, list[str]] = {}
    for record in tmp_path.glob("*.dist-info/RECORD"):
        for line in record.read_text().splitlines():
            owners.setdefault(line.partition(",")[0], []).append(record.parent.name)
    assert len(owners) > 500 and [path for path, owned in owners.items() if len(owned) > 1] == []


@pytest.mark.parametrize("python", ["3.11", "3.12"])
def test_gpu_pins_satisfy_each_other(python: str, tmp_path: Path) -> None:
    """Those of the CPU are made from another torch, which asks for less."""
    command = [Path(sys.executable).with_name("uv"), "pip", "compile", "-q", "requirements/core.in"]
    command += ["requirements/gpu.in", "-c", "requirements/gpu.txt", "-o", tmp_path / "all.txt"]
    platform = ["--python-version", python, "--python-platform", "x86_64-manylinux_2_31"]
    done = subprocess.run([*command, *platform], cwd=ROOT, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr


LEFT_OUT = {"gradio"}
"""What openenv-core lists for its web page, which no test opens."""


@pytest.mark.parametrize("kind", ["cpu", "gpu"])
@pytest.mark.parametrize("extra", ["agents.txt", "environments.txt", "openenv.txt"])
def test_extras_need_no_other_packages(kind: str, extra: str) -> None:
    """Extras are installed without dependencies; their own pins and those of the core satisfy them."""
    known = pins(kind) | pins(extra.removesuffix(".txt"))
    names = distributions(extra)
    if not names <= {normalised(one.name) for one in metadata.distributions()}:
        pytest.skip(f"requirements/{extra} is not installed; make dev installs it")
    for requirement in (line for name in names for line in requires(name) or ()):
        needed = Requirement(requirement)
        if needed.name not in LEFT_OUT and (needed.marker is None or needed.marker.evaluate({"extra": ""})):
            assert known.get(normalised(needed.name), "none") in needed.specifier, requirement


def test_core_imports_without_extras() -> None:
    blocked = "; ".join(f"sys.modules[{name!r}] = None" for name in ("gymnasium", "reasoning_gym"))
    code = f"import sys; {blocked}; import trinity_core.workflows"
    subprocess.run([sys.executable, "-c", code], check=True)
