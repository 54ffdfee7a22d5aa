"""What bash makes of a shell program, and what our reader of veRL's scripts makes of it otherwise.

`test_import_verl.py` and `benchmarks/shell_programs.py` share it. A program calls `run`, which prints its words. Bash
is the judge: it has no variables of the environment but HOME and PATH, and no commands but its own.
"""

from __future__ import annotations

import re
import subprocess
from tempfile import TemporaryDirectory

from trinity_core.import_verl.conditions import UNKNOWN, variable
from trinity_core.import_verl.shell import ShellScript

RUN = "run() { printf '%s\\037' run \"$@\"; printf '\\036'; }\n"
ARGUMENTS = ["8", "a b", "x=*"]
HOME = "/home/u"


def bash_words(text: str) -> list[list[str]] | None:
    """The words of each `run` of a program as bash has them; None if it calls the program wrong."""
    environment = {"HOME": HOME, "PATH": "/nonexistent", "LC_ALL": "C.UTF-8"}
    script = f'basename() {{ local p=${{1%/}}; echo "${{p##*/}}"; }}\n{RUN}{text}'
    command = ["/bin/bash", "-c", script, "script", *ARGUMENTS]
    with TemporaryDirectory() as empty:  # no file fits a pattern
        done = subprocess.run(command, cwd=empty, env=environment, capture_output=True, text=True, timeout=60)
    if "syntax error" in done.stderr or "unexpected EOF" in done.stderr:
        return None
    return [words.split("\037")[1:-1] for words in done.stdout.split("\036")[:-1]]


def misread(text: str) -> str | None:
    """What of a program is read otherwise than by bash; empty if nothing is.

    None if the reader assumes something that bash, which has no machine around it here, cannot confirm. A variable that
    is not set counts as empty. Raises UnreadableShell for a program that is refused.
    """
    script = ShellScript(text, ARGUMENTS)
    calls = [command.words[1:] for command in script.commands() if command.words[0] == "run"]
    assumed = [assumption for assumption in script.assumptions if "taken as not set" not in assumption]
    if assumed or any(UNKNOWN in word for words in calls for word in words):
        return None
    ours = [[re.sub("\ue000.*?\ue002", "", word.replace(variable("HOME"), HOME)) for word in words] for words in calls]
    theirs = bash_words(text)
    return "" if theirs in (ours, None) else f"{text}\nbash: {theirs}\nhere: {ours}"
