"""Compile what the project imports, and what that imports in turn: a third of the installed code.

To compile the rest takes longer than all other steps of the installation; Python does it at the first import. A file
that cannot be compiled is left to whoever imports it.

    .venv/bin/python requirements/compile.py
"""

from __future__ import annotations

import dis
import sys
import sysconfig
from collections.abc import Iterator
from concurrent.futures import ProcessPoolExecutor
from functools import cache, partial
from importlib.machinery import SourceFileLoader
from itertools import pairwise
from pathlib import Path
from types import CodeType
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
PACKAGES = Path(sysconfig.get_paths()["purelib"])
OURS = ("flows", "studio", "tasks", "trinity_core")
CHUNK = 16
"""Modules that a process takes at once."""


def imports(code: CodeType, package: str, in_functions: bool) -> Iterator[str]:
    """Yield what a module of `package` may import: `a.b` and `a.b.c` for `from a.b import c`, not for type checkers."""
    constants: list[Any] = []
    end_of_types = 0
    for instruction, following in pairwise(dis.get_instructions(code)):
        if instruction.offset < end_of_types:
            continue
        if instruction.argval == "TYPE_CHECKING" and following.opname.endswith("IF_FALSE"):
            end_of_types = following.argval
        elif instruction.opname == "LOAD_CONST":
            constants.append(instruction.argval)
        elif instruction.opname == "IMPORT_NAME":
            level, names = constants[-2:]
            above = package.split(".")[: len(package.split(".")) + 1 - level] if level else []
            module = ".".join(filter(None, [*above, instruction.argval]))
            yield module
            yield from (f"{module}.{name}" for name in names or ())
    for part in code.co_consts if in_functions else ():
        if isinstance(part, CodeType):
            yield from imports(part, package, in_functions)


def compiled(module: str, path: str, in_functions: bool = False) -> dict[str, str]:
    """Compile a module, unless that is done already; return name → file of the installed modules that it imports."""
    sys.dont_write_bytecode = False
    try:
        code = SourceFileLoader(module, path).get_code(module)
    except (SyntaxError, ValueError, OSError):
        return {}
    package = module if path.endswith("__init__.py") else module.rpartition(".")[0]
    names = set(imports(code, package, in_functions)) if code else set()
    return {part: file for name in names for part in (name, *packages(name)) if (file := installed(part))}


def packages(name: str) -> Iterator[str]:
    """Yield `a` and `a.b` for `a.b.c`."""
    while name := name.rpartition(".")[0]:
        yield name


@cache
def installed(module: str) -> str:
    """Return the file of an installed module, "" if there is none of that name."""
    path = PACKAGES / module.replace(".", "/")
    files = path / "__init__.py", path.with_name(f"{path.name}.py")
    return next((str(file) for file in files if file.is_file()), "")


def main() -> None:
    ours = [path for room in OURS for path in (ROOT / room).rglob("*.py")]
    names = [".".join(path.relative_to(ROOT).with_suffix("").parts) for path in ours]
    done: dict[str, str] = {}
    with ProcessPoolExecutor() as processes:
        imported = processes.map(partial(compiled, in_functions=True), names, map(str, ours), chunksize=CHUNK)
        while new := {name: file for files in imported for name, file in files.items() if name not in done}:
            done |= new
            imported = processes.map(compiled, new, new.values(), chunksize=CHUNK)


if __name__ == "__main__":
    main()
