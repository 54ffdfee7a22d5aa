"""The wheel, installed in an environment of its own, does away from the repository what a clone does."""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import sys
import sysconfig
from pathlib import Path

import pytest
import yaml
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name
from ports import free_port

ROOT = Path(__file__).parents[1]
INSTALL = ROOT / "docs" / "install.md"
VERSIONS = """
from importlib.metadata import distributions
for one in distributions():
    print(one.name.lower().replace("_", "-").replace(".", "-") + "==" + one.version.split("+")[0])
"""
MAKES_A_MODEL = (
    "from pathlib import Path; from trinity_core.data.tiny import make_tiny; print(make_tiny(Path('tiny')).model)"
)
OURS = ("TRINITY_", "PREFECT_", "PYTHONPATH")
"""Variables that must not reach the installed package."""
PARTS = ("flows", "tasks", "studio", "trinity_core")
SOURCES = (
    *PARTS,
    "configs",
    "docs",
    "requirements",
    "prefect.yaml",
    "pyproject.toml",
    "setup.py",
    "README.md",
    "LICENSE",
)


def run(*command: str | Path, cwd: Path, seconds: float = 300) -> str:
    done = subprocess.run(
        [str(part) for part in command], cwd=cwd, capture_output=True, text=True, timeout=seconds,
        env={name: value for name, value in os.environ.items() if not name.startswith(OURS)},
    )  # fmt: skip
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-3000:]
    return done.stdout


@pytest.fixture(scope="module")
def wheel(tmp_path_factory) -> Path:
    source = tmp_path_factory.mktemp("source")
    for name in SOURCES:
        if (ROOT / name).is_dir():
            shutil.copytree(ROOT / name, source / name, ignore=shutil.ignore_patterns("__pycache__"))
        else:
            shutil.copy2(ROOT / name, source / name)
    pip = (sys.executable, "-m", "pip", "wheel", "-q", "--no-deps", "--no-build-isolation", "-w", "wheels", ".")
    run(*pip, cwd=source)
    [made] = (source / "wheels").iterdir()
    return made


@pytest.fixture(scope="module")
def bin_folder(wheel, tmp_path_factory) -> Path:
    """The commands of a fresh environment with the wheel. The packages that it asks for are those of this one, which
    `test_an_empty_environment_gets_the_tested_versions` compares with what it would get."""
    environment = tmp_path_factory.mktemp("environment")
    run(sys.executable, "-m", "venv", "--without-pip", environment, cwd=environment)
    [packages] = environment.glob("lib/python*/site-packages")
    (packages / "beneath.pth").write_text(sysconfig.get_path("purelib"))
    python = environment / "bin" / "python"
    run(sys.executable, "-m", "uv", "pip", "install", "-q", "--no-deps", "--python", python, wheel, cwd=environment)
    return environment / "bin"


@pytest.mark.slow
def test_an_empty_environment_gets_the_tested_versions(wheel, tmp_path):
    """By the command of docs/install.md, with torch from where `requirements/install.sh` takes it; it makes a model."""
    pip = (sys.executable, "-m", "pip", "config", "get", "global.find-links")
    links = os.environ.get("PIP_FIND_LINKS") or subprocess.run(pip, capture_output=True, text=True).stdout
    torch = [f"--find-links={link}" for link in links.split()] or ["--torch-backend", "cpu"]
    [command] = re.findall(r"^uv (pip install --torch-backend cpu .*?) '.*\[cpu\]'", INSTALL.read_text(), re.MULTILINE)
    options = command.replace("--torch-backend cpu", " ".join(torch)).split()
    for name in ("cpu.txt", "overrides.txt"):
        shutil.copy2(ROOT / "requirements" / name, tmp_path)
    run(sys.executable, "-m", "venv", "--without-pip", "empty", cwd=tmp_path)
    python = tmp_path / "empty" / "bin" / "python"
    run(sys.executable, "-m", "uv", *options, "-q", "--python", python, f"{wheel}[cpu]", cwd=tmp_path, seconds=500)
    got = set(run(python, "-c", VERSIONS, cwd=tmp_path).split())
    tested = set(re.findall(r"^[\w.-]+==[\w.]+", (tmp_path / "cpu.txt").read_text(), re.MULTILINE))
    # Before Python 3.11.3 async-timeout is needed.
    differing = {pin for pin in got | tested if pin.startswith(("async-timeout==", "trinity-flows=="))}
    assert got - differing == tested - differing
    made = run(python, "-c", MAKES_A_MODEL, cwd=tmp_path)
    assert (tmp_path / made.strip() / "model.safetensors").exists()


@pytest.fixture(scope="module")
def project(bin_folder, tmp_path_factory) -> Path:
    run(bin_folder / "trinity", "init", "my-rft", cwd=(folder := tmp_path_factory.mktemp("project")))
    return folder / "my-rft"


