"""Runs programs at an endpoint that speaks SandboxFusion's `POST /run_code`."""

from __future__ import annotations

import base64
from collections.abc import Mapping

from trinity_core.lazy import httpx
from trinity_core.workflows.rewards.code.sandbox import START_SECONDS, CodeLimits, Ran, SandboxFailed


def run_remotely(url: str, program: str, files: Mapping[str, str], stdin: str, limits: CodeLimits) -> Ran:
    """Run a Python program, next to files, to its end. Raises `SandboxFailed`.

    The endpoint has limits of its own for disk and processes.
    """
    request = {
        "code": program,
        "language": "python",
        "compile_timeout": limits.seconds,
        "run_timeout": limits.seconds,
        "memory_limit_MB": limits.memory_bytes >> 20,
        "stdin": stdin,
        "files": {name: base64.b64encode(text.encode()).decode() for name, text in files.items()},
    }
    try:
        reply = httpx.post(url, json=request, timeout=limits.seconds + START_SECONDS)
        content = reply.raise_for_status().json()
        if content["status"] == "SandboxError":
            raise SandboxFailed(f"the sandbox at {url} failed: {content['message']}")
        result = content["run_result"]
        exceeded = "" if result["status"] == "Finished" else f"took longer than {limits.seconds:g} s"
        if result["status"] not in ("Finished", "TimeLimitExceeded"):
            raise SandboxFailed(f"the sandbox at {url} could not run the program: {result['stderr']}")
        return Ran((result["stdout"] or "").encode(), exceeded, result["return_code"] or 0)
    except (httpx.HTTPError, ValueError, KeyError, TypeError) as error:
        raise SandboxFailed(f"the sandbox at {url} gave no result: {type(error).__name__}: {error}") from error
