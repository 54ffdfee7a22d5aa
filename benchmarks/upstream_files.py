"""Which workflow files and example configurations of a checkout of Trinity-RFT work here unchanged.

    python benchmarks/upstream_files.py DIR

Prints a line for each Python file below DIR/trinity/common/workflows: `ok`, or the error of its import; and for each
configuration below DIR/examples: `ok`, or each refused key with the reason. Configurations are checked with DIR as
their `plugin_dir` and as the working folder, and with a placeholder for each variable of the environment that they
name. The exit code is 1 if a needed name of `trinity…` is missing; other missing packages are ones that the file's
users install themselves.
"""

from __future__ import annotations

import argparse
import importlib
import os
import re
import sys
from collections.abc import Iterator
from pathlib import Path

from trinity_core.compat import answer_imports
from trinity_core.config import ConfigError
from trinity_core.run.configuration import load_checked

WORKFLOWS = ("trinity", "common", "workflows")
SECTION = re.compile(r"^(model|buffer|algorithm):", re.MULTILINE)
"""A file with none of these configures something else, such as Data-Juicer."""
VARIABLE = re.compile(r"\$\{oc\.env:(\w+)")


def files(checkout: Path) -> Iterator[str]:
    """The modules of the workflow files, but for packages."""
    for path in sorted(checkout.joinpath(*WORKFLOWS).rglob("*.py")):
        if path.name != "__init__.py":
            yield ".".join(path.relative_to(checkout).with_suffix("").parts)


def import_error(name: str) -> str:
    """Why a module cannot be imported; empty if it can."""
    try:
        importlib.import_module(name)
    except Exception as error:  # noqa: BLE001 - one file's error says nothing of the next
        return f"{type(error).__name__}: {error}"
    return ""


def refusals(file: Path, checkout: Path) -> list[str]:
    """Each refused key of a configuration, with the reason."""
    os.environ.update({name: "placeholder" for name in VARIABLE.findall(file.read_text()) if name not in os.environ})
    try:
        load_checked(file, [f"plugin_dir={checkout}"])
    except ConfigError as error:
        return [f"{problem.key}: {problem.message}" for problem in error.problems]
    return []


def main() -> None:
    """Import each workflow file, check each configuration, and print what became of them."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("checkout", type=Path)
    checkout = parser.parse_args().checkout.absolute()
    os.chdir(checkout)
    os.environ.setdefault("OPENAI_BASE_URL", "http://127.0.0.1:1/v1")
    answer_imports(checkout)
    errors = {name: import_error(name) for name in files(checkout)}
    for name, error in errors.items():
        print(f"{name.removeprefix('trinity.common.workflows.'):60} {error or 'ok'}")
    print(f"{list(errors.values()).count('')} of {len(errors)} imported\n")
    configurations = [file for file in sorted(Path("examples").rglob("*.yaml")) if SECTION.search(file.read_text())]
    reasons = {file: refusals(file, checkout) for file in configurations}
    for file, refused in reasons.items():
        print(f"{file.relative_to('examples')!s:60} {'ok' if not refused else ''}")
        print("".join(f"    {reason}\n" for reason in refused), end="")
    print(f"{list(reasons.values()).count([])} of {len(reasons)} accepted")
    sys.exit(any("Trinity-RFT's" in error for error in errors.values()))


if __name__ == "__main__":
    main()