def test_a_project_has_the_recipes_of_a_clone(bin_folder, project):
    recipes = sorted(path.relative_to(ROOT) for path in (ROOT / "configs").rglob("*.yaml"))
    assert sorted(path.relative_to(project) for path in (project / "configs").rglob("*.yaml")) == recipes
    assert (project / "configs/schema.json").exists() and (project / "docs/configuration.md").exists()
    imported = run(bin_folder / "python", "-c", "import flows; print(flows.__file__)", cwd=project)
    assert Path(imported.strip()).is_relative_to(bin_folder.parent)  # not this repository's
    for name in ("trinity", "trinity-flows"):
        run(bin_folder / name, "validate", "--offline", "--config", "configs/frozen_lake/frozen_lake.yaml", cwd=project)


def test_studio_has_the_recipes_too(bin_folder, project):
    code = (
        "from pathlib import Path; from studio.recipes import recipes\n"
        "here = Path.cwd()\n"
        "for recipe in recipes():\n"
        "    print(recipe.title, 'plugin_dir: configs/toy_text' in recipe.text_for(here / 'mine.yaml', here))"
    )
    plugin_of = dict(line.split() for line in run(bin_folder / "python", "-c", code, cwd=project).splitlines())
    assert len(plugin_of) == len([*(ROOT / "configs").glob("*/*.yaml")])
    assert {name for name, is_found in plugin_of.items() if is_found == "True"} == {"blackjack", "frozen_lake"}


def test_a_project_is_not_written_over_anothers_files(bin_folder, project):
    (project / "prefect.yaml").write_text(before := (project / "prefect.yaml").read_text())
    with pytest.raises(AssertionError):
        run(bin_folder / "trinity", "init", ".", cwd=project)
    assert (project / "prefect.yaml").read_text() == before


@pytest.fixture(scope="module")
def quick_start(bin_folder, project) -> str:
    """What it prints, with few steps, tokens and tasks to score: what it learns is not looked at."""
    (project / "few").mkdir()
    (project / "few/test.jsonl").write_text(8 * '{"question": "What is 2 + 2?", "answer": "#### 4"}\n')
    recipe = yaml.safe_load((project / "configs/quickstart/quickstart.yaml").read_text())
    for stage in (recipe, *recipe["stages"]):
        stage.setdefault("buffer", {}).update(total_steps=2, batch_size=4)
    recipe["stages"][0]["buffer"]["train_batch_size"] = 8
    [evaluated] = recipe["buffer"]["explorer_input"]["eval_tasksets"]
    evaluated["path"] = "few"
    recipe["model"]["max_response_tokens"] = 8
    recipe["trainer"] |= {"save_interval": 2, "worker_num": 1}
    recipe["explorer"]["rollout_model"]["engine_num"] = 1
    (project / "short.yaml").write_text(yaml.safe_dump(recipe))
    command = ("sh", "-c", '"$0" quickstart --config short.yaml 2>&1', bin_folder / "trinity")
    return run(*command, cwd=project, seconds=400)


@pytest.mark.slow
def test_the_quick_start_runs_in_a_project(quick_start, project):
    assert "Beginning flow run" in quick_start and "http://" not in quick_start, "no page is left when it has ended"
    summary = json.loads((project / "runs/quickstart/summary.json").read_text())
    assert summary["steps"] == {"sft": 2, "rft": 2} and (project / summary["hf_dir"] / "model.safetensors").exists()


def test_up_refuses_a_module_that_hides_one_of_its_own(bin_folder, tmp_path):
    (tmp_path / "prefect.yaml").touch()
    (tmp_path / "tasks.py").touch()
    with pytest.raises(AssertionError, match=r"tasks\.py"):
        run(bin_folder / "trinity", "up", "--port", str(free_port()), cwd=tmp_path)


def test_the_wheel_asks_for_what_the_requirements_name(bin_folder, tmp_path):
    """`tests/test_install.py` compares those with imports and pins."""
    asked_for = "from importlib.metadata import requires; print(*requires('trinity-flows'), sep='\\n')"
    asked = [Requirement(line) for line in run(bin_folder / "python", "-c", asked_for, cwd=tmp_path).splitlines()]
    for extra, file in (
        ("", "core.in"),
        ("cpu", "cpu.in"),
        ("agents", "agents.txt"),
        ("environments", "environments.txt"),
    ):
        lines = (ROOT / "requirements" / file).read_text().splitlines()
        named = {canonicalize_name(Requirement(line).name) for line in lines if line and not line.startswith("#")}
        of_extra = [one for one in asked if (one.marker is None) == (not extra)]
        applying = {one.name for one in of_extra if one.marker is None or one.marker.evaluate({"extra": extra})}
        assert {canonicalize_name(name) for name in applying} == named, file
