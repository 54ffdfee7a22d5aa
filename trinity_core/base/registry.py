"""One registry type for everything that a configuration names.

A registry maps names to parts: functions, classes, or small objects around a function. The package of the parts creates
the registry and fills it on import; plugins (`trinity_core.base.plugins`) add parts with the same decorators.
`registry_of` imports the package on the first look-up, so that a configuration can be checked without importing it
first.
"""

from __future__ import annotations

import importlib
import inspect
import sys
from collections.abc import Callable, Collection, Iterable
from types import ModuleType
from typing import Any, TypeVar

from pydantic import BaseModel

from trinity_core.base.errors import InputError, TrinityError, closest
from trinity_core.base.signatures import arguments_model

T = TypeVar("T")

HOMES = {
    "algorithm.algorithm_type": "trinity_core.algorithms:ALGORITHMS",
    "algorithm.advantage_fn": "trinity_core.algorithms.advantages:ADVANTAGES",
    "algorithm.policy_loss_fn": "trinity_core.algorithms.losses:POLICY_LOSSES",
    "algorithm.kl_penalty_fn": "trinity_core.algorithms.kl:KL_FNS",
    "algorithm.kl_loss_fn": "trinity_core.algorithms.kl:KL_FNS",
    "algorithm.entropy_loss_fn": "trinity_core.algorithms.entropy:ENTROPY_LOSSES",
    "algorithm.loss_agg_mode": "trinity_core.algorithms.aggregation:AGGREGATIONS",
    "algorithm.sample_strategy": "trinity_core.exchange.store.strategies:STRATEGIES",
    "replay_buffer.priority_fn": "trinity_core.exchange.store.strategies:PRIORITY_FNS",
    "algorithm.rollout_correction": "trinity_core.algorithms.correction:CORRECTIONS",
    "monitor.monitor_type": "trinity_core.exchange.tracking.forwarder:MONITORS",
    "default_workflow_type": "trinity_core.workflows:WORKFLOWS",
    "default_reward_fn_type": "trinity_core.workflows:REWARD_FNS",
    "selector_type": "trinity_core.data.selectors:SELECTORS",
    "operators": "trinity_core.pipelines:OPERATORS",
    "task_operators": "trinity_core.pipelines.tasks:TASK_OPERATORS",
}
"""Configuration key → module and name of the registry of its names. Importing the module registers the built-in parts.
"""


class Registry(dict[str, T]):
    """Name → part, with a decorator that adds parts and a model of each part's arguments."""

    def __init__(
        self,
        kind: str,
        inputs: Collection[str] = (),
        leading: int = 0,
        functions: Callable[[T], Iterable[Callable[..., Any]]] | None = None,
        recipe: str = "",
        adapt: Callable[[Any], T] | None = None,
    ) -> None:
        """`functions` returns the functions that a part's arguments are passed to; by default the part itself.

        Their first `leading` parameters and those named in `inputs` are filled by the caller; all others are arguments
        that a configuration may give. `recipe` is a plugin folder with further names. `adapt` converts what is
        registered to a part; it keeps the original as `function`.
        """
        super().__init__()
        self.kind = kind
        """What messages call an entry."""
        self.elsewhere: dict[str, str] = {}
        """Further names, whose parts are imported on demand: name → dotted path."""
        self.inputs = frozenset(inputs)
        self._leading = leading
        self._functions = functions
        self._recipe = recipe
        self._adapt = adapt or (lambda part: part)
        self._modules: dict[str, ModuleType | None] = {}
        self._models: dict[str, tuple[T, type[BaseModel] | None]] = {}

    def register(self, name: str) -> Callable[[T], T]:
        """Return a decorator that adds a part under this name.

        Raises InputError if another part has the name: silent replacement would change every run. A part whose file is
        imported again, as after a failed plugin, replaces itself.
        """
        if not isinstance(name, str):
            raise InputError(f"a {self.kind} is registered under a name, as in register('mine')")

        def add(registered: T) -> T:
            part = self._adapt(registered)
            module = _module_of(part)
            again = name in self and _same_source(self[name], part) and self._modules.get(name) is not module
            if name in self and not again:
                raise InputError(f"the {self.kind} '{name}' is registered already; choose another name", key=name)
            self[name], self._modules[name] = part, module
            return registered

        return add

    def resolve(self, name: str) -> T:
        """Return the part with that name or dotted path, `package.module.Name`. Raises InputError with the closest
        name."""
        if name in self:
            return self[name]
        if self.is_imported(name):
            return self._imported(self.elsewhere.get(name, name))
        near = closest(name, self)
        more = f", and more with plugin_dir: {self._recipe}" if self._recipe else ""
        hint = f"did you mean '{near}'?" if near else f"there are {', '.join(sorted(self)) or 'none'}{more}."
        raise InputError(
            f"there is no {self.kind} '{name}'; {hint} "
            "Your own is found through --plugin-dir or as package.module.Name",
            key=name,
        )

    def is_imported(self, name: str) -> bool:
        return name not in self and ("." in name or name in self.elsewhere)

    def uses(self, name: str, value: str) -> bool:
        """True if the part of that name takes this input; False for an unknown name."""
        try:
            part = self.resolve(name)
        except TrinityError:  # reported by validation
            return False
        return any(value in inspect.signature(function).parameters for function in self._called(part))

    def arguments(self, part: T, name: str) -> type[BaseModel] | None:
        """Return the model of a part's arguments; None if it takes any, or has no signature.

        Raises InputError for a part that was registered without the decorator of its kind.
        """
        entry = self._models.get(name)
        if entry is not None and entry[0] is part:
            return entry[1]
        try:
            functions = self._called(part)
        except AttributeError:
            plain = type(part).__name__
            raise InputError(
                f"the {self.kind} '{name}' is a plain {plain}; use the decorator of its kind", key=name
            ) from None
        self._models[name] = (part, arguments_model(name, functions, self.inputs, self._leading))
        return self._models[name][1]

    def _called(self, part: Any) -> Iterable[Callable[..., Any]]:
        return (part,) if self._functions is None else self._functions(part)

    def _imported(self, path: str) -> T:
        module_name, _, attribute = path.rpartition(".")
        try:
            module = vars(importlib.import_module(module_name))
        except ImportError as error:
            raise TrinityError(f"{self.kind} '{path}' cannot be imported: {error}", key=path) from error
        except (Exception, SystemExit) as error:  # a script may parse the arguments of `trinity` as its own
            raise TrinityError(
                f"{self.kind} '{path}' cannot be imported: {type(error).__name__}: {error}", key=path
            ) from error
        if attribute not in module:
            raise TrinityError(f"module {module_name} has no {self.kind} '{attribute}'", key=path)
        return self._adapt(module[attribute])


def registry_of(key: str) -> Registry[Any]:
    """Return the registry for a configuration key (see `HOMES`), with all built-in parts."""
    module, _, name = HOMES[key].partition(":")
    registry: Registry[Any] = vars(importlib.import_module(module))[name]
    return registry


def _module_of(part: Any) -> ModuleType | None:
    """Return the module that defines a part, or None. Importing its file again creates another module."""
    return sys.modules.get(getattr(getattr(part, "function", part), "__module__", None) or "")


def _same_source(old: Any, new: Any) -> bool:
    old, new = getattr(old, "function", old), getattr(new, "function", new)
    try:
        files = inspect.getsourcefile(old), inspect.getsourcefile(new)
        return old is not new and (files[0], old.__qualname__) == (files[1], new.__qualname__)
    except (TypeError, AttributeError):
        return False
