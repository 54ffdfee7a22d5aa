"""A user's own modules: every Python file of a folder is imported, so that it can register its parts."""

from __future__ import annotations

import importlib.util
import re
import sys
from pathlib import Path

from trinity_core.errors import TrinityError
from trinity_core.files import expanded

OURS = ("flows", "studio", "tasks", "trinity_core")
"""Packages that are imported in addition to the plugins, in some processes."""
UPSTREAM = re.compile(r"^\s*(from|import)\s+trinity[. ]", re.MULTILINE)
"""An import of Trinity-RFT's package."""


def load_plugins(folder: str | Path | None) -> list[str]:
    """Import every Python file of a folder in name order, so that it can register its parts; returns the module names.

    The folder also goes on `sys.path`, so that files can import each other. A second call for the same file does
    nothing. Where files import `trinity`, and Trinity-RFT is not installed, `trinity_core.compat` answers, and always
    in a checkout of Trinity-RFT, whose package's files are imported once a configuration names them. Raises
    TrinityError where the folder is missing or a file cannot be imported.
    """
    if folder is None:
        return []
    root = expanded(folder).absolute()
    if not root.is_dir():
        raise TrinityError(f"the plugin folder {root} does not exist", key="plugin_dir")
    if _wants_upstream(root):
        importlib.import_module("trinity_core.compat").answer_imports(root)
    if str(root) not in sys.path:
        sys.path.append(str(root))
    others = ("setup.py", "conftest.py") if _is_upstream(root) else ()
    return [_load(file) for file in python_files(root, "*.py") if file.name[0] != "_" and file.name not in others]


def python_files(root: Path, *patterns: str) -> list[Path]:
    """The Python files of a folder by name, without hidden ones, those of hidden folders (`.venv`) and of installed
    packages, and without the links to nowhere that an editor keeps for an unsaved file."""
    files = {file for pattern in patterns for file in root.glob(pattern)}
    return sorted(file for file in files if not _is_foreign(file.relative_to(root)) and file.is_file())


def _is_foreign(file: Path) -> bool:
    return "site-packages" in file.parts or any(part.startswith(".") for part in file.parts)


def _is_upstream(root: Path) -> bool:
    """True for a checkout of Trinity-RFT."""
    return (root / "trinity" / "common" / "workflows").is_dir()


def _wants_upstream(root: Path) -> bool:
    """True if files of the folder, or of folders in it, import a Trinity-RFT that is not installed, or it is one."""
    if _is_upstream(root):
        return True
    files = python_files(root, "*.py", "*/*.py")
    if not any(UPSTREAM.search(file.read_text(errors="replace")) for file in files):
        return False
    installed = importlib.util.find_spec("trinity")
    if installed is None or not installed.submodule_search_locations:
        return True
    return all(Path(place).is_relative_to(root) for place in installed.submodule_search_locations)


def _load(file: Path) -> str:
    """Import one file under its own name, which a dotted path can then use too."""
    name = file.stem
    if name in OURS:
        raise TrinityError(
            f"the plugin {file} has the name of a package of this project, {name}; rename it", key=str(file)
        )
    known = sys.modules.get(name)
    if known is not None:
        if known.__file__ and Path(known.__file__).resolve() == file.resolve():
            return name
        raise TrinityError(
            f"the plugin {file} has the name of another module, {known.__file__ or name}; rename it", key=str(file)
        )
    spec = importlib.util.spec_from_file_location(name, file)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module
    try:
        spec.loader.exec_module(module)
    except (Exception, SystemExit) as error:
        del sys.modules[name]
        raise TrinityError(
            f"the plugin {file} cannot be loaded: {type(error).__name__}: {error}", key=str(file)
        ) from error
    return name
