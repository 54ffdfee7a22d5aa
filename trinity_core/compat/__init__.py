"""Trinity-RFT's names (`from trinity.common.workflows import Workflow`), for plugins written for it."""

from __future__ import annotations

import ast
import logging
import sys
from collections.abc import Callable, Mapping, Sequence
from importlib.abc import Loader, MetaPathFinder
from importlib.machinery import ModuleSpec, PathFinder
from pathlib import Path
from types import ModuleType
from typing import Any

from trinity_core.base.errors import InputError
from trinity_core.base.registry import Registry
from trinity_core.compat import experience, model, workflow
from trinity_core.workflows.base import WORKFLOWS
from trinity_core.workflows.rewards import REWARD_FNS


class UpstreamRegistry:
    """Trinity-RFT's registry, backed by one of this project's."""

    def __init__(self, ours: Registry[Any], part: Callable[[Any], Any] = lambda kind: kind) -> None:
        self._ours, self._part = ours, part

    def register_module(self, name: str, module_cls: Any = None, force: bool = False, lazy: bool = False) -> Any:
        """Return a decorator, or register `module_cls`. Raises InputError if the name is taken, unless `force`."""

        def add(kind: Any) -> Any:
            if force:
                self._ours.pop(name, None)
            self._ours.register(name)(self._part(kind))
            return kind

        return add if module_cls is None else add(module_cls)

    def get(self, name: str) -> Any:
        """Return the class of that name or dotted path."""
        part = self._ours.resolve(name)
        return getattr(part, "upstream", part)


_REWARDS = {
    "MathRewardFn": "math_reward", "MathBoxedRewardFn": "math_boxed_reward", "MathDAPORewardFn": "math_dapo_reward",
    "CountDownRewardFn": "countdown_reward", "FormatReward": "format_reward", "AccuracyReward": "accuracy_reward",
}  # fmt: skip
NAMES: Mapping[str, Any] = {
    **{name: kind for name, kind in vars(workflow).items() if name.endswith("Workflow")},
    **{name: workflow.reward_class(function) for name, function in _REWARDS.items()},
    **{kind.__name__: kind for kind in (experience.Experience, experience.EID, model.ModelWrapper)},
    **{kind.__name__: kind for kind in (workflow.GenerationConfig, workflow.Task)},
    **dict.fromkeys(("Deprecated", "Experimental"), lambda part: part),
    "WORKFLOWS": UpstreamRegistry(WORKFLOWS),
    "RewardFn": workflow.RewardClass,
    "REWARD_FUNCTIONS": UpstreamRegistry(REWARD_FNS, workflow.as_function),
    "Registry": UpstreamRegistry,
    "get_logger": lambda name=None, **_: logging.getLogger(name or "trinity"),
}
MODULES = (
    "common.workflows.workflow", "common.workflows.step_wise_workflow", "common.experience", "common.config",
    "common.models.model", "common.rewards.reward_fn", "common.rewards.math_reward", "common.rewards.dapo_reward",
    "common.rewards.countdown_reward", "common.rewards.format_reward", "common.rewards.accuracy_reward",
    "utils.log", "utils.registry", "utils.annotations",
)  # fmt: skip
"""Modules that can be imported; each of them, and of the packages above, has all names."""


class UpstreamNames(MetaPathFinder, Loader):
    """Serves imports of `trinity`, and refuses names that do not exist here."""

    def __init__(self, folder: Path) -> None:
        """If `folder` is a checkout of Trinity-RFT, its other workflow and reward files can be imported."""
        self._folder = folder

    def find_spec(
        self, fullname: str, path: Sequence[str] | None = None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        """Raises ModuleNotFoundError for a name of Trinity-RFT that does not exist here."""
        if fullname.split(".")[0] != "trinity":
            return None
        if any(f"trinity.{name}.".startswith(f"{fullname}.") for name in MODULES):
            return ModuleSpec(fullname, self, is_package=True)
        parents = fullname.split(".")[:-1]
        if parents[1:2] == ["common"] and parents[2:3] in (["workflows"], ["rewards"]):
            spec = PathFinder.find_spec(fullname, [str(self._folder.joinpath(*parents))])
            if spec is not None:
                return spec
        raise ModuleNotFoundError(
            f"Trinity-RFT's {fullname} is not available here; see docs/porting.md for what is, and what to do"
        )

    def exec_module(self, module: ModuleType) -> None:
        vars(module).update(NAMES)


def answer_imports(folder: Path) -> None:
    """Serve imports of `trinity` from now on; `folder` holds the plugins.

    If it is a checkout of Trinity-RFT, the workflows that it lists are known by their names. Raises InputError if the
    list is not valid Python.
    """
    listed = folder / "trinity" / "common" / "workflows" / "__init__.py"
    try:
        tree = ast.parse(listed.read_bytes() if listed.is_file() else b"")
    except SyntaxError as error:
        raise InputError(f"{listed}:{error.lineno or 1} is not valid Python: {error.msg}") from error
    except (OSError, ValueError) as error:
        raise InputError(f"{listed} cannot be read: {error}") from error
    pairs = [
        pair
        for node in ast.walk(tree)
        if isinstance(node, ast.Dict)
        for pair in zip(node.keys, node.values, strict=True)
    ]
    WORKFLOWS.elsewhere |= {
        str(name.value): str(path.value)
        for name, path in pairs
        if isinstance(name, ast.Constant) and isinstance(path, ast.Constant)
    }
    if not any(isinstance(finder, UpstreamNames) for finder in sys.meta_path):
        sys.meta_path.insert(0, UpstreamNames(folder))
