"""Agents that call the policy through the OpenAI API: one session for each rollout."""

from __future__ import annotations

import asyncio
import inspect
import json
import math
import os
import shlex
import tempfile
from collections.abc import Mapping
from numbers import Real
from pathlib import Path
from types import TracebackType
from typing import Any, Protocol, Self, runtime_checkable

from pydantic import Field, model_validator

from trinity_core.base.children import Child, ending
from trinity_core.base.errors import TrinityError
from trinity_core.base.signatures import Arguments
from trinity_core.base.threads import DaemonThreads, InterruptibleThreads
from trinity_core.base.timing import uncounted
from trinity_core.data.experience import Experience
from trinity_core.data.formats import has_prompt
from trinity_core.workflows.base import WORKFLOWS, NothingReturned, Workflow, all_rollouts, plain
from trinity_core.workflows.rewards import Reward, RewardItem


class RolloutSession(Protocol):
    """One rollout through the OpenAI API. A context manager: the session ends with the block."""

    @property
    def base_url(self) -> str:
        """The API address for clients; their requests belong to this rollout."""

    @property
    def api_key(self) -> str:
        """The API key for it."""

    @property
    def model_name(self) -> str:
        """The policy's name in requests."""

    @property
    def openai_client(self) -> Any:
        """An `openai.OpenAI` client for it."""

    @property
    def openai_async_client(self) -> Any:
        """An `openai.AsyncOpenAI` client for it."""

    def __enter__(self) -> Self: ...

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None: ...

    def experiences(self, reward: Reward | float | None = None, **fields: Any) -> list[Experience]:
        """Return the fewest experiences that hold each sampled token once; all get `reward` and `fields`.

        Pass the `Reward` unchanged from `rewards.score`. Ends the session.
        """


@runtime_checkable
class OpensSessions(Protocol):
    """A model whose engines also serve the OpenAI API."""

    def session(self, run: int = 0) -> RolloutSession:
        """Open a session for rollout `run` of the task."""


class AgentWorkflow(Workflow):
    """Runs any agent that takes a base URL or a client. Subclass it and write `rollout`.

    All rollouts of a task run concurrently. One that raises is retried; the others are kept.
    """

    def rollout(self, session: RolloutSession, run: int) -> Any:
        """Let the agent work on `self.task`; return its reward (or a coroutine that returns it).

        A plain `rollout` is called in a thread. Return the `Reward` unchanged from `self.rewards.score`, a number, or
        None if the rollout cannot be judged.
        """
        raise NotImplementedError(f"{type(self).__name__} has no rollout()")

    async def run(self) -> list[Experience]:
        """Return the experiences of the task's rollouts."""
        model = self.model
        if not isinstance(model, OpensSessions):
            raise TrinityError(
                f"workflow '{self.task.workflow}' talks to the OpenAI API; set "
                "explorer.rollout_model.enable_openai_api: true"
            )
        return await all_rollouts(self.task, lambda run: self._rollout(model, run))

    async def _rollout(self, model: OpensSessions, run: int) -> list[Experience]:
        with model.session(run) as session:
            if inspect.iscoroutinefunction(self.rollout):
                reward = await self.rollout(session, run)
            else:
                threads = InterruptibleThreads("agent")
                reward = await asyncio.get_running_loop().run_in_executor(threads, self.rollout, session, run)
        if isinstance(reward, Real) and not math.isfinite(reward):
            raise ValueError(f"the rollout's reward is {reward}")
        experiences = session.experiences(reward, run=run, info={"truth": plain(self.task.truth)})
        if not experiences:
            raise NothingReturned("the rollout got no answer of the policy, and no reward")
        return experiences


PASSED_ON = ("PATH", "LANG", "LC_ALL", "TMPDIR", "TZ")
"""Variables of the explorer that a command sees; others may hold passwords."""
LIMITED = 'ulimit -v "$1" && ulimit -f "$2" && shift 2 && exec "$@"'
REPORT_BYTES = 16 << 20
SHOWN = 500
"""Number of last characters of a command's output in its error message."""

SHORTEST_SECRET = 4
"""Shorter values of `workflow_args.env`, such as 1 or no, are not masked in that message: masking them would hit line
numbers and words."""


class CommandFailed(Exception):
    """A command ended with an error, timed out, or left no report; another attempt may succeed."""


