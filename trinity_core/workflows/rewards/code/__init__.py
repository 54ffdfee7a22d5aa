"""`code_reward`: programs and functions written by a model, judged by unit tests in a sandbox."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

from trinity_core.base.errors import DataError
from trinity_core.workflows.rewards.base import TIME_LIMITS, WARM_UPS, Scored, graded
from trinity_core.workflows.rewards.code.forms import tests_of
from trinity_core.workflows.rewards.code.judging import Judging
from trinity_core.workflows.rewards.code.sandbox import CodeLimits, best_isolation
from trinity_core.workflows.rewards.functions import REWARD_FNS

_FENCE = re.compile(r"^([ \t]*)(```+|~~~+)[ \t]*(\w*)[^\n]*\n(.*?)^[ \t]*\2", re.DOTALL | re.MULTILINE)
PYTHON = ("python", "python3", "py")
TOTAL_SECONDS = 60.0
END_SECONDS = 30.0
"""Time for sandboxes to start and end, in addition to the time of the tests."""


def last_program(text: str) -> str | None:
    """Return the last fenced Python block in a text, else the last fenced block; None without one.

    A block in a list is indented as a whole; its lines lose the indentation of the fence.
    """
    blocks = _FENCE.findall(text)
    python_blocks = [block for block in blocks if block[2].lower() in PYTHON]
    for indentation, _, _, body in (python_blocks or blocks)[-1:]:
        return "".join(line.removeprefix(indentation) for line in body.splitlines(keepends=True))
    return None


@REWARD_FNS.register("code_reward")
def code_reward(
    *,
    prompt: str,
    response: str,
    truth: Any,
    task: Mapping[str, Any],
    entry_point: str = "",
    partial: bool = False,
    time_limit: float = 6.0,
    total_seconds: float = TOTAL_SECONDS,
    memory_gib: float = 1.0,
    disk_mib: int = 64,
    processes: int = 16,
    sandbox: str = "",
    **_: Any,
) -> Scored:
    """`accuracy` 1 if the last fenced Python block passes all unit tests, else 0.

    With `partial`, the part of that name is the fraction of tests that a wrong answer passes. `sandbox` is `bwrap` to
    require bubblewrap, which is used where it works by default, or the URL of SandboxFusion's `/run_code`. Raises
    DataError for a row without tests, and other errors if the answer cannot be judged.
    """
    endpoint = sandbox if sandbox.startswith(("http://", "https://")) else ""
    if not endpoint and sandbox not in ("", "bwrap"):
        raise DataError(f"reward_fn_args.sandbox is {sandbox!r}; it is 'bwrap' or the URL of a /run_code")
    if sandbox == "bwrap" != best_isolation():
        raise DataError("reward_fn_args.sandbox is 'bwrap', and bubblewrap does not work here; the log says why")
    tests, code = tests_of(truth, task, entry_point), last_program(response)
    if code is None:
        return Scored(graded(0.0) if partial else {"accuracy": 0.0}, {"tests_passed": 0.0, "limits_exceeded": 0.0})
    limits = CodeLimits(time_limit, int(memory_gib * 2**30), disk_mib << 20, processes)
    counts = Judging(code, limits, partial, total_seconds, endpoint).run(tests)
    share = counts.passed / tests.count
    parts = graded(share) if partial else {"accuracy": float(counts.passed == tests.count)}
    return Scored(parts, {"tests_passed": share, "limits_exceeded": float(counts.exceeded)})


def _longest(args: Mapping[str, Any]) -> float:
    return float(args.get("total_seconds", TOTAL_SECONDS)) + 10 * float(args.get("time_limit", 6.0)) + END_SECONDS


TIME_LIMITS["code_reward"] = _longest
WARM_UPS["code_reward"] = best_isolation
