"""The interface of environments, and environments by name."""

from __future__ import annotations

import importlib.util
import inspect
import math
from collections.abc import Awaitable, Mapping
from typing import Any, NamedTuple, Protocol

import numpy as np

from trinity_core.base.errors import InputError, TrinityError
from trinity_core.base.registry import Registry
from trinity_core.data.formats import Tool

EXTRA = "'trinity-flows[environments]'"
EXTRA_PACKAGES = ("gymnasium", "reasoning_gym")


class EnvironmentFailed(Exception):
    """An environment died, hung, raised or returned an invalid value. This says nothing about the policy; another
    attempt may succeed."""


class Step(NamedTuple):
    """An environment's response to an action or a reset."""

    observation: str
    """What the policy sees next."""
    reward: float = 0.0
    done: bool = False
    """True if the episode has ended."""
    info: Mapping[str, Any] = {}
    """JSON for people. `state`: a string that is equal for equal states (by default the observation); `invalid`: true
    if the action was not understood; `rewarded`: false if there is no reward, so that the 0 is no verdict. If every
    action of an episode is invalid, the 0 is a verdict."""

    @property
    def state(self) -> str:
        return str(self.info.get("state", self.observation))


Told = Step | tuple[str, float, bool, Mapping[str, Any]]
"""A `Step`, or a plain tuple of the same four values, so that an environment need not import this package."""


class Environment(Protocol):
    """A text environment for a policy. Methods are plain or `async`; one is called at a time.

    An environment whose constructor needs packages of the extra `environments` names one of them as `package`; one with
    `own_process` true, which may hang so that only ending its process helps, runs in its own process unless
    `workflow_args.process` is false.
    """

    def reset(self, seed: int) -> Told | Awaitable[Told]:
        """Begin a new episode; equal seeds begin equal episodes."""

    def step(self, action: str) -> Told | Awaitable[Told]:
        """Perform the action in the policy's text."""

    def tools(self) -> list[Tool] | Awaitable[list[Tool]]:
        """Called after `reset`: return the tools that the policy may call, as JSON schemas for its chat template; often
        none."""

    def close(self) -> Any:
        """Release resources."""


METHODS = ("reset", "step", "tools", "close")
ENVIRONMENTS: Registry[type[Any]] = Registry("environment", recipe="configs/toy_text")


def as_step(reply: Any) -> Step:
    """Check the value that an environment returned. Raises EnvironmentFailed."""
    if isinstance(reply, tuple | list):
        reply = [value.item() if isinstance(value, np.generic) else value for value in reply]
    match reply:
        case [str(observation), int() | float() as reward, bool(done), dict(info)] if math.isfinite(reward):
            return Step(observation, float(reward), done, info)
    raise EnvironmentFailed(
        f"it said {str(reply)[:200]!r}, which is not (observation: text, reward: a finite number, done: true or false, "
        "info: a mapping)"
    )


def as_tools(reply: Any) -> list[Tool]:
    """Check the tools that an environment returned. Raises EnvironmentFailed."""
    if isinstance(reply, list) and all(isinstance(tool, dict) for tool in reply):
        return reply
    raise EnvironmentFailed(f"its tools are {str(reply)[:200]!r}, not a list of JSON schemas")


def check_installed(name: str, kind: type[Any]) -> None:
    """Raise TrinityError if the package that environments of this class need is not installed."""
    package = getattr(kind, "package", None)
    if package is not None and importlib.util.find_spec(package) is None:
        raise missing(name, package)


def missing(name: str, package: str, what: str = EXTRA) -> TrinityError:
    """Return an error that says how to install a missing package: `what`, by default the extra for classes with a
    `package`."""
    elsewhere = ", or name an interpreter that has it as workflow_args.python"
    return InputError(
        f"environment '{name}' needs the package {package}; install it: pip install {what}{elsewhere}", key=package
    )


def wants_process(kind: type[Any] | None) -> bool:
    """True if environments of this class run in their own process by default."""
    return getattr(kind, "own_process", False)


def target_of(kind: type[Any], same_python: bool) -> str:
    """Return where a separate process finds a class.

    This is the module of a class in this package, which may import others of it; otherwise its file, also with another
    interpreter, which does not have this package.
    """
    ours = same_python and kind.__module__.startswith("trinity_core.")
    return f"{kind.__module__ if ours else inspect.getsourcefile(kind)}:{kind.__qualname__}"
