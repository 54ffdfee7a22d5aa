"""Starting a Ray of our own on this machine, for this process and what it starts."""

from __future__ import annotations

import logging
import os
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from functools import partial
from pathlib import Path

import psutil

from trinity_core.addresses import LOOPBACK
from trinity_core.runtime.processes import end, family

log = logging.getLogger(__name__)

OBJECT_STORE_BYTES = 512 * 2**20
"""Batches and eval results pass through it; weights do not. More would only take shared memory from weight sync."""
AGENT_SECONDS = 180
"""For Ray's agents to start: on a busy machine its own 15 s are too few."""
STARTS = 3
"""Attempts to start Ray, which gives its node 30 s each time."""
END_SECONDS = 5.0
"""For the processes of an attempt that failed to be gone."""


def start_ray(namespace: str, cpus: int, gpus: int) -> None:
    """Start Ray and connect to it. Raises what Ray raises, after three attempts that were not there in time."""
    os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")
    os.environ.setdefault("RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO", "0")
    os.environ.setdefault("RAY_agent_register_timeout_ms", str(AGENT_SECONDS * 1000))
    # Workers that Ray starts in advance cannot become our actors, which have an environment of their own.
    os.environ.setdefault("RAY_prestart_worker_first_driver", "false")
    with _on_loopback(), _in_groups_of_their_own():
        for left in reversed(range(STARTS)):
            before = _ray_processes()
            try:
                _init(namespace, cpus, gpus)
                return
            except Exception as error:
                started = _ray_processes() - before
                end([each for child in started for each in family(child)], 0)
                psutil.wait_procs(started, END_SECONDS)
                if not left or type(error) is not Exception:  # the bare class: the node was not there in time
                    raise
                log.warning("Ray did not start and is started again: %s", error)


def _ray_processes() -> set[psutil.Process]:
    """Our children that are programs of Ray; another thread may start other children meanwhile."""
    import ray

    programs = str(Path(ray.__file__).parent)
    found = set()
    for child in psutil.Process().children():
        with suppress(psutil.NoSuchProcess):
            if any(part.startswith(programs) for part in child.cmdline()):
                found.add(child)
    return found


def _init(namespace: str, cpus: int, gpus: int) -> None:
    import ray

    ray.init(
        address="local",
        namespace=namespace,
        num_cpus=cpus,
        num_gpus=gpus,
        include_dashboard=False,
        object_store_memory=OBJECT_STORE_BYTES,
        log_to_driver=False,
        logging_level=logging.ERROR,
        _node_ip_address=LOOPBACK,
    )


@contextmanager
def _on_loopback() -> Iterator[None]:
    """A Ray of our own is for this machine alone: none of its processes listens on another interface.

    On Linux Ray takes 127.0.0.1 for a mistake and puts the machine's outer address in its place, by which its servers
    then listen everywhere; without its clusters of several machines it leaves the address alone.
    """
    from ray._private import ray_constants

    several_machines = ray_constants.ENABLE_RAY_CLUSTER
    ray_constants.ENABLE_RAY_CLUSTER = False
    try:
        yield
    finally:
        ray_constants.ENABLE_RAY_CLUSTER = several_machines


@contextmanager
def _in_groups_of_their_own() -> Iterator[None]:
    """Ray's processes do not get a signal for the run's whole group, such as that of `timeout`: the run saves first."""
    from ray._private import services

    popen = services.ConsolePopen
    services.ConsolePopen = partial(popen, process_group=0)  # type: ignore[misc, assignment]
    try:
        yield
    finally:
        services.ConsolePopen = popen  # type: ignore[misc]
