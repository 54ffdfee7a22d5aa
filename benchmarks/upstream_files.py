"""Which workflow files of a checkout of Trinity-RFT can be imported here, through `trinity_core.compat`.

    python benchmarks/upstream_files.py DIR

Prints one line for each Python file below DIR/trinity/common/workflows: `ok`, or the error. The exit code is 1 if one
has no name `trinity…` that is needed; what is missing besides is a package that the file's own users install.
"""

from __future__ import annotations

import argparse
import importlib
import sys
from collections.abc import Iterator
from pathlib import Path

from trinity_core.compat import answer_imports

WORKFLOWS = ("trinity", "common", "workflows")


def files(checkout: Path) -> Iterator[str]:
    """The modules of the workflow files, but for packages."""
    for path in sorted(checkout.joinpath(*WORKFLOWS).rglob("*.py")):
        if path.name != "__init__.py":
            yield ".".join(path.relative_to(checkout).with_suffix("").parts)


def main() -> None:
    """Import each file and print what became of it."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("checkout", type=Path)
    checkout = parser.parse_args().checkout.absolute()
    answer_imports(checkout)
    errors: dict[str, str] = {}
    names = list(files(checkout))
    for name in names:
        try:
            importlib.import_module(name)
        except Exception as error:  # noqa: BLE001 - one file's error says nothing of the next
            errors[name] = f"{type(error).__name__}: {error}"
        print(f"{name.removeprefix('trinity.common.workflows.'):60} {errors.get(name, 'ok')}")
    print(f"{len(names) - len(errors)} of {len(names)} imported")
    sys.exit(any("Trinity-RFT's" in error for error in errors.values()))


if __name__ == "__main__":
    main()
