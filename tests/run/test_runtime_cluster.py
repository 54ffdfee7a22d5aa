"""The Ray that a run starts for itself."""

from __future__ import annotations

import os
import sys
import threading
import time
from contextlib import nullcontext
from ipaddress import ip_address
from itertools import chain, repeat
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest import mock

import psutil
import pytest

from trinity_core.base.errors import TransientFault, TrinityError
from trinity_core.base.waits import poll
from trinity_core.config import Config, LoraConfig, config_from_dict
from trinity_core.config.paths import engine_name
from trinity_core.exchange.tracking.logs import log_environment
from trinity_core.hosting import actors
from trinity_core.hosting import cluster as cluster_room
from trinity_core.hosting.actors import Actors
from trinity_core.hosting.cluster import Cluster, close_cluster, open_cluster, placement_of
from trinity_core.hosting.faults import result_of
from trinity_core.hosting.placement import Machine, place
from trinity_core.hosting.ray_node import RayNode
from trinity_core.rollout.explorer import Explorer
from trinity_core.rollout.inference.requests import EngineLost, WeightSource


class Sleeper:
    def family(self) -> int:
        return os.getpid()

    def compute(self) -> None:
        """Forever, without an answer to Ray."""
        while True:
            pass


class Ended(list):
    """In place of Ray's end of an actor."""

    def kill(self, actors: list[Any]) -> None:
        self.extend(actors)


def test_kept_actors_are_reused_if_they_fit_or_else_end(monkeypatch: pytest.MonkeyPatch) -> None:
    cluster, ended = Cluster(small_config(), Machine(1, 0)), Ended()
    monkeypatch.setattr(cluster, "kill", ended.kill)
    cluster.leave("engines", ("a", 2), ["e1", "e2"])
    cluster.leave("trainers", 1, ["t1"])
    assert cluster.take("engines", ("a", 2)) == ["e1", "e2"] and cluster.take("engines", ("a", 2)) == []
    assert cluster.take("trainers", 2) == [] and ended == ["t1"]
    cluster.leave("engines", "a", ["e1"])
    cluster.leave("engines", "b", ["e2"])
    assert ended == ["t1", "e1"] and cluster.take("engines", "b") == ["e2"]


def test_an_explorer_sets_its_variables_itself(monkeypatch: pytest.MonkeyPatch) -> None:
    """They may be keys, and Ray writes an actor's variables to a log that everybody can read."""
    monkeypatch.setenv("JUDGE_API_KEY", "another")
    monkeypatch.setenv("PYTHONPATH", "")
    config = small_config(explorer={"env_vars": {"JUDGE_API_KEY": "hunter2", "PYTHONPATH": "helpers"}})
    variables: dict[str, str] = {}
    cluster: Any = SimpleNamespace(actor=lambda *_, env, **__: variables.update(env))
    Actors(cluster, config, place(config, Machine(1, 0))).start_explorer([], [])
    assert variables["PYTHONPATH"] == "helpers", "which Python reads as it starts"
    assert "JUDGE_API_KEY" not in variables
    Explorer(config, [])
    assert os.environ["JUDGE_API_KEY"] == "hunter2"


