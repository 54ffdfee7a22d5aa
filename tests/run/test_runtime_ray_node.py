"""Joining a Ray cluster that others started, with the token that its head asks for."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest
import yaml
from ports import free_port
from run.ray_clusters import ray_cluster

from trinity_core.base.errors import TransientFault, TrinityError
from trinity_core.data.tiny import TinyFolders
from trinity_core.exchange.tracking.metrics_file import MetricLine, read_metrics
from trinity_core.hosting import ray_node
from trinity_core.hosting.ray_node import _token, join_ray
from trinity_core.results.audit import audit_runs

ROOT = Path(__file__).parent.parent.parent
JOIN = """
import sys
from trinity_core.config import config_from_dict
from trinity_core.base.errors import TransientFault, TrinityError
from trinity_core.hosting.cluster import open_cluster
tasks = {"taskset": {"path": "tasks.jsonl"}, "eval_tasksets": [{"path": "tasks.jsonl"}]}
config = config_from_dict({
    "model": {"model_path": "m", "max_model_len": 8}, "mode": "bench", "buffer": {"explorer_input": tasks},
    "cluster": {"ray_address": sys.argv[1], "gpu_per_node": 0},
})
import ray, time
began = time.monotonic()
try:
    open_cluster(config, 0)
except TrinityError as error:
    print("refused", round(time.monotonic() - began, 1), error)
"""


def test_an_address_where_nobody_answers_is_one_clear_error() -> None:
    with pytest.raises(TransientFault):
        join_ray(f"127.0.0.1:{free_port()}", "trinity")


START = """
import os, signal, time
from trinity_core.hosting.ray_node import RayNode, start_ray
start_ray("trinity", cpus=1, gpus=0)
import ray
assert RayNode.of_this_process(is_own=True).alive()

class Actor:
    def __init__(self):
        self.heard = []
        signal.signal(signal.SIGTERM, lambda *_: self.heard.append(1))  # in Ray's place, as a trainer does

    def token(self):
        os.kill(os.getpid(), signal.SIGTERM)
        time.sleep(0.1)
        assert self.heard
        return os.environ.get("RAY_AUTH_TOKEN")

assert len(ray.get(ray.remote(num_cpus=0)(Actor).remote().token.remote(), timeout=120)) == 64
ray.shutdown()
"""


@pytest.mark.slow
def test_ray_starts_without_a_home_beside_a_proxy_and_in_odd_folders(tmp_path: Path) -> None:
    """As in a container of a user without an account, and where each job has a temporary folder of its own: Ray keeps
    its token in the home, its sockets in the temporary folder, and gRPC would ask the proxy for this machine. The path
    of Python has a space."""
    folder = tmp_path / ("long" * 20)
    (tmp_path / "my venv").symlink_to(sys.prefix)
    folder.mkdir()
    away = f"http://127.0.0.1:{free_port()}"
    odd = {"HOME": "/proc/none", "TMPDIR": str(folder), "http_proxy": away, "https_proxy": away, "no_proxy": ""}
    kept = {name: value for name, value in os.environ.items() if not name.startswith("RAY_") and name != "NO_PROXY"}
    done = subprocess.run(
        [tmp_path / "my venv/bin/python", "-c", START],
        env=kept | odd,
        capture_output=True,
        text=True,
        timeout=240,
        check=False,
    )
    assert done.returncode == 0, done.stderr[-3000:]


TAKE = """
import os
from trinity_core.config import config_from_dict
from trinity_core.hosting import gpus
from trinity_core.hosting.cluster import Cluster
from trinity_core.hosting.placement import Machine
gpus.survey = lambda: [gpus.Gpu(str(n), f"GPU-none-{n}", processes=(7,) * (n < 4)) for n in range(8)]
tasks = {"taskset": {"path": "tasks.jsonl"}}
config = config_from_dict({"model": {"model_path": "m", "max_model_len": 8, "max_response_tokens": 4},
                           "buffer": {"explorer_input": tasks}})
import ray

class Actor:
    def shown(self):
        return os.environ["CUDA_VISIBLE_DEVICES"]

