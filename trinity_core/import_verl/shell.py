"""The commands of a shell script with their words, as bash expands them; none of them is started.

bash itself runs the script: restricted (`set -r`: it starts no program by a path and opens no file to write), without
an environment, and with a PATH on which nothing is, so that every command which is not bash's own ends in
`command_not_found_handle`, which records its words. What only the machine of the training knows is a mark within a
word: a variable that the script does not set (`$HOME`), the output of a command (`$(date)`).
"""

from __future__ import annotations

import os
import re
import shlex
import shutil
import signal
import subprocess
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryDirectory

VARIABLE, UNKNOWN, END = "\ue000", "\ue001", "\ue002"
"""Characters for private use: they begin and end a mark within a word."""
_SPACE = "\ue003"
"""A space within a mark: bash splits no word there."""
_ALWAYS_SET = ("HOME", "USER", "LOGNAME", "HOSTNAME")
"""Environment variables that have a value wherever a script runs."""
_SECONDS = 20.0
_BEGIN, _WORD_END = "\x1d", "\x1e"

_PRELUDE = f"""\
exec 9>&1 >/dev/null </dev/null
__record() {{  # word by word, each by one write: the commands of a pipeline record at the same time
    local line word
    for line in "${{BASH_LINENO[@]}}"; do ((line > PRELUDE_LINES)) && break; done
    for word in "{_BEGIN}$line $((BASH_SUBSHELL > 0 || __ASKED))" "$@"; do
        printf '%s %s{_WORD_END}' "$BASHPID" "$word"
    done
}} >&9
command_not_found_handle() {{
    __record "$@"
    local IFS=' ' text
    text="$*"
    ((BASH_SUBSHELL)) && printf '{UNKNOWN}$(%s){END}' "${{text// /{_SPACE}}}"
    return "$__ASKED"
}}
__ASKED=0
__asked() {{ local __ASKED=1; "$@"; }}
basename() {{ local name="${{1%/}}"; name="${{name##*/}}"; printf '%s\\n' "${{name%"${{2-}}"}}"; }}
pwd() {{ printf '%s\\n' "$PWD"; }}
exec() {{ (($# == 0)) || {{ "$@"; builtin exit; }}; }}
exit() {{ local code=$?; __record exit "$@"; builtin exit "${{1-$code}}"; }}
source() {{ __record source "$@"; }}
.() {{ __record source "$@"; }}
cd() {{ PWD='{UNKNOWN}$PWD{END}'; }}; pushd() {{ cd; }}; popd() {{ cd; }}
kill() {{ :; }}
BASH_ARGV0=SCRIPT PWD='{VARIABLE}PWD{END}' PATH=/nonexistent
trap '' PIPE  # the next command of a pipeline has ended before it reads
set -rT
trap 'set +eux +o pipefail' DEBUG
"""
_FILE = r"""\s*(?:"[^"\n]*"|'[^'\n]*'|[^\s;|&()<>"'])+"""
_REDIRECTION = re.compile(
    r"""(?P<kept>\\.|'[^']*'|"(?:\\.|[^"\\])*"|\(\(.*?\)\)|\[\[.*?\]\]|(?<!\S)\#[^\n]*|<<<)"""
    r"""|(?P<document><<-?\s*(?P<quote>["']?)(?P<end>\w+)(?P=quote))(?P<rest>[^\n]*)(?P<body>\n(?:.*?\n)??\t*(?P=end)(?!\S))"""
    rf"|(?:\d*|&)(?:>>|>\||>|<)(?![&<>(]){_FILE}",
    re.DOTALL,
)
"""A file that a command reads or writes; first, what only looks like one: quoted, compared, in a here-document."""
_PROGRAM = re.compile(r"(?m)(^|[\s;&|(`])(?:[\w.~{}$-]*/)+(?=(?:python[\d.]*|torchrun|accelerate|deepspeed|ray)\s)")
_OF_BASH = re.compile(r"(?m)(^|[\s;&|(])(?=(?:PATH|SHELL|ENV|BASH_ENV)=)")
_CONDITION = re.compile(
    r"(?m)((?:^|[;&|]|\b(?:then|else|do)\b)[ \t]*(?:(?:if|elif)[ \t]+(?:![ \t]+)?|while[ \t]+))(?=[A-Za-z_])"
)
_NAME = r"([A-Za-z_]\w*)"
_USED = re.compile(rf"\$\{{?{_NAME}")
_ASSIGNED = re.compile(
    rf"(?:^|[\s;&|(]){_NAME}(?:\[\w*\])?\+?=|\b(?:for|read|mapfile|readarray)\s+(?:-\w+\s+)*{_NAME}", re.M
)
_DEFAULT_OR_TEST = re.compile(rf"\$\{{{_NAME}:?[-+=?]|(?<![^\s;!(])\[\[?\s[^\]\n]*")
_SET_BY_BASH = {"BASH_SOURCE", "PWD", "PATH", "RANDOM", "UID", "EUID", "SECONDS", "LINENO", "OSTYPE", "FUNCNAME"}
_COMPLAINT = re.compile(r"(?m)^.*?: line (\d+): (?!.*write error: Broken pipe)(.*)$")


