"""Starts a worker of our own Ray, in place of Ray's `setup_worker.py`.

Ray's script imports all of Ray, which costs each actor's start 0.6 s of CPU time, although the worker imports it again.

python ray_worker.py WORKER ARGUMENT … [--serialized-runtime-env-context=JSON] [--language=PYTHON]
"""

from __future__ import annotations

import json
import os
import re
import sys
from collections.abc import Sequence

CONTEXT, LANGUAGE = "--serialized-runtime-env-context=", "--language="


def main(arguments: Sequence[str]) -> None:
    """Replace this process by the worker, with its actor's environment variables, in which Ray expands variables."""
    for context in (word.removeprefix(CONTEXT) for word in arguments if word.startswith(CONTEXT)):
        for name, value in json.loads(context)["env_vars"].items():
            os.environ[name] = re.sub(r"\$\{[A-Z0-9_]+\}", "", os.path.expandvars(value))
    worker = [word for word in arguments if not word.startswith((CONTEXT, LANGUAGE))]
    os.execv(sys.executable, [sys.executable, *worker])  # noqa: S606 - Ray takes a shell in between


if __name__ == "__main__":
    main(sys.argv[1:])
