"""`env_workflow`: the policy acts in an environment, turn after turn."""

from __future__ import annotations

import asyncio
import inspect
import logging
import re
import sys
from collections.abc import AsyncIterator, Callable, Mapping
from concurrent.futures import Future
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from threading import Event
from typing import Any, ClassVar, Literal, Self

from pydantic import Field, ValidationError, model_validator

from trinity_core.base.children import START_SECONDS
from trinity_core.base.errors import DataError, InputError, TrinityError, faults_text
from trinity_core.base.signatures import Arguments
from trinity_core.base.threads import DaemonThreads, InterruptibleThreads
from trinity_core.base.timing import uncounted
from trinity_core.data.experience import Experience
from trinity_core.data.formats import Message
from trinity_core.data.task import Task
from trinity_core.workflows.base import WORKFLOWS, Workflow, all_rollouts
from trinity_core.workflows.environments.process import HOSTS, ProcessEnvironment, Where
from trinity_core.workflows.environments.protocol import (
    ENVIRONMENTS,
    METHODS,
    Environment,
    EnvironmentFailed,
    Step,
    as_step,
    as_tools,
    check_installed,
    target_of,
    wants_process,
)
from trinity_core.workflows.trajectory import Trajectory

log = logging.getLogger(__name__)

PATIENCE = 3600.0
"""Seconds without a returned process after which a waiting rollout fails."""

GRACE = 10.0
"""Extra seconds for the environment's process to report its own timeout."""

TOO_LONG = (
    "task %d of %s: its prompt, with what environment '%s' says first, is too long (model.max_prompt_tokens): nothing "
    "was played, and its rollouts are not judged"
)


class EnvArguments(Arguments):
    """`workflow_args` of `env_workflow`."""

    environment: str
    """A registered name; or, in a separate process, `package.module:Class` or `folder/file.py:Class`."""
    environment_args: dict[str, Any] = Field(default_factory=dict)
    """Arguments of its class. A task's column of the same name takes precedence, and the column `seed` is its seed."""
    max_turns: int = Field(10, ge=1)
    step_wise: bool = False
    """One experience for each turn; otherwise one for the rollout."""
    turn_rewards: Literal["return", "rollout"] = "return"
    """With `step_wise`: each turn's reward is the return from there on, or that of the whole rollout, for algorithms
    that compare runs by their last turn."""
    discount: float = Field(1.0, ge=0, le=1)
    """Discount of the returns of `step_wise` per turn."""
    process: bool | None = None
    """Run in a separate process; None: if the environment's class asks for one."""
    python: str | None = None
    """Interpreter of that process, such as that of another virtual environment; implies `process`."""
    processes: int = Field(16, ge=1)
    """Largest number of processes; further rollouts wait."""
    time_limit: float = Field(60.0, gt=0)
    """Time limit of a reset or a step in seconds."""

    @property
    def separate(self) -> bool:
        """True if the environment runs in its own process."""
        separate = wants_process(ENVIRONMENTS.get(self.environment)) if self.process is None else self.process
        return separate or self.python is not None or ":" in self.environment

    @property
    def reply_seconds(self) -> float:
        """Seconds to wait for a reset or a step; PATIENCE is for a free process."""
        return self.time_limit + (GRACE if self.separate else 0.0)

    @property
    def all_arguments(self) -> dict[str, Any]:
        return self.environment_args

    @model_validator(mode="after")
    def _read(self) -> Self:
        for name, read, needs in (
            ("turn_rewards", self.step_wise, "step_wise: true"),
            ("discount", self.step_wise, "step_wise: true"),
            ("discount", self.turn_rewards == "return", "turn_rewards: return"),
            ("processes", self.separate, "process: true"),
        ):
            if name in self.model_fields_set and not read:
                raise ValueError(f"{name} has no effect without {needs}")
        return self

    @model_validator(mode="after")
    def _check_environment(self) -> Self:
        if ":" not in self.environment:
            kind = ENVIRONMENTS.resolve(self.environment)
            is_fixed = isinstance(kind, type) and not hasattr(kind, "__getattr__")  # a wrapper has those of another
            if absent := [name for name in METHODS if is_fixed and not hasattr(kind, name)]:
                raise InputError(
                    f"environment '{self.environment}' has no method {', '.join(absent)}", key="environment"
                )
            model = ENVIRONMENTS.arguments(kind, self.environment)
            if model is not None:
                _check(model, self.all_arguments, self.environment)
        return self


