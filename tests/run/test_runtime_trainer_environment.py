"""The environment of a trainer worker bounds what torch keeps for sizes of tensors that do not come again."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from preflight_configs import config_of

from trinity_core.hosting import actors
from trinity_core.hosting.actors import Actors, trainer_environment, trainer_key
from trinity_core.hosting.cluster import Cluster
from trinity_core.hosting.placement import Machine, place

PRODUCTS = """
import psutil, torch
weight = torch.randn(256, 768, dtype=torch.bfloat16, requires_grad=True)
def step(rows):
    (torch.randn(rows, 256, dtype=torch.bfloat16) @ weight).sum().backward()
for rows in range(1000, 1010):
    step(rows)
before = psutil.Process().memory_info().rss
for rows in range(880, 1000):
    step(rows)
print(psutil.Process().memory_info().rss - before)
"""


@pytest.mark.skipif(
    "avx512bw" not in Path("/proc/cpuinfo").read_text(), reason="this processor's products are not compiled"
)
def test_products_of_many_sizes_leave_little_behind():
    own = trainer_environment(place(config_of(), Machine(2, 0)))
    done = subprocess.run([sys.executable, "-c", PRODUCTS], env=os.environ | own, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert int(done.stdout) < 200 << 20, "without a limit 300 MB"


def test_memory_of_many_sizes_leaves_no_gaps_on_a_gpu():
    """And nothing of what is for the CPU reaches a worker on a GPU."""
    own = trainer_environment(place(config_of("cluster.gpu_per_node=2"), Machine(2, 2)))
    assert own.pop("PYTORCH_ALLOC_CONF") == "expandable_segments:True"
    assert own.keys() == {"TOKENIZERS_PARALLELISM", "OMP_NUM_THREADS"}


@pytest.mark.parametrize("gpus", [0, 2])
def test_kept_workers_get_the_threads_of_the_next_stage(monkeypatch: pytest.MonkeyPatch, gpus: int) -> None:
    renewed: list[Any] = []
    monkeypatch.setattr(actors, "renew", lambda *arguments: renewed.append(arguments[:3]))
    overrides = (f"cluster.gpu_per_node={gpus}", "trainer.worker_num=1", "synchronizer.sync_offset=1")
    machine, config, workers = Machine(8, gpus), config_of(*overrides), [object()]
    alone, beside = place(config.with_values({"mode": "train"}), machine), place(config, machine)
    assert (alone.trainer_threads, beside.trainer_threads) == (8, 4)
    cluster = Cluster(config, machine)
    cluster.leave("trainers", trainer_key(alone), workers)
    assert Actors(cluster, config, beside).start_trainers() is workers
    assert renewed == [(workers, config, 4)]
