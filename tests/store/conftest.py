"""Stores for tests: a fresh SQLite file, and a private PostgreSQL server where its programs are installed."""

import os
import shutil
import subprocess
import tempfile
from pathlib import Path

import pytest

from trinity_core.store.store import ExperienceStore


@pytest.fixture
def store(tmp_path):
    with ExperienceStore.open(f"sqlite:///{tmp_path}/buffer/store.db") as opened:
        yield opened


@pytest.fixture(scope="session")
def postgresql_url():
    """A server of our own on a socket in a temporary folder; skipped where there is no PostgreSQL."""
    programs = sorted(Path("/usr/lib/postgresql").glob("*/bin/initdb"))
    found = programs[-1] if programs else shutil.which("initdb")
    if not found:
        pytest.skip("no PostgreSQL server is installed")
    folder = Path(tempfile.mkdtemp(prefix="pg"))
    as_user = {}
    if os.getuid() == 0:  # the server refuses to run as root
        as_user = {"user": "nobody", "group": "nogroup", "extra_groups": []}
        shutil.chown(folder, "nobody", "nogroup")
    common = {
        **as_user,
        "cwd": folder,
        "stdout": subprocess.DEVNULL,
        "env": {"LC_ALL": "C", "PATH": os.environ["PATH"]},
    }
    bin_folder = Path(found).parent
    try:
        subprocess.run(
            [found, "-D", folder / "data", "-U", "tester", "-A", "trust", "-N", "-E", "UTF8"], check=True, **common
        )
    except (OSError, subprocess.CalledProcessError) as error:
        shutil.rmtree(folder, ignore_errors=True)
        pytest.skip(f"a PostgreSQL server cannot be started here: {error}")
    options = f"-c listen_addresses='' -k {folder} -c fsync=off"
    control = [bin_folder / "pg_ctl", "-D", folder / "data", "-w", "-l", folder / "log"]
    subprocess.run([*control, "-o", options, "start"], check=True, **common)
    try:
        yield f"postgresql://tester@/postgres?host={folder}"
    finally:
        subprocess.run([*control, "-m", "immediate", "stop"], check=False, **common)
        shutil.rmtree(folder, ignore_errors=True)
