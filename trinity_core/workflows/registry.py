"""Names for things that a user's own module can add to: a plain dict with a decorator, and dotted paths."""

from __future__ import annotations

import difflib
import importlib
import importlib.util
import sys
from collections.abc import Callable
from pathlib import Path
from typing import TypeVar

from trinity_core.errors import TrinityError

T = TypeVar("T")

OURS = ("flows", "tasks", "trinity_core")
"""Packages that are imported beside the plugins, in some processes."""


class Registry(dict[str, T]):
    """Name to thing. `resolve` also takes a dotted path, `package.module.Name`."""

    def __init__(self, kind: str) -> None:
        super().__init__()
        self.kind = kind
        """What an entry is called in messages."""

    def register(self, name: str) -> Callable[[T], T]:
        """Decorator that files a class or function under a name. A later entry of the same name wins."""

        def file(thing: T) -> T:
            self[name] = thing
            return thing

        return file

    def resolve(self, name: str) -> T:
        """The entry of that name or at that dotted path. Raises TrinityError with the nearest names."""
        if name in self:
            return self[name]
        if "." in name:
            return self._imported(name)
        near = difflib.get_close_matches(name, self, n=1)
        hint = f"did you mean '{near[0]}'?" if near else f"there are {', '.join(sorted(self))}."
        raise TrinityError(
            f"there is no {self.kind} '{name}'; {hint} Your own is found through --plugin-dir or as package.module.Name"
        )

    def _imported(self, path: str) -> T:
        module_name, _, attribute = path.rpartition(".")
        try:
            return vars(importlib.import_module(module_name))[attribute]
        except ImportError as error:
            raise TrinityError(f"{self.kind} '{path}' cannot be imported: {error}") from error
        except KeyError as error:
            raise TrinityError(f"module {module_name} has no {self.kind} '{attribute}'") from error


def load_plugins(folder: str | Path | None) -> list[str]:
    """Import every Python file of a folder in name order, so that it can register its parts; returns the module names.

    The folder also goes on `sys.path`, so that files can import each other. A second call for the same file does
    nothing. Raises TrinityError where the folder is missing or a file cannot be imported.
    """
    if folder is None:
        return []
    root = Path(folder).expanduser().absolute()
    if not root.is_dir():
        raise TrinityError(f"the plugin folder {root} does not exist")
    if str(root) not in sys.path:
        sys.path.append(str(root))
    return [_load(file) for file in sorted(root.glob("*.py")) if not file.name.startswith("_")]


def _load(file: Path) -> str:
    """Import one file under its own name, which a dotted path can then use too."""
    name = file.stem
    if name in OURS:
        raise TrinityError(f"the plugin {file} has the name of a package of this project, {name}; rename it")
    known = sys.modules.get(name)
    if known is not None:
        if known.__file__ and Path(known.__file__).resolve() == file.resolve():
            return name
        raise TrinityError(f"the plugin {file} has the name of another module, {known.__file__ or name}; rename it")
    spec = importlib.util.spec_from_file_location(name, file)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module
    try:
        spec.loader.exec_module(module)
    except Exception as error:
        del sys.modules[name]
        raise TrinityError(f"the plugin {file} cannot be loaded: {type(error).__name__}: {error}") from error
    return name