def _check(model: Any, values: Mapping[str, Any], name: str) -> None:
    """Raise InputError for unknown or wrong arguments. Missing ones may be columns of the tasks."""
    try:
        model.model_validate(values)
    except ValidationError as error:
        wrong = [detail for detail in error.errors() if detail["type"] != "missing"]
        if wrong:
            raise InputError(f"arguments of environment '{name}': {faults_text(wrong)}") from None


@dataclass
class Episode:
    first: Step
    steps: list[Step] = field(default_factory=list)
    cut_off: int = 0
    """Number of turns cut off by the response limit."""

    @property
    def rewards(self) -> list[float]:
        return [step.reward for step in self.steps]

    @property
    def judged(self) -> bool:
        """True if the environment gave a reward in any turn, or every action was invalid."""
        acted = any(not step.info.get("invalid") for step in self.steps)
        return any(step.info.get("rewarded", True) for step in self.steps) or bool(self.steps and not acted)

    @property
    def states(self) -> list[str]:
        return [step.state for step in (self.first, *self.steps)]

    @property
    def metrics(self) -> dict[str, float]:
        invalid = sum(bool(step.info.get("invalid")) for step in self.steps)
        done = bool(self.steps) and self.steps[-1].done
        counts = {
            "turns": float(len(self.steps)),
            "invalid_actions": float(invalid),
            "turns_cut_off": float(self.cut_off),
            "episode_ended": float(done),
        }
        return counts | ({"return": sum(self.rewards)} if self.judged else {})


@WORKFLOWS.register("env_workflow")
class EnvWorkflow(Workflow):
    """Each rollout is one episode of at most `max_turns` turns; its reward is the sum of the environment's rewards.

    The conversation begins with the task's messages; the first observation is added to the last one, or as a new user
    message. All rollouts of a task begin with the same seed. A turn that the response limit cuts off counts like
    others: ending the rollout there would spare the policy the cost of later turns. If an environment fails, its
    rollout is retried; a failure is never a reward.
    """

    arguments: ClassVar[type[EnvArguments]] = EnvArguments

    async def run(self) -> list[Experience]:
        """Return the experiences of the task's rollouts."""
        arguments = self.env_arguments()
        return await all_rollouts(self.task, lambda run: self._rollout(arguments, run))

    def env_arguments(self) -> EnvArguments:
        return with_columns(self.arguments.model_validate(self.task.workflow_args), self.task.raw)

    async def _rollout(self, arguments: EnvArguments, run: int) -> list[Experience]:
        task = self.task
        limit = arguments.reply_seconds
        async with opened(arguments, task.raw) as environment:
            episode = Episode(await step_of(environment.reset, limit, seed_of(task)))
            if episode.first.done:
                raise EnvironmentFailed(f"{environment.reset.__qualname__} ended the episode before its first action")
            tools = as_tools(await called(environment.tools, limit))
            trajectory = Trajectory(
                self.model,
                first_messages(task.messages, episode.first.observation),
                tools=tools or task.tools,
                seed=lambda turn: task.rollout_seed(run, turn),
                chat_template=task.format.chat_template,
                **task.sampling,
            )
            while len(episode.steps) < arguments.max_turns:
                answer = await trajectory.act()
                if answer.finish_reason == "prompt_too_long":
                    break
                episode.cut_off += answer.finish_reason == "length"
                episode.steps.append(await step_of(environment.step, limit, answer.text))
                if episode.steps[-1].done:
                    break
                trajectory.add({"role": "user", "content": episode.steps[-1].observation})
        if not episode.steps and run == task.runs[0]:  # all rollouts of a task begin alike
            log.warning(TOO_LONG, task.index, task.taskset, arguments.environment)
        return experiences_of(trajectory, episode, arguments, run)


def with_columns(arguments: EnvArguments, row: Mapping[str, Any]) -> EnvArguments:
    """Add arguments of a registered environment from columns of the row.

    Raises TrinityError if the environment's package is not installed.
    """
    if arguments.environment not in ENVIRONMENTS:
        return arguments
    kind = ENVIRONMENTS[arguments.environment]
    if arguments.python is None:
        check_installed(arguments.environment, kind)
    model = ENVIRONMENTS.arguments(kind, arguments.environment)
    columns = {name: row[name] for name in (model.model_fields if model else ()) if name in row}
    return arguments.model_copy(update={"environment_args": {**arguments.all_arguments, **columns}})


def seed_of(task: Task) -> int:
    """Return the seed of a task's environment: its column `seed`, else one derived from the run's.

    Raises DataError for a seed that is not an integer.
    """
    seed = task.raw.get("seed")
    if seed is None:
        return task.environment_seed
    text = str(seed).removesuffix(".0")  # a column with gaps is one of floats
    if not re.fullmatch(r"-?[0-9]+", text):
        raise DataError(f"column 'seed' is {seed!r:.80}, not a whole number", key="seed")
    return int(text)