class UnreadableShell(Exception):
    """A script that bash does not understand or that does not end; `line` is None where there is no place for it."""

    def __init__(self, reason: str, line: int | None = None) -> None:
        super().__init__(reason)
        self.line = line


@dataclass(frozen=True)
class ShellCommand:
    """A command that is not bash's own, or `exit`."""

    line: int
    """Line of the script, from 1."""
    is_asked: bool
    """Whether the script goes on with its output, or by its success."""
    words: list[str]
    """Its words, expanded."""


@dataclass(frozen=True)
class ShellRun:
    """What a script would run."""

    commands: list[ShellCommand]
    unset: list[str]
    """Variables of the environment that were taken as not set."""
    failures: dict[int, str]
    """What bash itself complained about, by line."""


def dry_run(text: str, arguments: Sequence[str] = (), name: str = "script.sh") -> ShellRun:
    """What the script `name` would run if it were called with `arguments`. Raises UnreadableShell."""
    text = text.replace("\r\n", "\n")
    prelude, (marks, unset) = _PRELUDE.replace("SCRIPT", shlex.quote(name)), _environment(text)
    lines = prelude.count("\n")
    with TemporaryDirectory() as folder:
        script = Path(folder, "script")
        script.write_text(prelude.replace("PRELUDE_LINES", str(lines)) + _harmless(text), encoding="utf-8")
        (work := Path(folder, "work")).mkdir()
        recorded, complaints = _bash([str(script), *arguments], work, marks)
    failures = {int(line) - lines: reason for line, reason in _COMPLAINT.findall(complaints)}
    for line, reason in failures.items():
        if "syntax error" in reason or "unexpected EOF" in reason:
            raise UnreadableShell(reason, line)
    return ShellRun(_commands(recorded, lines), unset, failures)


def variable(name: str) -> str:
    """The mark of an environment variable that the script does not set."""
    return f"{VARIABLE}{name}{END}"


def shown(text: str) -> str:
    """A text with its marks as a script has them."""
    for mark, character in ((VARIABLE, "$"), (UNKNOWN, ""), (END, ""), (_SPACE, " ")):
        text = text.replace(mark, character)
    return text


def _harmless(text: str) -> str:
    """The script with what restricted bash refuses left out, and with conditions that know that they are some."""
    text = _OF_BASH.sub(r"\1OF_", _PROGRAM.sub(r"\1", _without_files(text)))
    return _CONDITION.sub(r"\1__asked ", re.sub(r"\$\{?BASH_SOURCE(\[0\])?\}?", "$0", text))


def _without_files(text: str) -> str:
    def left(found: re.Match[str]) -> str:
        if found["document"]:
            return f"{found['document']}{_without_files(found['rest'])}{found['body']}"
        return found["kept"] or " "

    return _REDIRECTION.sub(left, text)


def _environment(text: str) -> tuple[dict[str, str], list[str]]:
    """Marks of the variables that a script takes from its environment; those that it asks for before it sets them."""
    first: dict[str, int] = {}
    for found in _ASSIGNED.finditer(text):
        first.setdefault(found[1] or found[2], text.find("\n", found.start() + 1) % (len(text) + 1))
    asked: dict[str, int] = {}
    for found in _DEFAULT_OR_TEST.finditer(text):
        for name in [found[1]] if found[1] else _USED.findall(found[0]):
            asked.setdefault(name, found.start())
    used = {*_USED.findall(text)} - {*first, *asked} - _SET_BY_BASH
    unset = [name for name, place in asked.items() if place < first.get(name, place + 1) and name not in _SET_BY_BASH]
    return {name: variable(name) for name in (*_ALWAYS_SET, *used)}, [name for name in unset if name not in _ALWAYS_SET]


def _bash(command: Sequence[str], folder: Path, variables: Mapping[str, str]) -> tuple[str, str]:
    """What bash records, and what it complains about."""
    bash = shutil.which("bash")
    if bash is None:
        raise UnreadableShell("bash, which reads scripts, was not found")
    process = subprocess.Popen(
        [bash, "--norc", *command], cwd=folder, env={**variables, "LC_ALL": "C.UTF-8"}, stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE, stderr=subprocess.PIPE, start_new_session=True,
    )  # fmt: skip
    try:
        output, errors = process.communicate(timeout=_SECONDS)
    except subprocess.TimeoutExpired:
        raise UnreadableShell(f"does not end within {_SECONDS:.0f} s where no program is run") from None
    finally:
        with suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
    return output.decode(errors="replace"), errors.decode(errors="replace")


def _commands(recorded: str, skipped: int) -> list[ShellCommand]:
    by_process: dict[str, ShellCommand] = {}
    commands: list[ShellCommand] = []
    for written in recorded.split(_WORD_END)[:-1]:
        process, _, word = written.partition(" ")
        if word.startswith(_BEGIN):
            line, is_asked = word.removeprefix(_BEGIN).split()
            by_process[process] = ShellCommand(int(line) - skipped, is_asked == "1", [])
            commands.append(by_process[process])
        else:
            by_process[process].words.append(word)
    return commands


__all__ = ["END", "UNKNOWN", "VARIABLE", "ShellCommand", "ShellRun", "UnreadableShell", "dry_run", "shown", "variable"]
