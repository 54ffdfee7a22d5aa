"""Access to Studio from other machines: only with its token."""

from __future__ import annotations

import ipaddress
from hmac import compare_digest
from secrets import token_urlsafe

TOKEN_VARIABLE = "TRINITY_STUDIO_TOKEN"  # noqa: S105 - the name of a variable
"""Holds the token, so that no process list shows it; empty if none is needed."""


def is_local(host: str) -> bool:
    """True if only this machine can reach that address."""
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return host == "localhost"


def new_token() -> str:
    return token_urlsafe(24)


def admits(token: str, attempt: str) -> bool:
    return not token or compare_digest(attempt.encode(), token.encode())
