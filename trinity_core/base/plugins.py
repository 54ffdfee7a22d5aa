"""User modules: every Python file in a plugin folder is imported, so that it can register its parts."""

from __future__ import annotations

import importlib.util
import re
import sys
from contextlib import redirect_stdout
from pathlib import Path

from trinity_core.base.errors import TrinityError
from trinity_core.base.files import expanded

OURS = ("flows", "studio", "tasks", "trinity_core")
"""Our packages, which plugins must not shadow: some processes import them after the plugins."""
UPSTREAM = re.compile(r"^\s*(from|import)\s+trinity[. ]", re.MULTILINE)


def load_plugins(folder: str | Path | None) -> list[str]:
    """Import every Python file of a folder in name order, so that it can register its parts. Return the module names.

    The folder is added to `sys.path`, so that files can import each other. A second call for the same file does
    nothing. If files import `trinity` and Trinity-RFT is not installed, `trinity_core.compat` takes its place. In a
    checkout of Trinity-RFT it always does, and the package's files are imported when a configuration names them. Raises
    TrinityError if the folder is missing or a file cannot be imported.
    """
    if folder is None:
        return []
    root = expanded(folder).absolute()
    if not root.is_dir():
        raise TrinityError(f"the plugin folder {root} does not exist", key="plugin_dir")
    if _wants_upstream(root):
        checkout = next(filter(_is_upstream, (root, *root.parents)), root)
        importlib.import_module("trinity_core.compat").answer_imports(checkout)
    if str(root) not in sys.path:
        sys.path.append(str(root))
    others = ("setup.py", "conftest.py") if _is_upstream(root) else ()
    return [_load(file) for file in python_files(root, "*.py") if file.name[0] != "_" and file.name not in others]


def python_files(root: Path, *patterns: str) -> list[Path]:
    """Return a folder's Python files by name, without hidden files and folders (`.venv`), installed packages, and the
    dangling links that editors keep for unsaved files."""
    files = {file for pattern in patterns for file in root.glob(pattern)}
    return sorted(file for file in files if not _is_foreign(file.relative_to(root)) and file.is_file())


def _is_foreign(file: Path) -> bool:
    return "site-packages" in file.parts or any(part.startswith(".") for part in file.parts)


def _is_upstream(root: Path) -> bool:
    return (root / "trinity" / "common" / "workflows").is_dir()


def _wants_upstream(root: Path) -> bool:
    """True for a checkout of Trinity-RFT, or if files in the folder or its subfolders import an uninstalled
    Trinity-RFT."""
    if _is_upstream(root):
        return True
    files = python_files(root, "*.py", "*/*.py")
    if not any(UPSTREAM.search(file.read_text(errors="replace")) for file in files):
        return False
    installed = importlib.util.find_spec("trinity")
    if installed is None or installed.origin is None or not installed.submodule_search_locations:
        return True  # no origin: a mere folder `trinity` in the working folder
    # A checkout around the folder, or in the working folder, is on the path of some processes alone: no installation.
    around = (root, *root.parents, Path.cwd())
    places = [Path(folder).resolve() for folder in installed.submodule_search_locations]
    return all(
        folder.is_relative_to(root) or (folder.parent in around and _is_upstream(folder.parent)) for folder in places
    )


def _load(file: Path) -> str:
    """Import one file under its own name, so that dotted paths can refer to it."""
    name = file.stem
    if name in OURS:
        raise TrinityError(
            f"the plugin {file} has the name of a package of this project, {name}; rename it", key=str(file)
        )
    loaded = sys.modules.get(name)
    if loaded is not None:
        if loaded.__file__ and Path(loaded.__file__).resolve() == file.resolve():
            return name
        raise TrinityError(
            f"the plugin {file} has the name of another module, {loaded.__file__ or name}; rename it", key=str(file)
        )
    spec = importlib.util.spec_from_file_location(name, file)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module
    try:
        with redirect_stdout(sys.stderr):  # a command's output may be JSON
            spec.loader.exec_module(module)
    except (Exception, SystemExit) as error:
        del sys.modules[name]
        raise TrinityError(
            f"the plugin {file} cannot be loaded: {type(error).__name__}: {error}", key=str(file)
        ) from error
    return name
