"""A process that scores answers: it reads items from its socket and writes one verdict for each.

It never outlives its parent: an idle worker sees the socket close, a busy one is killed by the kernel (Linux). Its
memory is limited, so that a formula like 9^9^9 is a verifier error and does not exhaust the machine.
"""

from __future__ import annotations

import ctypes
import inspect
import json
import logging
import os
import resource
import signal
import sys
from concurrent.futures import Future
from multiprocessing.connection import Connection
from typing import Any

from trinity_core.errors import TrinityError
from trinity_core.plugins import load_plugins
from trinity_core.workflows.rewards.base import REWARD_FNS, WARM_UPS, Parts, RewardFn, RewardItem, Scored

PR_SET_PDEATHSIG = 1


def main(descriptor: int, parent: int, memory_bytes: int, plugin_dir: str | None) -> None:
    """Serve until the socket closes. A message is the name of a reward function and items for it (none: get ready).

    Replies are JSON: `{"parts": …}`, `{"error": …}` if the verifier failed, `{"fatal": …}` if it cannot work at all.
    """
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
        if os.getppid() != parent:
            return
    most = resource.getrlimit(resource.RLIMIT_AS)[1]  # stays: a sandbox that is started here has a limit of its own
    resource.setrlimit(resource.RLIMIT_AS, (memory_bytes, most))
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # a Ctrl-C at the terminal is the parent's to handle
    logging.getLogger("math_verify").setLevel(logging.ERROR)
    connection = Connection(descriptor)
    plugins_loaded = False
    while True:
        try:
            name, items = connection.recv()
        except EOFError:
            return
        try:
            if not plugins_loaded:
                load_plugins(plugin_dir)
                plugins_loaded = True
            score = REWARD_FNS.resolve(name)
        except TrinityError as error:
            reply(connection, {"fatal": str(error)})
            continue
        if not items:
            if name in WARM_UPS:
                WARM_UPS[name]()
            reply(connection, {"parts": {}})
        for item in items:
            reply(connection, verdict(score, item))


def verdict(score: RewardFn, item: RewardItem) -> dict[str, Any]:
    """Call a reward function; an exception becomes an error (or fatal) reply."""
    outcome: Future[Parts | Scored | float] = Future()
    given = dict(item.args)
    if "response_tokens" in inspect.signature(score).parameters:
        given["response_tokens"] = item.response_tokens
    try:
        outcome.set_result(score(prompt=item.prompt, response=item.response, truth=item.truth, task=item.task, **given))
    except Exception as error:  # noqa: BLE001 - a user's function may raise anything
        outcome.set_exception(error)
    raised = outcome.exception()
    if isinstance(raised, TrinityError):
        return {"fatal": str(raised)}
    if raised is not None:
        return {"error": f"{type(raised).__name__}: {raised}"}
    result = outcome.result()
    parts, counts = (result.parts, result.counts) if isinstance(result, Scored) else (result, {})
    try:
        return {"parts": as_parts(parts), "counts": as_parts(counts)}
    except (TypeError, ValueError) as error:
        return {"error": f"the reward function gave no number: {error}"}


def as_parts(value: Parts | float) -> Parts:
    """Named parts as plain floats; a bare number is the part `reward`. Raises TypeError or ValueError otherwise."""
    parts = {str(k): float(v) for k, v in value.items()} if isinstance(value, dict) else {"reward": float(value)}
    for name, part in parts.items():
        if part - part != 0:  # NaN or infinite
            raise ValueError(f"{name} is {part}")
    return parts


def reply(connection: Connection, message: dict[str, Any]) -> None:
    """Write JSON, so that the parent never unpickles data from a process that handled a model's text."""
    connection.send_bytes(json.dumps(message).encode())
