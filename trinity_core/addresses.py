"""Where the processes of a run meet. A machine that is alone uses the loopback interface only."""

from __future__ import annotations

import socket
import sys

BASE_URL, API_KEY = "OPENAI_BASE_URL", "OPENAI_API_KEY"
"""The variables by which OpenAI's own clients find an endpoint and its key."""
LOOPBACK = "127.0.0.1"


def own_address() -> str:
    """As Ray knows this machine, in an actor; by its host name otherwise."""
    ray = sys.modules.get("ray")
    if ray is not None and ray.is_initialized():
        return str(ray.util.get_node_ip_address())
    try:
        return socket.gethostbyname(socket.gethostname())
    except OSError:
        return LOOPBACK


def free_port(address: str = LOOPBACK) -> int:
    """A port of that interface that nobody listens on."""
    with socket.socket() as probe:
        probe.bind((address, 0))
        return int(probe.getsockname()[1])


def rendezvous() -> tuple[str, int]:
    """An address and a free port of this machine where processes can meet. Call on the machine of the first one."""
    address = own_address()
    return address, free_port(address)
