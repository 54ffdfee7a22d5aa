"""Trinity-RFT's names (`from trinity.common.workflows import Workflow`), for plugins that were written for it."""

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

from trinity_core.compat import experience, model, rewards, step_wise, workflow
from trinity_core.registry import Registry
from trinity_core.workflows.base import WORKFLOWS
from trinity_core.workflows.rewards import REWARD_FNS


class UpstreamRegistry:
    """Trinity-RFT's registry, which registers in one of this project's."""

    def __init__(self, ours: Registry[Any], part: Callable[[Any], Any] = lambda kind: kind) -> None:
        self._ours, self._part = ours, part

    def register_module(self, name: str, module_cls: Any = None, force: bool = False, lazy: bool = False) -> Any:
        """A decorator, or with `module_cls` that class. Raises InputError if the name is taken, unless `force`."""

        def add(kind: Any) -> Any:
            if force:
                self._ours.pop(name, None)
            self._ours.register(name)(self._part(kind))
            return kind

        return add if module_cls is None else add(module_cls)

    def get(self, name: str) -> Any:
        """The class of that name or dotted path."""
        part = self._ours.resolve(name)
        return getattr(part, "upstream", part)


def _get_logger(name: str | None = None, **_: Any) -> logging.Logger:
    return logging.getLogger(name or "trinity")


_FLOWS = {name: kind for name, kind in vars(workflow).items() if name.endswith("Workflow")}
_STEPS = {name: kind for name, kind in vars(step_wise).items() if name.endswith("Workflow")}
_REWARDS = {"RewardFn": rewards.RewardClass, "REWARD_FUNCTIONS": UpstreamRegistry(REWARD_FNS, rewards.as_function)}
_ALL = {
    **_FLOWS, **_STEPS, **_REWARDS, "WORKFLOWS": UpstreamRegistry(WORKFLOWS), "Task": workflow.Task,
    "Experience": experience.Experience, "EID": experience.EID, "ModelWrapper": model.ModelWrapper,
    "GenerationConfig": workflow.GenerationConfig,
}  # fmt: skip
_CLASSES = {
    "MathRewardFn": "math_reward", "MathBoxedRewardFn": "math_boxed_reward", "MathDAPORewardFn": "math_dapo_reward",
    "CountDownRewardFn": "countdown_reward", "FormatReward": "format_reward", "AccuracyReward": "accuracy_reward",
}  # fmt: skip
_SCORES = {name: rewards.reward_class(function) for name, function in _CLASSES.items()} | _REWARDS
MODULES: Mapping[str, Mapping[str, Any]] = {
    **dict.fromkeys(("workflows", "workflows.workflow", "workflows.step_wise_workflow", "experience", "config"), _ALL),
    **dict.fromkeys(("models", "models.model"), _ALL),
    **dict.fromkeys(("rewards", "rewards.reward_fn", "rewards.math_reward", "rewards.dapo_reward"), _SCORES),
    **dict.fromkeys(("rewards.countdown_reward", "rewards.format_reward", "rewards.accuracy_reward"), _SCORES),
    "..utils.log": {"get_logger": _get_logger},
    "..utils.registry": {"Registry": UpstreamRegistry},
    "..utils.annotations": dict.fromkeys(("Deprecated", "Experimental"), lambda part: part),
}
NAMES = {f"trinity.common.{name}".replace(".common...", "."): names for name, names in MODULES.items()}
"""Module → its names."""


class UpstreamNames(MetaPathFinder, Loader):
    """Answers imports of `trinity`, and refuses those of names that are not here."""

    def __init__(self, folder: Path) -> None:
        """If `folder` is a checkout of Trinity-RFT, its other files of workflows and rewards are imported."""
        self._folder = folder

    def find_spec(
        self, fullname: str, path: Sequence[str] | None = None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        """Raises ModuleNotFoundError for a name of Trinity-RFT that is not here."""
        if fullname.split(".")[0] != "trinity":
            return None
        if any(f"{name}.".startswith(f"{fullname}.") for name in NAMES):
            return ModuleSpec(fullname, self, is_package=True)
        parents = fullname.split(".")[:-1]
        if parents[1:2] == ["common"] and parents[2:3] in (["workflows"], ["rewards"]):
            spec = PathFinder.find_spec(fullname, [str(self._folder.joinpath(*parents))])
            if spec is not None:
                return spec
        raise ModuleNotFoundError(f"Trinity-RFT's {fullname} is not here; docs/porting.md says what is, and what to do")

    def exec_module(self, module: ModuleType) -> None:
        """Give the module its names."""
        vars(module).update(NAMES.get(module.__name__, {}))


def answer_imports(folder: Path) -> None:
    """Answer imports of `trinity` from now on; `folder` holds the plugins.

    If it is a checkout of Trinity-RFT, the workflows that it lists are known by their names.
    """
    listed = folder / "trinity" / "common" / "workflows" / "__init__.py"
    tree = ast.walk(ast.parse(listed.read_text(encoding="utf-8") if listed.is_file() else ""))
    pairs = [pair for node in tree if isinstance(node, ast.Dict) for pair in zip(node.keys, node.values, strict=True)]
    WORKFLOWS.elsewhere |= {
        str(name.value): str(path.value)
        for name, path in pairs
        if isinstance(name, ast.Constant) and isinstance(path, ast.Constant)
    }
    if not any(isinstance(finder, UpstreamNames) for finder in sys.meta_path):
        sys.meta_path.insert(0, UpstreamNames(folder))
