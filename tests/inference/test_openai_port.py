"""The port of the endpoint: waits while an actor of a killed run holds it, and names the holder."""

from __future__ import annotations

import asyncio
import os
import socket
import subprocess
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any
from urllib.parse import urlsplit

import psutil
import pytest

from trinity_core.base.addresses import LOOPBACK, holder_of, is_orphan, outward_address
from trinity_core.base.errors import TransientFault
from trinity_core.config import config_from_dict
from trinity_core.rollout.openai_api import server
from trinity_core.run.preflight.checks import busy_port

LISTENER = "import socket, sys, time; s = socket.create_server(('127.0.0.1', 0)); print(s.getsockname()[1], flush=True)"


@contextmanager
def listening(name: str, orphan: bool) -> Iterator[int]:
    """The port of a process named `name`; an orphan has no parent."""
    code = f"{LISTENER}; time.sleep(60)"
    command = ["bash", "-c", f'exec -a {name} "$0" -c "$1"', sys.executable, code]
    if orphan:
        command[2] = f"({command[2]}) &"
    started = subprocess.Popen(command, stdout=subprocess.PIPE, env={**os.environ, "PYTHONHOME": sys.base_prefix})
    assert started.stdout is not None
    port = int(started.stdout.readline())
    if orphan:
        started.wait()
    holder = holder_of(port)
    assert holder is not None
    try:
        yield port
    finally:
        if holder.is_running():
            holder.kill()
        started.wait()


def config_of(port: int) -> Any:
    return config_from_dict({
        "mode": "explore", "checkpoint_root_dir": "/nowhere", "model": {"model_path": "m", "max_model_len": 64},
        "explorer": {"api_port": port, "rollout_model": {"enable_openai_api": True}},
        "buffer": {"batch_size": 1, "total_steps": 1, "explorer_input": {
            "taskset": {"path": "/nowhere", "format": {"prompt_key": "q", "response_key": "a"}}}},
    })  # fmt: skip


def bound(port: int) -> socket.socket:
    return asyncio.run(server._listening_once_free("127.0.0.1", port))


def test_the_port_of_a_killed_runs_actor_is_waited_for():
    with listening("ray::Explorer", orphan=True) as port:
        holder = holder_of(port)
        assert holder is not None and is_orphan(holder)
        assert [*busy_port(config_of(port))] == []
        threading.Timer(0.5, holder.kill).start()
        with bound(port) as own:
            assert own.getsockname()[1] == port


@pytest.mark.parametrize(("name", "orphan"), [("ray::Explorer", False), ("somebody", True)])
def test_a_port_that_stays_taken_is_refused_with_its_holder(monkeypatch, name, orphan):
    monkeypatch.setattr(server, "PORT_SECONDS", 0.2)
    with listening(name, orphan) as port:
        holder = holder_of(port)
        assert isinstance(holder, psutil.Process) and not is_orphan(holder)
        [obstacle] = busy_port(config_of(port))
        with pytest.raises(TransientFault) as refused:
            bound(port)
        for message in (obstacle.message, str(refused.value)):
            assert str(holder.pid) in message and name in message


def test_the_address_of_a_server_for_everyone_is_reached_from_outside(monkeypatch):
    """Also if the run's own Ray, which listens on loopback alone, is all that knows an address."""
    monkeypatch.setattr(server, "own_address", lambda: LOOPBACK)
    with socket.create_server(("0.0.0.0", 0)) as listener:
        api = server.ApiServer([], host="0.0.0.0", port=listener.getsockname()[1])
        host = urlsplit(api.base_url()).hostname
        assert host == outward_address()
        socket.create_connection((host, api.port), timeout=10).close()
    assert urlsplit(server.ApiServer([], port=1).base_url()).hostname == LOOPBACK
