"""Ports for servers that a test starts, on which nobody listens yet."""

from __future__ import annotations

import socket

from trinity_core.base.addresses import reserve_port

_holders: list[socket.socket] = []
"""Open until the test session ends: another process of the machine is never given one of these ports."""


def free_port() -> int:
    """A port of the loopback interface for a server that sets SO_REUSEADDR."""
    _holders.append(reserve_port())
    return int(_holders[-1].getsockname()[1])
