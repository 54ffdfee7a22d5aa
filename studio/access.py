"""Who may use Studio where it is served beyond this machine: those who know its token."""

from __future__ import annotations

import ipaddress
from hmac import compare_digest
from secrets import token_urlsafe

TOKEN_VARIABLE = "TRINITY_STUDIO_TOKEN"  # noqa: S105 - the name of a variable
"""Holds the token, which no list of processes shows; empty where none is asked for."""


def is_local(host: str) -> bool:
    """True if only this machine reaches that address."""
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return host == "localhost"


def new_token() -> str:
    """A random token that cannot be guessed."""
    return token_urlsafe(24)


def admits(token: str, attempt: str) -> bool:
    """True if `attempt` is the token, or none is asked for."""
    return not token or compare_digest(attempt.encode(), token.encode())