@asynccontextmanager
async def opened(arguments: EnvArguments, raw: Mapping[str, Any]) -> AsyncIterator[Environment]:
    """A context with the environment of a row, here or in its own process. Raises EnvironmentFailed if it cannot be
    made."""
    if arguments.separate:
        registered = ENVIRONMENTS.get(arguments.environment)
        target = arguments.environment if registered is None else target_of(registered, arguments.python is None)
        where = Where(arguments.environment, target, arguments.python or sys.executable)
        columns = {} if registered else raw
        given_up = Event()
        taking = DaemonThreads("environment").submit(
            HOSTS.take, where, arguments.time_limit, arguments.processes, PATIENCE, uncounted(), given_up
        )
        try:
            hosted = await asyncio.wrap_future(taking)
        except asyncio.CancelledError:
            HOSTS.give_up(given_up)
            taking.add_done_callback(_give_back)  # in its thread: the loop may be about to close
            raise
        whole = False
        try:
            await called(hosted.make, START_SECONDS + GRACE, arguments.environment_args, columns)
            yield hosted
            whole = True
        finally:
            HOSTS.give(hosted, whole)
        return
    environment: Environment = await called(
        ENVIRONMENTS.resolve(arguments.environment), arguments.time_limit, **arguments.environment_args
    )
    try:
        yield environment
    except BaseException:
        try:
            await called(environment.close, arguments.time_limit)
        except EnvironmentFailed as failure:  # the first failure is the cause
            log.warning("environment '%s': %s", arguments.environment, failure)
        raise
    await called(environment.close, arguments.time_limit)


def _give_back(future: Future[ProcessEnvironment]) -> None:
    """Return an unused process that arrived after its rollout had ended."""
    if not future.cancelled() and future.exception() is None:
        HOSTS.give(future.result(), True)


async def called(method: Callable[..., Any], limit: float, /, *args: Any, **kwargs: Any) -> Any:
    """Call a plain or `async` method of an environment with a time limit of `limit` seconds.

    Raises EnvironmentFailed if it times out or raises.
    """
    name = method.__qualname__
    try:
        async with asyncio.timeout(limit) as timer:
            if inspect.iscoroutinefunction(method):
                return await method(*args, **kwargs)
            threads = InterruptibleThreads("environment")
            result = await asyncio.get_running_loop().run_in_executor(threads, lambda: method(*args, **kwargs))
            return await result if inspect.isawaitable(result) else result
    except (TrinityError, EnvironmentFailed):
        raise
    except Exception as error:  # an environment may raise anything, including its own TimeoutError
        if timer.expired():
            raise EnvironmentFailed(f"{name} took longer than {limit:g} s (workflow_args.time_limit)") from None
        raise EnvironmentFailed(f"{name}: {type(error).__name__}: {error}") from error


async def step_of(method: Callable[..., Any], limit: float, *args: Any) -> Step:
    """Call `reset` or `step` with a time limit, and check its result.

    Raises EnvironmentFailed, which names the class.
    """
    reply = await called(method, limit, *args)
    try:
        return as_step(reply)
    except EnvironmentFailed as failure:
        raise EnvironmentFailed(f"{method.__qualname__}: {failure}") from None


def first_messages(messages: list[Message], observation: str) -> list[Message]:
    """Add the first observation to the task's messages, as the user."""
    if not messages or messages[-1]["role"] != "user":
        return [*messages, {"role": "user", "content": observation}]
    last = messages[-1]
    return [*messages[:-1], {**last, "content": f"{last['content']}\n{observation}".strip()}]


def experiences_of(trajectory: Trajectory, episode: Episode, arguments: EnvArguments, run: int) -> list[Experience]:
    """Return one experience, or one for each turn. A rollout that was not judged has no reward."""
    fields: dict[str, Any] = {"run": run, "metrics": episode.metrics}
    if not arguments.step_wise or not episode.judged:
        reward = sum(episode.rewards) if episode.judged else None
        return [trajectory.experience(reward, **fields, info={"state": episode.first.state})]
    if arguments.turn_rewards == "rollout":
        steps = trajectory.step_experiences([sum(episode.rewards)] * len(episode.rewards), **fields)
    else:
        steps = trajectory.step_experiences(episode.rewards, arguments.discount, **fields)
    for experience, state in zip(steps, episode.states, strict=False):
        experience.state, experience.info = state, {**experience.info, "state": state}
    return steps
