"""Where the processes of a run meet, and where `trinity up` serves pages.

A machine that is alone uses the loopback interface only.
"""

from __future__ import annotations

import os
import shlex
import socket
import sys
from contextlib import suppress
from pathlib import Path
from typing import Any
from urllib.parse import urlencode

import psutil

from trinity_core.files import read_json

BASE_URL, API_KEY = "OPENAI_BASE_URL", "OPENAI_API_KEY"
"""The variables by which OpenAI's own clients find an endpoint and its key."""
LOOPBACK = "127.0.0.1"
STUDIO_PORT = 4220
"""Where Studio is served unless another port is chosen."""
WITHOUT_RUN = frozenset({"raylet", "systemd", "init", "tini", "dumb-init"})
"""Names of processes above an actor whose run has gone."""


LONGEST_SOCKET = 107
"""Bytes of a socket's path, at most (Linux's unix(7))."""


def short_folder(folder: str, below: int) -> str:
    """`folder`, or /tmp where a socket whose name in it has `below` bytes would have too long a path, as in the
    temporary folders of a cluster's jobs."""
    return folder if len(os.fsencode(folder)) + 1 + below <= LONGEST_SOCKET else "/tmp"  # noqa: S108 - the last resort


def own_address() -> str:
    """As Ray knows this machine, in an actor; by its host name otherwise."""
    ray = sys.modules.get("ray")
    if ray is not None and ray.is_initialized():
        return str(ray.util.get_node_ip_address())
    try:
        return socket.gethostbyname(socket.gethostname())
    except OSError:
        return LOOPBACK


def interface_of(address: str) -> str | None:
    """The name of this machine's network interface with an address, such as `eth0`; None if none has it."""
    for name, addresses in psutil.net_if_addrs().items():
        if any(one.address == address for one in addresses):
            return name
    return None


def reserve_port(address: str = LOOPBACK) -> socket.socket:
    """A socket that holds a free port of that interface: `getsockname()` is the address and the port.

    As long as it is open, the system gives the port to no process that asks for any free one, and a server that sets
    SO_REUSEADDR (as those of asyncio, uvicorn, torch, vLLM and Ray do) can listen there. A port that is only looked up
    may be taken by another process before its server binds it.
    """
    holder = socket.socket()
    holder.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    holder.bind((address, 0))
    return holder


def holder_of(port: int) -> psutil.Process | None:
    """The process of this machine that listens at a port; None if there is none, or it is not ours to see."""
    for connection in psutil.net_connections("tcp"):
        if connection.status == psutil.CONN_LISTEN and connection.laddr.port == port and connection.pid is not None:
            with suppress(psutil.NoSuchProcess):
                return psutil.Process(connection.pid)
    return None


def in_words(process: psutil.Process | None) -> str:
    """Which process it is, for messages."""
    if process is None:
        return "a process that cannot be seen from here"
    with suppress(psutil.Error):
        command = " ".join(process.cmdline())
        return f"process {process.pid} ({command if len(command) <= 80 else f'{command[:80]}…'})"
    return f"process {process.pid}, which has just ended"


def is_orphan(process: psutil.Process) -> bool:
    """Whether it is an actor of a run that was killed: Ray's own processes end it within a minute."""
    try:
        above = [parent.name() for parent in process.parents() if parent.pid != 1]
        return process.cmdline()[:1] != [] and process.cmdline()[0].startswith("ray::") and set(above) <= WITHOUT_RUN
    except psutil.NoSuchProcess:
        return True


ROLLOUTS = "/rollouts"
"""Where Studio serves the page of sampled rollouts, below its own address."""


def page_note(checkpoint_root_dir: Path, page: str) -> Path:
    """The note of a page, there while it is served: `url`, its address, and `uri`, the store that it shows, if any."""
    return checkpoint_root_dir / f"{page}_page.json"


def read_page_note(checkpoint_root_dir: Path, page: str) -> dict[str, Any]:
    """What the note says; empty while the page is not served."""
    return read_json(page_note(checkpoint_root_dir, page)) or {}


def mlflow_address(checkpoint_root_dir: Path, uri: str) -> str:
    """Where `trinity up` serves the MLflow store `uri`; empty while it serves none, or another."""
    note = read_page_note(checkpoint_root_dir, "mlflow")
    return str(note["url"]) if note.get("uri") == uri else ""


def studio_links(checkpoint_root_dir: Path, run: str) -> list[str]:
    """Markdown: the page and the rollouts of a run, `project/name`, in Studio; while that is not served, the page by
    its usual address, and commands."""
    served = read_page_note(checkpoint_root_dir, "studio").get("url")
    studio = served or f"http://{LOOPBACK}:{STUDIO_PORT}"
    page = f"[Run in Studio]({studio}/runs?{urlencode({'run': run})})"
    if served:
        return [page, f"[Rollouts]({studio}{rollouts_page(run)})"]
    folder = shlex.quote(str(checkpoint_root_dir / run))
    return [f"{page} after `trinity up`", f"Rollouts: `trinity view --checkpoint-dir {folder}`"]


def rollouts_page(run: str, other: str = "", token: str = "") -> str:
    """The path of a run's sampled rollouts in Studio, next to those of `other` if given (`project/name`)."""
    query = f"?{urlencode({'token': token})}" if token else ""
    compared = {"tab": "samples", "other": other} if other else {}
    return f"{ROLLOUTS}/{query}#{urlencode({'run': run} | compared)}"
