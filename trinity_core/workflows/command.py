"""`command_workflow`: an agent that is a command of its own, in an environment of its own.

The command gets the task in a file and the address of its session; it ends with a report. The reference answer stays
here: what the command reports is scored where it cannot write.
"""

from __future__ import annotations

import asyncio
import json
import os
import shlex
import signal
import tempfile
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any, Self

from pydantic import Field, model_validator

from trinity_core.errors import TrinityError
from trinity_core.signatures import Arguments
from trinity_core.workflows.agent import AgentWorkflow, RolloutSession
from trinity_core.workflows.base import WORKFLOWS
from trinity_core.workflows.rewards import Reward, RewardItem

PASSED_ON = ("PATH", "LANG", "LC_ALL", "TMPDIR", "TZ")
"""Variables of the explorer that a command sees too; others may hold passwords."""
LIMITED = 'ulimit -v "$1" && ulimit -f "$2" && shift 2 && exec timeout -s KILL "$@"'
ORPHAN_SECONDS = 30.0
"""After its time limit a command ends by itself, if the explorer that would end it is gone."""
REPORT_BYTES = 16 << 20
"""Longest report that is read."""
SHOWN = 500
"""Last characters of a command's output in the message of its failure."""


class CommandFailed(Exception):
    """A command ended with an error, took too long, or left no report; another attempt may do better."""


class CommandArguments(Arguments):
    """`workflow_args` of `command_workflow`."""

    command: str | tuple[str, ...]
    """The command, as in a shell but without one; it runs in an empty folder of its own."""
    time_limit: float = Field(600.0, gt=0)
    """Seconds that it may take."""
    memory_gib: float = Field(4.0, gt=0)
    """Address space of each of its processes, GiB."""
    file_gib: float = Field(1.0, gt=0)
    """Size of each file that it writes, its output among them, GiB."""
    env: Mapping[str, str] = Field(default_factory=dict)
    """Further environment variables."""

    @property
    def words(self) -> list[str]:
        """The command's program and arguments. Raises ValueError for a quotation without end."""
        return shlex.split(self.command) if isinstance(self.command, str) else list(self.command)

    @model_validator(mode="after")
    def _runs_something(self) -> Self:
        if not self.words or not self.words[0]:
            raise ValueError("command is empty")
        return self


@WORKFLOWS.register("command_workflow")
class CommandWorkflow(AgentWorkflow):
    """Runs a command for each rollout.

    It sees `OPENAI_BASE_URL`, `OPENAI_API_KEY`, `OPENAI_MODEL` and the task as JSON in the file `TRINITY_TASK`
    (`messages`, `tools`). It writes JSON to the file `TRINITY_REPORT`: `answer`, which the task's reward function
    scores, or without one `reward`, a number.
    """

    arguments = CommandArguments

    async def rollout(self, session: RolloutSession, run: int) -> Reward | float | None:
        """The verdict on what the command reports."""
        given = CommandArguments.model_validate(self.task.workflow_args)
        with tempfile.TemporaryDirectory(prefix="agent-", ignore_cleanup_errors=True) as folder:
            place = Path(folder)
            task, report = place / "task.json", place / "report.json"
            task.write_text(json.dumps({"messages": self.task.messages, "tools": self.task.tools}))
            (place / "work").mkdir()
            environment = {name: os.environ[name] for name in PASSED_ON if name in os.environ} | {
                "HOME": str(place / "work"),
                "OPENAI_BASE_URL": session.base_url,
                "OPENAI_API_KEY": session.api_key,
                "OPENAI_MODEL": session.model_name,
                "TRINITY_TASK": str(task),
                "TRINITY_REPORT": str(report),
                **given.env,
            }
            await run_command(given, place / "work", environment, f"TRINITY_REPORT={report}")
            return await self._judged(_report(report))

    async def _judged(self, report: dict[str, Any]) -> Reward | float | None:
        if self.task.reward_fn is None:
            if "reward" not in report:
                raise TrinityError(
                    f"the command of task set '{self.task.taskset}' reports no reward, and the task set names no "
                    "reward function; set default_reward_fn_type"
                )
            return None if report["reward"] is None else float(report["reward"])
        if not isinstance(report.get("answer"), str):
            raise CommandFailed("its report has no answer")
        question = str(self.task.messages[-1].get("content", ""))
        item = RewardItem(report["answer"], self.task.truth, question, self.task.raw, self.task.reward_fn_args)
        [reward] = await self.rewards.score(self.task.reward_fn, [item])
        return reward


async def run_command(given: CommandArguments, folder: Path, environment: Mapping[str, str], mark: str) -> None:
    """Run a command to its end, and end all that it started then. Raises `CommandFailed`.

    `mark`: an entry of its environment that no other command has.
    """
    kib, blocks = int(given.memory_gib * (1 << 20)), int(given.file_gib * (1 << 21))  # blocks of 512 bytes
    limits = (str(kib), str(blocks), f"{given.time_limit + ORPHAN_SECONDS:.3f}")
    with tempfile.TemporaryFile() as said:
        process = await asyncio.create_subprocess_exec(
            "/bin/sh", "-c", LIMITED, "sh", *limits, *given.words,
            cwd=folder, env=environment, stdin=asyncio.subprocess.DEVNULL, stdout=said, stderr=said,
            start_new_session=True,
        )  # fmt: skip
        try:
            async with asyncio.timeout(given.time_limit):
                await process.wait()
        except TimeoutError:
            raise CommandFailed(f"it took longer than {given.time_limit:g} s (workflow_args.time_limit)") from None
        finally:
            with suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
            end_processes(mark)
            await process.wait()
        if process.returncode:
            size = said.seek(0, os.SEEK_END)
            if size >= blocks * 512:
                raise CommandFailed(f"its output is larger than {given.file_gib:g} GiB (workflow_args.file_gib)")
            said.seek(max(0, size - SHOWN))
            text = said.read().decode(errors="replace").strip().replace(environment["OPENAI_API_KEY"], "***")
            raise CommandFailed(f"it ended with status {process.returncode}: {text}")


def end_processes(mark: str) -> None:
    """Kill the processes that have `mark` in their environment, such as daemons, which leave their group."""
    entry = f"\0{mark}\0".encode()
    for path in Path("/proc").glob("[0-9]*/environ"):
        with suppress(OSError):  # of others, or gone
            if entry in b"\0" + path.read_bytes():
                os.kill(int(path.parent.name), signal.SIGKILL)


def _report(path: Path) -> dict[str, Any]:
    if not path.is_file():
        raise CommandFailed("it left no report (TRINITY_REPORT)")
    if path.stat().st_size > REPORT_BYTES:
        raise CommandFailed(f"its report has more than {REPORT_BYTES >> 20} MiB")
    try:
        found = json.loads(path.read_bytes())
    except ValueError as error:
        raise CommandFailed(f"its report is no JSON: {error}") from None
    if not isinstance(found, dict):
        raise CommandFailed("its report is no JSON object")
    return found
