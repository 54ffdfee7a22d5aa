"""Commands of the project, called in the tests' own process: starting one takes seconds of a core."""

from __future__ import annotations

import io
import sys
from collections.abc import Callable
from contextlib import chdir, redirect_stderr, redirect_stdout
from pathlib import Path
from subprocess import CompletedProcess
from unittest import mock

ROOT = Path(__file__).parent.parent


def called(main: Callable[[], None], *arguments: str) -> CompletedProcess[str]:
    """What a console script prints and ends with, in the repository's folder. Raises what the script raises."""
    code: int | str | None = 0
    with (
        chdir(ROOT),
        mock.patch.object(sys, "argv", ["trinity", *arguments]),
        redirect_stdout(io.StringIO()) as printed,
        redirect_stderr(io.StringIO()) as errors,
    ):
        try:
            main()
        except SystemExit as end:
            code = end.code
    return CompletedProcess([*arguments], int(code or 0), printed.getvalue(), errors.getvalue())
