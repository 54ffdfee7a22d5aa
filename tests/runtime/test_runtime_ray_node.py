"""Joining a Ray cluster that others started, with the token that its head asks for."""

from __future__ import annotations

import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from runtime.ray_clusters import ray_cluster

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
def head() -> Iterator[tuple[str, dict[str, str]]]:
    """The address of an ordinary Ray head, and the environment of its user."""
    folder = Path(tempfile.mkdtemp(prefix="ray"))  # its sockets' paths are limited to 107 characters
    try:
        with ray_cluster(folder, nodes=1) as cluster:
            yield cluster
    finally:
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