@pytest.mark.parametrize("lora", [False, True])
def test_kept_engines_take_the_adapter_out_or_load_the_model(lora: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """An adapter's engines have the base already, which may be a hub name or no safetensors. They log where engines
    that this stage had started itself would."""
    config = small_config().with_values({"model.model_path": "org/name"})
    if lora:
        config = config.with_values({"model.lora_configs": (LoraConfig(),)})
    placement, cluster, loaded = place(config, Machine(1, 0)), Cluster(config, Machine(1, 0)), list[WeightSource]()
    logs: list[dict[str, str]] = []
    engine = SimpleNamespace(
        load=SimpleNamespace(remote=lambda source, version: loaded.append(source)),
        move_log=SimpleNamespace(remote=logs.append),
    )
    own = Actors(cluster, config, placement)
    cluster.leave("engines", own.engine_key(), [engine])
    monkeypatch.setattr(actors, "_are_ready", lambda cluster, kept, load: [load()])
    monkeypatch.setattr(actors, "results_of", lambda *_: None)
    assert own.start_engines() == [engine]
    assert loaded == [WeightSource("folder", "" if lora else str(Path("org/name").absolute()))]
    assert logs == [log_environment(config, engine_name(config, 0))]


@pytest.mark.parametrize(("error", "replaced"), [(EngineLost("no memory"), True), (TrinityError("no model"), False)])
def test_kept_engines_that_cannot_load_are_ended(
    error: Exception, replaced: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A lost one is replaced; in any case its memory is given up."""
    config = small_config()
    placement, cluster, ended = place(config, Machine(1, 0)), Cluster(config, Machine(1, 0)), Ended()
    monkeypatch.setattr(cluster, "kill", ended.kill)

    def load(*_: Any) -> None:
        raise error

    monkeypatch.setattr(actors, "take_over", load)
    monkeypatch.setattr(Actors, "_start_engine", lambda *_: "new")
    own = Actors(cluster, config, placement)
    cluster.leave("engines", own.engine_key(), ["kept"])
    with nullcontext() if replaced else pytest.raises(type(error)):
        assert own.start_engines() == ["new"]
    assert ended == ["kept"]


class JoinedRay:
    """In place of the cluster that is joined: `gpus` of each of its nodes, of which `used` are taken."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, *gpus: int) -> None:
        import ray

        self.gpus, self.used, self.joined = list(gpus), 0, 0
        monkeypatch.setattr("trinity_core.hosting.cluster.join_ray", lambda address, namespace: self.init(address))
        node = RayNode("", "", is_own=False)
        monkeypatch.setattr(RayNode, "of_this_process", classmethod(lambda cls, is_own: node))
        monkeypatch.setattr("trinity_core.hosting.cluster._had_room", set())
        for name in ("shutdown", "nodes", "cluster_resources", "available_resources", "is_initialized"):
            monkeypatch.setattr(ray, name, getattr(self, name))

    def init(self, address: str) -> None:
        assert address == "10.0.0.1:6379"
        self.joined += 1

    def shutdown(self) -> None:
        self.joined -= 1

    def is_initialized(self) -> bool:
        return self.joined > 0

    def nodes(self) -> list[dict[str, Any]]:
        lost = {"Alive": False, "Resources": {}}
        return [lost, *({"Alive": True, "Resources": {"CPU": 16.0, "GPU": float(count)}} for count in self.gpus)]

    def cluster_resources(self) -> dict[str, float]:
        return {"GPU": float(sum(self.gpus))}

    def available_resources(self) -> dict[str, float]:
        return {"GPU": float(sum(self.gpus) - self.used)}


def test_the_gpus_are_those_of_the_cluster_that_is_joined(monkeypatch: pytest.MonkeyPatch) -> None:
    from raising import raising  # here, as Ray's workers import this file, and would not find that one

    ray = JoinedRay(monkeypatch, 8, 4)
    placed = placement_of(joining(engine_num=8))
    assert (placed.gpu_per_node, placed.engines, placed.gpus) == (4, 8, 8)
    assert ray.joined == 0
    with raising(TrinityError, key="explorer.rollout_model.engine_num"):
        placement_of(joining(engine_num=9))
    ray.gpus.pop()
    with raising(TrinityError, key="cluster.node_num"):
        placement_of(joining(engine_num=1))
    assert ray.joined == 0


def test_a_later_attempt_waits_for_a_node_that_was_lost(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """A permanent error would take away the retries that the loss of a node is worth."""
    ray = JoinedRay(monkeypatch, 4, 4)
    monkeypatch.setattr("trinity_core.hosting.cluster.LOOK_SECONDS", 0.05)
    close_cluster(open_cluster(joining(engine_num=8), 4))
    ray.gpus.pop()
    threading.Timer(0.3, ray.gpus.append, [4]).start()
    assert placement_of(joining(engine_num=8)).gpus == 8
    assert "cluster.node_num asks for 2 nodes" in caplog.text
    ray.gpus.pop()
    monkeypatch.setattr("trinity_core.hosting.cluster.AGAIN_SECONDS", 0.2)
    with pytest.raises(TransientFault):
        placement_of(joining(engine_num=8))
    assert ray.joined == 0


def test_a_run_that_needs_too_many_gpus_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    ray = JoinedRay(monkeypatch, 4, 4)
    ray.used = 3
    monkeypatch.setattr("ray.nodes", lambda: [{"Alive": True, "Resources": {"GPU": 8.0}}] * 2)
    with pytest.raises(TrinityError):
        open_cluster(joining(engine_num=9), 8)
    assert ray.joined == 0


def test_actors_that_another_thread_has_seen_start(monkeypatch: pytest.MonkeyPatch) -> None:
    """It takes them out of the list while this one looks; `ray.wait` refuses a number other than it is given."""

    class Shared(dict):
        def __iter__(self):
            yield from list(super().__iter__())
            self.clear()

    def wait(refs, num_returns, timeout):
        assert 0 < num_returns <= len(refs)
        return refs, []

    cluster = Cluster(small_config(), Machine(1, 0))
    monkeypatch.setattr(cluster, "alive", lambda: True)
    monkeypatch.setattr("ray.wait", wait)
    cluster._placing = Shared(a=("n/a", time.monotonic()))
    cluster.check()
    assert not cluster._placing


@pytest.mark.campaign
@pytest.mark.slow
@pytest.mark.timeout(300)
def test_a_ray_that_died_is_replaced_when_used_again(monkeypatch: pytest.MonkeyPatch) -> None:
    """Its raylet is killed, as the kernel does for lack of memory; an earlier user keeps the cluster open meanwhile.

    An actor that is at work ends with it: it would hold the locks of its run.
    """
    import ray

    config = small_config()
    cluster = open_cluster(config, 0)
    try:
        env = {"PYTHONPATH": str(Path(__file__).parent)}
        first = cluster.actor(Sleeper, "first", env=env)
        at_work = psutil.Process(ray.get(first.family.remote(), timeout=60))
        assert at_work.nice() == psutil.Process().nice()
        assert cluster.alive()
        monkeypatch.setattr("trinity_core.hosting.cluster.NAME_SECONDS", 0.0)
        with pytest.raises(TrinityError):
            cluster.actor(Sleeper, "first", env=env)
        [raylet] = [child for child in psutil.Process().children() if child.name() == "raylet"]
        first.compute.remote()
        time.sleep(1.0)
        raylet.kill()
        began = time.monotonic()
        assert psutil.wait_procs([at_work], timeout=15)[1] == []
        with pytest.raises(TransientFault):
            result_of(cluster.actor(Sleeper, "second", env=env).family.remote(), cluster.check)
        assert time.monotonic() - began < 30
        again = open_cluster(config, 0)
        assert again is cluster and cluster.alive()
        assert ray.get(cluster.actor(Sleeper, "first", env=env).family.remote(), timeout=60)
        close_cluster(again)
    finally:
        close_cluster(cluster)
    assert not ray.is_initialized()


@pytest.mark.campaign
@pytest.mark.slow
@pytest.mark.timeout(300)
def test_our_ray_listens_on_the_loopback_interface_only(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """And runs nothing that a single machine has no use for. Python lies in a folder whose name has a space.

    At first the node does not come up within Ray's 30 s, as on a busy machine: nothing of it is left for the next
    attempt. In the end the raylet is stopped, and answers nobody.
    """
    import ray
    from ray._private import services

    python = tmp_path / "my python/python"
    python.parent.mkdir()
    python.write_text(f'#!/bin/sh\nexec "{sys.executable}" "$@"\n')
    python.chmod(0o755)
    monkeypatch.setattr(sys, "executable", str(python))
    late = Exception("The current node timed out during startup.")
    get_node = mock.Mock(side_effect=chain([late], repeat(mock.DEFAULT)), wraps=services.get_node)
    monkeypatch.setattr(services, "get_node", get_node)
    cluster = Cluster(small_config(), Machine(1, 0))
    known = set(psutil.Process().children(recursive=True))
    try:
        with pytest.raises(TransientFault):
            cluster.open()
        cluster.open()
        actor = cluster.actor(Sleeper, "sleeper", env={"PYTHONPATH": str(Path(__file__).parent)})
        ray.get(actor.family.remote())
        time.sleep(2.0)  # until all of them listen
        for _ in poll(60):
            family = [psutil.Process(), *(set(psutil.Process().children(recursive=True)) - known)]
            names = [Path(line.split()[0]).name for line in map(command_line, family) if line]
            if names.count("raylet") == names.count("gcs_server") == 1:
                break
        else:
            pytest.fail(f"the late one's have not gone: {names}")
        commands = " ".join(command_line(process) for process in family)
        assert "raylet" in commands and "monitor.py" not in commands
        assert cluster._node is not None
        sockets = Path(cluster._node.raylet)
        assert any(folder.stat().st_mode & 0o077 == 0 for folder in sockets.parents), "Ray lets everybody write there"
        places = {(process.name(), end.laddr.ip) for process in family for end in listening(process)}
        monkeypatch.setattr(cluster_room, "SHUTDOWN_SECONDS", 3.0)
        next(process for process in family if process.name() == "raylet").suspend()
    finally:
        cluster.close()
    assert not set(psutil.Process().children()) - known
    assert places and not {place for place in places if not is_loopback(place[1])}


def small_config(**sections: Any) -> Config:
    model = {"model_path": "m", "max_model_len": 8}
    return config_from_dict({"model": model, "mode": "bench", "buffer": TASKS, **sections})


def joining(engine_num: int) -> Config:
    """A run on two nodes of another's Ray."""
    cluster = {"node_num": 2, "ray_address": "10.0.0.1:6379"}
    return small_config(cluster=cluster, explorer={"rollout_model": {"engine_num": engine_num}})


TASKS = {"explorer_input": {"taskset": {"path": "tasks.jsonl"}, "eval_tasksets": [{"path": "tasks.jsonl"}]}}


def command_line(process: psutil.Process) -> str:
    try:
        return " ".join(process.cmdline())
    except psutil.Error:  # it has ended
        return ""


def listening(process: psutil.Process) -> list[Any]:
    try:
        return [connection for connection in process.net_connections("inet") if connection.status == psutil.CONN_LISTEN]
    except psutil.Error:
        return []


def is_loopback(address: str) -> bool:
    parsed = ip_address(address)
    return (getattr(parsed, "ipv4_mapped", None) or parsed).is_loopback