class CommandArguments(Arguments):
    """`workflow_args` of `command_workflow`."""

    command: str | tuple[str, ...]
    """The command, split as in a shell but run without one, in its own empty folder."""
    time_limit: float = Field(600.0, gt=0)
    """Time limit in seconds."""
    memory_gib: float = Field(4.0, gt=0)
    """Address space of each of its processes, GiB."""
    file_gib: float = Field(1.0, gt=0)
    """Size limit of each file that it writes, its output included, GiB."""
    env: Mapping[str, str] = Field(default_factory=dict)
    """Further environment variables."""
    secrets: tuple[str, ...] = ()
    """Names of environment variables of the explorer that the command also sees, such as keys of other services."""

    @property
    def words(self) -> list[str]:
        """The command's program and arguments. Raises ValueError for an unclosed quotation."""
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
    (`messages`, `tools`, `run`, `seed`, and without a reward function the `row`). It writes JSON to the file
    `TRINITY_REPORT`: `answer`, which the task's reward function scores, or without one `reward`, a number.
    """

    arguments = CommandArguments
    needs_prompt = False

    async def rollout(self, session: RolloutSession, run: int) -> Reward | float | None:
        arguments = CommandArguments.model_validate(self.task.workflow_args)
        with tempfile.TemporaryDirectory(prefix="agent-", ignore_cleanup_errors=True) as folder:
            directory = Path(folder)
            task, report = directory / "task.json", directory / "report.json"
            task.write_text(json.dumps(self._task_json(run), default=str))
            (directory / "work").mkdir()
            if absent := [name for name in arguments.secrets if name not in os.environ]:
                raise TrinityError(
                    f"workflow_args.secrets: the explorer has no {', '.join(absent)} in its environment",
                    key="workflow_args.secrets",
                )
            passed_on = (*PASSED_ON, *arguments.secrets)
            environment = {name: os.environ[name] for name in passed_on if name in os.environ} | {
                "HOME": str(directory / "work"),
                "OPENAI_BASE_URL": session.base_url,
                "OPENAI_API_KEY": session.api_key,
                "OPENAI_MODEL": session.model_name,
                "TRINITY_TASK": str(task),
                "TRINITY_REPORT": str(report),
                **arguments.env,
            }
            await run_command(arguments, directory / "work", environment)
            return await self._verdict(_report(report))

    def _task_json(self, run: int) -> dict[str, Any]:
        """Return the task as the command sees it. Only a command that judges itself gets the row, which may hold the
        answer."""
        task = self.task
        question: dict[str, Any] = {"messages": task.messages if has_prompt(task.raw, task.format) else []}
        question |= {"tools": task.tools, "run": run, "seed": task.rollout_seed(run)}
        return question if task.reward_fn is not None else {**question, "row": task.raw}

    async def _verdict(self, report: dict[str, Any]) -> Reward | float | None:
        if self.task.reward_fn is None:
            if "reward" not in report:
                raise TrinityError(
                    f"the command of task set '{self.task.taskset}' reports no reward, and the task set names no "
                    "reward function; set default_reward_fn_type",
                    key="default_reward_fn_type",
                )
            return None if report["reward"] is None else float(report["reward"])
        if not isinstance(report.get("answer"), str):
            raise CommandFailed("its report has no answer")
        messages = self.task.messages if has_prompt(self.task.raw, self.task.format) else [{}]
        question = str(messages[-1].get("content", ""))
        item = RewardItem(report["answer"], self.task.truth, question, self.task.raw, self.task.reward_fn_args)
        [reward] = await self.rewards.score(self.task.reward_fn, [item])
        return reward


async def run_command(arguments: CommandArguments, folder: Path, environment: Mapping[str, str]) -> None:
    """Run a command to its end, then end all processes that it started. Raises `CommandFailed`."""
    kib, blocks = int(arguments.memory_gib * (1 << 20)), int(arguments.file_gib * (1 << 21))  # blocks of 512 bytes
    command = ["/bin/sh", "-c", LIMITED, "sh", str(kib), str(blocks), *arguments.words]
    child, attempt = Child(command, environment=environment, folder=folder, keep_output=True), uncounted()
    attempt.hold(child.kill)
    try:
        async with asyncio.timeout(arguments.time_limit):
            await asyncio.get_running_loop().run_in_executor(DaemonThreads("command"), child.process.wait)
    except TimeoutError:
        raise CommandFailed(f"it took longer than {arguments.time_limit:g} s (workflow_args.time_limit)") from None
    finally:
        attempt.let_go(child.kill)
        child.kill()
    if child.process.returncode:
        if child.output_bytes() >= blocks * 512:
            raise CommandFailed(f"its output is larger than {arguments.file_gib:g} GiB (workflow_args.file_gib)")
        secrets = [value for value in arguments.env.values() if len(value) >= SHORTEST_SECRET]
        text = child.output(SHOWN, [environment[name] for name in ("OPENAI_API_KEY", *arguments.secrets)] + secrets)
        raise CommandFailed(f"it ended with {ending(child.process.returncode)}: {text}")


def _report(path: Path) -> dict[str, Any]:
    if not path.is_file():
        raise CommandFailed("it left no report (TRINITY_REPORT)")
    if path.stat().st_size > REPORT_BYTES:
        raise CommandFailed(f"its report has more than {REPORT_BYTES >> 20} MiB")
    try:
        report = json.loads(path.read_bytes())
    except ValueError as error:
        raise CommandFailed(f"its report is not JSON: {error}") from None
    if not isinstance(report, dict):
        raise CommandFailed("its report is not a JSON object")
    return report
