"""Joining a Ray cluster that others started, with the token that its head asks for."""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from trinity_core.addresses import free_port
from trinity_core.errors import TransientFault
from trinity_core.runtime.ray_node import reach

JOIN = """
import sys
from trinity_core.config import config_from_dict
from trinity_core.errors import TransientFault, TrinityError
from trinity_core.runtime.cluster import close_cluster, open_cluster
tasks = {"taskset": {"path": "tasks.jsonl"}, "eval_tasksets": [{"path": "tasks.jsonl"}]}
config = config_from_dict({
    "model": {"model_path": "m", "max_model_len": 8}, "mode": "bench", "buffer": {"explorer_input": tasks},
    "cluster": {"ray_address": sys.argv[1], "gpu_per_node": 0},
})
import ray, time
began = time.monotonic()
try:
    cluster = open_cluster(config, 0)
except TrinityError as error:
    print("refused", round(time.monotonic() - began, 1), error)
else:
    print("joined", round(time.monotonic() - began, 1), cluster.nodes, cluster.alive())
    close_cluster(cluster)
"""


def test_an_address_where_nobody_answers_is_one_clear_error() -> None:
    began = time.monotonic()
    with pytest.raises(TransientFault, match=r"No Ray cluster answers at 127\.0\.0\.1:\d+ \(cluster\.ray_address\)"):
        reach(f"127.0.0.1:{free_port()}")
    assert time.monotonic() - began < 10


@pytest.fixture(scope="module")
def head(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[str, dict[str, str]]]:
    """The address of an ordinary Ray head, and the environment of its user."""
    folder = Path("/tmp") / f"ray_{os.getpid()}"
    home = tmp_path_factory.mktemp("home")
    (home / ".ray").mkdir()
    (home / ".ray/auth_token").write_text("0123456789abcdef" * 4)
    env = {name: value for name, value in os.environ.items() if not name.startswith("RAY_")} | {"HOME": str(home)}
    port = free_port()
    command = [
        str(Path(sys.executable).with_name("ray")), "start", "--head", f"--port={port}", "--num-cpus=2", "--block",
        f"--temp-dir={folder}", "--include-dashboard=false", "--object-store-memory=100000000",
    ]  # fmt: skip
    with (home / "head.log").open("w") as log:
        process = subprocess.Popen(command, env=env, stdout=log, stderr=subprocess.STDOUT, start_new_session=True)
    try:
        deadline = time.monotonic() + 60
        while "Ray runtime started" not in (home / "head.log").read_text():
            assert process.poll() is None and time.monotonic() < deadline, (home / "head.log").read_text()
            time.sleep(0.2)
        yield f"127.0.0.1:{port}", env
    finally:
        os.killpg(process.pid, signal.SIGTERM)
        try:
            process.wait(5)
        except subprocess.TimeoutExpired:
            os.killpg(process.pid, signal.SIGKILL)
            process.wait()
        shutil.rmtree(folder, ignore_errors=True)


def join(head: tuple[str, dict[str, str]], **env: str) -> str:
    address, user = head
    done = subprocess.run(
        [sys.executable, "-c", JOIN, address], env=user | env, capture_output=True, text=True, timeout=120, check=False
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


@pytest.mark.slow
@pytest.mark.timeout(300)
def test_an_ordinary_cluster_is_joined_with_its_token(head: tuple[str, dict[str, str]]) -> None:
    said = join(head)
    assert said.startswith("joined") and said.endswith("True\n"), said


@pytest.mark.slow
@pytest.mark.timeout(300)
@pytest.mark.parametrize(
    ("env", "reason"),
    [
        ({"RAY_AUTH_TOKEN": "f" * 64}, "refuses the token of RAY_AUTH_TOKEN"),
        ({"RAY_AUTH_TOKEN_PATH": "/nowhere/token"}, "/nowhere/token does not exist"),
    ],
)
def test_a_wrong_or_missing_token_is_one_clear_error(
    head: tuple[str, dict[str, str]], env: dict[str, str], reason: str
) -> None:
    said = join(head, **env)
    assert said.startswith("refused") and reason in said and said.count("\n") == 1, said
    assert float(said.split()[1]) < 10
