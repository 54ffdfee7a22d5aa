"""The Ray that a run starts for itself."""

from __future__ import annotations

import os
import time
from ipaddress import ip_address
from pathlib import Path
from typing import Any

import psutil
import pytest


class Sleeper:
    def family(self) -> int:
        return os.getpid()


@pytest.mark.slow
def test_our_ray_listens_on_the_loopback_interface_only() -> None:
    import ray

    from tasks.cluster import Cluster
    from tasks.placement import Machine
    from trinity_core.config import config_from_dict

    config = config_from_dict({"model": {"model_path": "m", "max_model_len": 8}, "mode": "bench", "buffer": TASKS})
    cluster = Cluster(config, Machine(1, 0))
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


TASKS = {"explorer_input": {"taskset": {"path": "tasks.jsonl"}, "eval_tasksets": [{"path": "tasks.jsonl"}]}}


def listening(process: psutil.Process) -> list[Any]:
    try:
        return [each for each in process.net_connections("inet") if each.status == psutil.CONN_LISTEN]
    except psutil.Error:
        return []


def is_loopback(address: str) -> bool:
    found = ip_address(address)
    return (getattr(found, "ipv4_mapped", None) or found).is_loopback
