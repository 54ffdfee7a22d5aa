"""Addresses and ports through which the processes of a run meet, and the pages of `trinity up`.

A single machine uses the loopback interface only.
"""

from __future__ import annotations

import os
import shlex
import socket
import sys
from contextlib import suppress
from pathlib import Path
from urllib.parse import urlencode

import psutil

from trinity_core.base.files import read_json

BASE_URL, API_KEY = "OPENAI_BASE_URL", "OPENAI_API_KEY"
"""The variables that OpenAI's own clients read."""
LOOPBACK = "127.0.0.1"
STUDIO_PORT = 4220
WITHOUT_RUN = frozenset({"raylet", "systemd", "init", "tini", "dumb-init"})
"""Names of an actor's ancestor processes when its run has gone."""


LONGEST_SOCKET = 107
"""Maximum length of a Unix socket's path in bytes (Linux's unix(7))."""


def short_folder(folder: str, below: int) -> str:
    """Return `folder`, or /tmp if a socket name of `below` bytes would make the path in `folder` too long, as in the
    temporary folders of cluster jobs."""
    return folder if len(os.fsencode(folder)) + 1 + below <= LONGEST_SOCKET else "/tmp"  # noqa: S108 - the last resort


def own_address() -> str:
    """Return this machine's address: in an actor the one that Ray uses, otherwise the one of its host name."""
    ray = sys.modules.get("ray")
    if ray is not None and ray.is_initialized():
        return str(ray.util.get_node_ip_address())
    try:
        return socket.gethostbyname(socket.gethostname())
    except OSError:
        return LOOPBACK


def outward_address() -> str:
    """Return the address from which this machine's packets leave for other networks; loopback without a network."""
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as sender, suppress(OSError):
        sender.connect(("192.0.2.1", 9))  # reserved for documentation (RFC 5737); UDP sends nothing when it connects
        return str(sender.getsockname()[0])
    return LOOPBACK


def interface_of(address: str) -> str | None:
    """Return the name of the network interface with this address, such as `eth0`, or None."""
    for name, addresses in psutil.net_if_addrs().items():
        if any(card.address == address for card in addresses):
            return name
    return None


def reserve_port(address: str = LOOPBACK) -> socket.socket:
    """Return a socket bound to a free port of that interface; `getsockname()` gives address and port.

    While the socket is open, the system assigns the port to no other process, but a server that sets SO_REUSEADDR
    (asyncio, uvicorn, torch, vLLM and Ray do) can listen on it. A port that is only looked up may be taken by another
    process before its server binds it.
    """
    holder = socket.socket()
    holder.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    holder.bind((address, 0))
    return holder


def holder_of(port: int) -> psutil.Process | None:
    """Return the process that listens on a port of this machine; None if there is none or it is not visible to this
    user."""
    for connection in psutil.net_connections("tcp"):
        if connection.status == psutil.CONN_LISTEN and connection.laddr.port == port and connection.pid is not None:
            with suppress(psutil.NoSuchProcess):
                return psutil.Process(connection.pid)
    return None


def in_words(process: psutil.Process | None) -> str:
    if process is None:
        return "a process that cannot be seen from here"
    with suppress(psutil.Error):
        command = " ".join(process.cmdline())
        return f"process {process.pid} ({command if len(command) <= 80 else f'{command[:80]}…'})"
    return f"process {process.pid}, which has just ended"


def is_orphan(process: psutil.Process) -> bool:
    """True for an actor whose run was killed; Ray's own processes end it within a minute."""
    try:
        above = [parent.name() for parent in process.parents() if parent.pid != 1]
        return process.cmdline()[:1] != [] and process.cmdline()[0].startswith("ray::") and set(above) <= WITHOUT_RUN
    except psutil.NoSuchProcess:
        return True


ROLLOUTS = "/rollouts"


def page_note(checkpoint_root_dir: Path, page: str) -> Path:
    """The note of a page, there while it is served: `url`, its address."""
    return checkpoint_root_dir / f"{page}_page.json"


def page_address(checkpoint_root_dir: Path, page: str) -> str:
    """Return the address where `trinity up` serves a page, or ""."""
    return str(read_json(page_note(checkpoint_root_dir, page)).get("url", ""))


def studio_page(checkpoint_root_dir: Path, run: str) -> str:
    """Return the address of a run's page (`project/name`) in Studio; while that is not served, with its usual port."""
    studio = page_address(checkpoint_root_dir, "studio") or f"http://{LOOPBACK}:{STUDIO_PORT}"
    return f"{studio}/runs?{urlencode({'run': run})}"


def studio_links(checkpoint_root_dir: Path, run: str, sampled: str = "") -> list[str]:
    """Return Markdown links to a run (`project/name`) and its rollouts, or those of the run `sampled`, in Studio. While
    Studio is not served, they give its usual address and commands instead."""
    served = page_address(checkpoint_root_dir, "studio")
    page = f"[Run in Studio]({studio_page(checkpoint_root_dir, run)})"
    if served:
        return [page, f"[Rollouts]({served}{rollouts_page(sampled or run)})"]
    folder = shlex.quote(str(checkpoint_root_dir / (sampled or run)))
    return [f"{page} after `trinity up`", f"Rollouts: `trinity view --checkpoint-dir {folder}`"]


def rollouts_page(run: str, other: str = "") -> str:
    """Return the path of a run's sampled rollouts in Studio, next to those of `other` (`project/name`) if given."""
    compared = {"other": other, "by": "task"} if other else {}
    return f"{ROLLOUTS}/#{urlencode({'run': run} | compared)}"
