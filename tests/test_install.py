"""`requirements/install.sh` with a stand-in for Python: what it does about an environment that it finds."""

from __future__ import annotations

import os
import shutil
import subprocess
from pathlib import Path

import pytest

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
    shutil.copy(ROOT / "requirements/install.sh", tmp_path / "requirements")
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


def test_an_environment_is_made_once(root: Path) -> None:
    assert [install(root), install(root)] == [1, 0]
    (root / "pyproject.toml").write_text("# other pins")
    assert install(root) == 0


@pytest.mark.parametrize("left", [WITHOUT_PIP, "#!/nowhere/python\n"])
def test_an_environment_that_was_cut_short_is_made_anew(left: str, root: Path) -> None:
    program(root / ".venv/bin/python", left)
    assert install(root) == 1
