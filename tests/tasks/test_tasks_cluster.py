"""The Ray that a run starts for itself."""

from __future__ import annotations

import os
import time
from ipaddress import ip_address
from pathlib import Path
from typing import Any

import psutil
import pytest

from tasks import actors
from tasks.cluster import Cluster
from tasks.placement import Machine, place
from trinity_core.config import Config, config_from_dict


class Sleeper:
    def family(self) -> int:
        return os.getpid()


class Ended(list):
    """In place of Ray's end of an actor."""

    def kill(self, actors: list[Any]) -> None:
        self.extend(actors)


def test_what_a_stage_leaves_goes_to_the_next_that_fits_and_ends_otherwise(monkeypatch: pytest.MonkeyPatch) -> None:
    cluster, ended = Cluster(small_config(), Machine(1, 0)), Ended()
    monkeypatch.setattr(cluster, "kill", ended.kill)
    cluster.leave("engines", ("a", 2), ["e1", "e2"])
    cluster.leave("trainers", 1, ["t1"])
    assert cluster.take("engines", ("a", 2)) == ["e1", "e2"] and cluster.take("engines", ("a", 2)) == []
    assert cluster.take("trainers", 2) == [] and ended == ["t1"]
    cluster.leave("engines", "a", ["e1"])
    cluster.leave("engines", "b", ["e2"])
    assert ended == ["t1", "e1"] and cluster.take("engines", "b") == ["e2"]


def test_a_stage_without_engines_leaves_those_of_the_stage_before(monkeypatch: pytest.MonkeyPatch) -> None:
    config = small_config()
    placement = place(config, Machine(1, 0))
    cluster, ended = Cluster(config, Machine(1, 0)), Ended()
    monkeypatch.setattr(cluster, "kill", ended.kill)
    cluster._users = 2
    assert actors.keep(cluster, config, placement, ["e"], []) == ["e"]
    assert actors.keep(cluster, config, placement, [], ["t"]) == ["t"] and not ended
    cluster._users = 1
    assert actors.keep(cluster, config, placement, ["e"], ["t"]) == [], "no other stage can follow"


@pytest.mark.slow
def test_our_ray_listens_on_the_loopback_interface_only() -> None:
    import ray

    cluster = Cluster(small_config(), Machine(1, 0))
    known = set(psutil.Process().children(recursive=True))
    try:
        cluster.open("test", 0)
        actor = cluster.actor(Sleeper, "sleeper", env={"PYTHONPATH": str(Path(__file__).parent)})
        ray.get(actor.family.remote())
        time.sleep(2.0)
        family = [psutil.Process(), *(set(psutil.Process().children(recursive=True)) - known)]
        assert {"gcs_server", "raylet"} <= {process.name() for process in family}
        places = {(process.name(), end.laddr.ip) for process in family for end in listening(process)}
    finally:
        cluster.close()
    assert places and not {place for place in places if not is_loopback(place[1])}


def small_config() -> Config:
    return config_from_dict({"model": {"model_path": "m", "max_model_len": 8}, "mode": "bench", "buffer": TASKS})


TASKS = {"explorer_input": {"taskset": {"path": "tasks.jsonl"}, "eval_tasksets": [{"path": "tasks.jsonl"}]}}


def listening(process: psutil.Process) -> list[Any]:
    try:
        return [each for each in process.net_connections("inet") if each.status == psutil.CONN_LISTEN]
    except psutil.Error:
        return []


def is_loopback(address: str) -> bool:
    found = ip_address(address)
    return (getattr(found, "ipv4_mapped", None) or found).is_loopback