cluster = Cluster(config, Machine(1, 4))
cluster.open()
shown = ray.get(cluster.actor(Actor, "a", gpus=4).shown.remote(), timeout=120)
print(sorted(shown.split(",")), "CUDA_VISIBLE_DEVICES" in os.environ)
cluster.close()
"""


@pytest.mark.slow
def test_own_ray_assigns_the_gpus_that_are_free() -> None:
    folder = Path(tempfile.mkdtemp(prefix="ray"))
    environment = {name: value for name, value in os.environ.items() if name != "CUDA_VISIBLE_DEVICES"}
    try:
        done = subprocess.run(
            [sys.executable, "-c", TAKE],
            env=environment | {"RAY_TMPDIR": str(folder)},
            capture_output=True,
            text=True,
            timeout=240,
            check=False,
        )
    finally:
        shutil.rmtree(folder, ignore_errors=True)
    assert done.stdout == "['4', '5', '6', '7'] False\n", done.stderr[-3000:]


@pytest.fixture(scope="module")
def head() -> Iterator[tuple[str, dict[str, str]]]:
    """The address of an ordinary Ray head, and the environment of its user."""
    folder = Path(tempfile.mkdtemp(prefix="ray"))  # its sockets' paths are limited to 107 characters
    try:
        with ray_cluster(folder, nodes=1) as cluster:
            yield cluster
    finally:
        shutil.rmtree(folder, ignore_errors=True)


@pytest.mark.slow
@pytest.mark.timeout(300)
def test_a_wrong_token_is_one_clear_error(head: tuple[str, dict[str, str]]) -> None:
    address, user = head
    env = user | {"RAY_AUTH_TOKEN": "f" * 64}
    done = subprocess.run(
        [sys.executable, "-c", JOIN, address], env=env, capture_output=True, text=True, timeout=120, check=False
    )
    assert done.returncode == 0, done.stderr
    said = done.stdout
    assert said.startswith("refused") and "refuses the token of RAY_AUTH_TOKEN" in said and said.count("\n") == 1, said
    assert float(said.split()[1]) < 10


EARLIER = {
    "its own Ray": """
