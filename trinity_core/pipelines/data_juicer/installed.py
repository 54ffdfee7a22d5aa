"""Which operators the Data-Juicer beside this environment has.

They are read from its source: importing the package takes seconds, and another Python.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from functools import cache
from pathlib import Path

from trinity_core.pipelines.data_juicer.local import require_installed

SOURCES = "lib/python3*/site-packages/data_juicer/ops/**/*.py"
CONSTANT = re.compile(r"""^(\w*NAME) = ["'](\w+)["']""", re.MULTILINE)
REGISTERED = re.compile(r'^@OPERATORS\.register_module\((?:f?"([\w{}]+)"|(\w+))\)', re.MULTILINE)
"""A name, which may hold constants in braces; or a constant."""


@cache
def installed_operators() -> frozenset[str]:
    """Names of the operators. Raises TrinityError where Data-Juicer is not installed."""
    environment = require_installed().parent.parent
    return frozenset(name for path in environment.glob(SOURCES) for name in _registered(path))


def _registered(path: Path) -> Iterator[str]:
    text = path.read_text(encoding="utf-8")
    constants = dict(CONSTANT.findall(text))
    for name, constant in REGISTERED.findall(text):
        yield name.format(**constants) if name else constants[constant]
