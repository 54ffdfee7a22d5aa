"""What an environment is, and environments by name."""

from __future__ import annotations

import importlib.util
import inspect
import math
from collections.abc import Awaitable, Mapping
from typing import Any, ClassVar, NamedTuple, Protocol

import numpy as np

from trinity_core.data.formats import Tool
from trinity_core.errors import InputError, TrinityError
from trinity_core.registry import Registry

EXTRA = "'trinity-flows[environments]'"
EXTRA_PACKAGES = ("gymnasium", "reasoning_gym")


class EnvironmentFailed(Exception):
    """An environment died, hung, raised or said nonsense. Nothing can be said of the policy; another attempt may do
    better."""


class Step(NamedTuple):
    """What an environment says to an action, or at the start."""

    observation: str
    """What the policy sees next."""
    reward: float = 0.0
    done: bool = False
    """The episode has ended."""
    info: Mapping[str, Any] = {}
    """JSON for people. `state`: a text that is equal where the state is (by default the observation); `invalid`: the
    action was none that the environment knows; `rewarded` False: it gives no reward, so that this 0 is no verdict. In
    an episode whose every action is invalid it is one."""

    @property
    def state(self) -> str:
        """The key of the state."""
        return str(self.info.get("state", self.observation))


Told = Step | tuple[str, float, bool, Mapping[str, Any]]
"""A `Step`, or a plain tuple of the same four: an environment need import nothing of ours."""


class Environment(Protocol):
    """One world that a policy acts in by text. Methods are plain or `async`; one is called at a time.

    An environment whose constructor needs packages of the extra `environments` names one of them as `package`;
    one with `own_process` true runs in its own process unless `workflow_args.process` is false.
    """

    def reset(self, seed: int) -> Told | Awaitable[Told]:
        """Begin a new episode; the same seed begins the same one."""

    def step(self, action: str) -> Told | Awaitable[Told]:
        """Do what the policy's text says."""

    def tools(self) -> list[Tool] | Awaitable[list[Tool]]:
        """Asked after `reset`: tools that the policy may call, as JSON schemas for its chat template; often none."""

    def close(self) -> Any:
        """Release what the environment holds."""


class NeedsPackage(Protocol):
    """A class of environments that needs a package which is not among the core's."""

    package: ClassVar[str]


class NeedsProcess(Protocol):
    """A class of environments that may hang in a way that only the end of its process ends."""

    own_process: ClassVar[bool]


METHODS = ("reset", "step", "tools", "close")
"""Of every environment."""
ENVIRONMENTS: Registry[type[Any]] = Registry("environment", recipe="configs/toy_text")


def as_step(reply: Any) -> Step:
    """What an environment returned, checked. Raises EnvironmentFailed."""
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
    """The tools that an environment returned, checked. Raises EnvironmentFailed."""
    if isinstance(reply, list) and all(isinstance(tool, dict) for tool in reply):
        return reply
    raise EnvironmentFailed(f"its tools are {str(reply)[:200]!r}, not a list of JSON schemas")


def check_installed(name: str, kind: type[Any]) -> None:
    """Raise TrinityError if the package that environments of this class need is not installed here."""
    package = getattr(kind, "package", None)
    if package is not None and importlib.util.find_spec(package) is None:
        raise missing(name, package)


def missing(name: str, package: str, what: str = EXTRA) -> TrinityError:
    """Says how to install what an environment needs: by `what`, the extra for classes that declare a `package`."""
    elsewhere = ", or name an interpreter that has it as workflow_args.python"
    return InputError(
        f"environment '{name}' needs the package {package}; install it: pip install {what}{elsewhere}", key=package
    )


def wants_process(kind: type[Any] | None) -> bool:
    """True if environments of this class run in a process of their own by default."""
    return getattr(kind, "own_process", False)


def target_of(kind: type[Any], same_python: bool) -> str:
    """Where a separate process finds a class: its module if it is one of ours, which may import others of ours; else
    its file, also for another interpreter, where none of ours is installed."""
    ours = same_python and kind.__module__.startswith("trinity_core.")
    return f"{kind.__module__ if ours else inspect.getsourcefile(kind)}:{kind.__qualname__}"