from trinity_core.config import config_from_dict
from trinity_core.hosting.cluster import close_cluster, open_cluster
tasks = {"explorer_input": {"taskset": {"path": "tasks.jsonl"}}}
values = {"mode": "explore", "model": {"model_path": "m", "max_model_len": 8}, "buffer": tasks}
close_cluster(open_cluster(config_from_dict(values), 0))
""",
    "an import of ray": "import ray",  # the survey of this machine's GPUs does too
}
THEN_JOIN = """
import sys
from trinity_core.hosting.ray_node import join_ray
join_ray(sys.argv[1], "trinity")
import ray
assert ray.get(ray.remote(num_cpus=0)(lambda: 1).remote(), timeout=60) == 1
"""


@pytest.mark.slow
@pytest.mark.parametrize("earlier", EARLIER)
def test_a_process_that_has_used_ray_joins_a_cluster(earlier: str, head: tuple[str, dict[str, str]]) -> None:
    """With the token of that cluster."""
    address, env = head
    join(EARLIER[earlier] + THEN_JOIN, address, env)


@pytest.mark.slow
def test_a_cluster_with_tls_is_joined_with_its_certificates(monkeypatch: pytest.MonkeyPatch) -> None:
    with tempfile.TemporaryDirectory(prefix="ray") as folder, ray_cluster(Path(folder), 1, tls=True) as (address, env):
        join(THEN_JOIN, address, env)
        monkeypatch.setenv("RAY_USE_TLS", "1")
        monkeypatch.setenv("RAY_TLS_SERVER_CERT", env["RAY_TLS_SERVER_CERT"])
        with pytest.raises(TrinityError):
            join_ray(address, "trinity")


def join(code: str, address: str, env: dict[str, str]) -> None:
    command = [sys.executable, "-c", code, address]
    done = subprocess.run(command, env=env, capture_output=True, text=True, timeout=120, check=False)
    assert done.returncode == 0, done.stderr[-3000:]


def test_a_missing_token_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("RAY_AUTH_TOKEN", raising=False)
    monkeypatch.setenv("RAY_AUTH_TOKEN_PATH", "/nowhere/token")
    with pytest.raises(TrinityError):
        _token("10.0.0.1:6379")


STEPS, SAVE_INTERVAL, TASKS, REPEATS = 4, 2, 4, 4


def start(root: Path, env: dict[str, str], config: dict[str, Any], name: str) -> subprocess.Popen[str]:
    path = root / f"{name}.yaml"
    path.write_text(yaml.safe_dump(config))
    command = [sys.executable, "-m", "trinity_core.run", "--config", str(path)]
    return subprocess.Popen(command, cwd=root, env=env, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)


def trainer_worker() -> psutil.Process:
    """The one on the cluster that this process started."""
    [worker] = [
        process for process in psutil.Process().children(recursive=True) if process.name().startswith("ray::Trainer")
    ]
    return worker


def lines_of(job: Path, source: str) -> list[MetricLine]:
    return [line for line in read_metrics(job) if line.source == source]


@pytest.mark.slow
def test_separate_runs_share_a_cluster_and_postgresql(
    head: tuple[str, dict[str, str]], tmp_path: Path, tiny_folders: TinyFolders, postgresql_url: str
) -> None:
    """An explorer and a trainer, which join with the cluster's token. Its worker dies; it returns to its checkpoint,
    and the explorer to the steps of then. Two explorers: `tests/rollout/test_rollout_explorer.py`."""
    address, env = head
    data = {"path": str(tiny_folders.data), "format": {"prompt_key": "question", "response_key": "answer"}}
    common: dict[str, Any] = {
        "project": "p",
        "name": "n",
        "checkpoint_root_dir": str(tmp_path),
        "algorithm": {"algorithm_type": "grpo", "repeat_times": REPEATS},
        "model": {"model_path": str(tiny_folders.model), "max_prompt_tokens": 88, "max_response_tokens": 12},
        "cluster": {"gpu_per_node": 0, "ray_address": address},
        "buffer": {
            "batch_size": TASKS,
            "total_steps": STEPS,
            "explorer_input": {"taskset": data},
            "trainer_input": {"experience_buffer": {"path": postgresql_url}},
        },
        "explorer": {"rollout_model": {"enforce_eager": True, "kv_cache_gib": 0.5}},
        "synchronizer": {"sync_method": "checkpoint", "sync_style": "trainer_driven", "max_staleness": 2},
        "trainer": {"save_interval": SAVE_INTERVAL},
        "monitor": {"monitor_type": "tensorboard"},
    }
    longer = {"mode": "explore", "buffer": common["buffer"] | {"total_steps": 20 * STEPS}}
    named = {"explorer": common["explorer"] | {"name": "first"}}
    files = {"first": common | longer | named, "trainer": common | {"mode": "train"}}
    job, env = tmp_path / "p/n", env | {"PYTHONPATH": str(ROOT)}
    runs = {name: start(tmp_path, env, config, name) for name, config in files.items()}
    try:
        while len(lines_of(job, "trainer")) < SAVE_INTERVAL + 1 and all(run.poll() is None for run in runs.values()):
            time.sleep(0.05)
        ended = {name: run.communicate() for name, run in runs.items() if run.poll() is not None}
        assert not ended, ended
        trainer_worker().kill()
        said = {name: run.communicate(timeout=300) for name, run in runs.items()}
    finally:
        for run in runs.values():
            run.kill()
            run.wait()
    assert not any(run.returncode for run in runs.values()), said
    assert "the trainer returns to its latest checkpoint (1 of 3)" in said["trainer"][1]
    assert f"the trainer has finished all its {STEPS} steps" in said["first"][0]
    [audit] = audit_runs(job, url=postgresql_url).values()
    assert audit.clean and audit.checkpoint == STEPS and audit.lineage >= 1, audit
    assert set(audit.trained_at) == set(range(1, STEPS + 1))
    trained = lines_of(job, "trainer")
    assert [line.step for line in trained] == list(range(1, STEPS + 1))
    assert max(line.metrics["staleness/max"] for line in trained) <= 2
    assert lines_of(job, "explorer.first")


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can give a folder away")
def test_a_temporary_folder_of_another_account_is_not_used(monkeypatch: pytest.MonkeyPatch) -> None:
    """Who owns it could replace the sockets of our Ray."""
    with tempfile.TemporaryDirectory(dir="/tmp") as folder:
        monkeypatch.setenv("RAY_TMPDIR", folder)
        own = ray_node.private_temporary()
        assert own.stat().st_mode & 0o777 == 0o700 and ray_node.private_temporary() == own
        os.chown(own, 65534, 65534)
        other = ray_node.private_temporary()
        assert other != own and (other.stat().st_uid, other.stat().st_mode & 0o777) == (0, 0o700)
