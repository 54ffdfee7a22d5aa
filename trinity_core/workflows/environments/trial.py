"""Plays an environment without a model: `trinity env try`."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Self

from pydantic import ValidationError

from trinity_core.base.errors import InputError, faults_text
from trinity_core.base.plugins import load_plugins
from trinity_core.config.schema import Config
from trinity_core.data.task import Task
from trinity_core.workflows.environments.process import HOSTS
from trinity_core.workflows.environments.protocol import EnvironmentFailed, Step, as_tools
from trinity_core.workflows.environments.workflow import (
    EnvArguments,
    called,
    opened,
    seed_of,
    step_of,
    with_columns,
)


def json_object(option: str, text: str) -> dict[str, Any]:
    """Parse an option. Raises InputError, which names it, for anything but a JSON object."""
    try:
        value = json.loads(text)
    except json.JSONDecodeError as error:
        raise InputError(f"{option} is not JSON ({error}): {text}", key=option) from None
    if not isinstance(value, dict):
        raise InputError(f"{option} must be a JSON object such as '{{\"size\": 4}}', not {text}", key=option)
    return value


def configured_args(stages: Sequence[Config], name: str) -> dict[str, Any]:
    """Return the `workflow_args` of a task set. Raises InputError if no task set of that name has an environment."""
    tasksets = [taskset for config in stages for taskset in config.buffer.explorer_input.all_tasksets]
    acted_in = [taskset for taskset in tasksets if "environment" in taskset.workflow_args]
    taskset = next((taskset for taskset in acted_in if taskset.name == name), None)
    if taskset is None:
        names = ", ".join(dict.fromkeys(str(taskset.name) for taskset in acted_in)) or "none"
        raise InputError(f"no task set '{name}' with an environment in its workflow_args; there is {names}", key=name)
    return dict(taskset.workflow_args)


@dataclass(frozen=True)
class Trial:
    """One episode with fixed actions, in an environment that is opened and called as by `env_workflow`."""

    arguments: EnvArguments
    task: Task

    @classmethod
    def of(cls, workflow_args: Mapping[str, Any], row: dict[str, Any], plugin_dir: Path | None) -> Self:
        """Return an episode of a task with this row. Raises InputError for wrong arguments."""
        load_plugins(plugin_dir)
        task = Task(0, row, "env try", "env_workflow", workflow_args=dict(workflow_args))
        try:
            return cls(with_columns(EnvArguments.model_validate(workflow_args), row), task)
        except ValidationError as error:
            name = workflow_args["environment"]
            key = ".".join(map(str, ("workflow_args", *error.errors()[0]["loc"])))
            raise InputError(f"environment '{name}': {faults_text(error.errors())}", key=key) from None

    def play(self, actions: Iterable[str], show: Callable[[str], object]) -> None:
        """Reset, then take actions until they or the episode end, and show the environment's responses.

        Raises InputError, which names the environment, if it fails.
        """
        try:
            asyncio.run(self._play(actions, show))
        except EnvironmentFailed as failure:
            name = f"environment '{self.arguments.environment}'"
            raise InputError(str(failure) if name in str(failure) else f"{name}: {failure}") from failure
        finally:
            HOSTS.close()

    async def _play(self, actions: Iterable[str], show: Callable[[str], object]) -> None:
        seed, total, turns = seed_of(self.task), 0.0, 0
        limit = self.arguments.reply_seconds
        async with opened(self.arguments, self.task.raw) as environment:
            step = await step_of(environment.reset, limit, seed)
            tools = as_tools(await called(environment.tools, limit))
            if tools:
                show(f"tools: {json.dumps(tools)}")
            show(f"reset, seed {seed}\n{_text(step)}")
            for action in actions:
                step = await step_of(environment.step, limit, action)
                total, turns = total + step.reward, turns + 1
                show(f"action {turns}: {action}\n{_text(step)}")
                if step.done:
                    break
        left = len(actions) - turns if isinstance(actions, list) else 0
        not_taken = f"; {left} further actions were not taken" if left else ""
        show(f"return {total:g} in {turns} actions; the episode {'has ended' if step.done else 'continues'}{not_taken}")


def _text(step: Step) -> str:
    """Return what the policy would see, indented, then the rest on one line."""
    shown = "\n".join(f"  {line}" for line in step.observation.splitlines())
    outcome = f"reward {step.reward:g}, done {str(step.done).lower()}, info {json.dumps(dict(step.info), default=str)}"
    return f"{shown}\n{outcome}"
