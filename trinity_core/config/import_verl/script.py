"""The programs that a shell script starts, as bash runs it in a sandbox that contains no other program.

bubblewrap gives bash an empty machine: its libraries, the script, a folder in memory; no network, no environment. For
each program, which is not there, bash calls a function with its words. It counts as run, in a condition as failed.
What only the training machine knows becomes a mark within a word: a variable of its environment, a program's output.
"""

from __future__ import annotations

import re
import shlex
import shutil
import subprocess
from collections.abc import Sequence
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import NamedTuple

VARIABLE, UNKNOWN, END = "⦑", "⦓", "⦒"
"""Begin and end of a mark within a word."""
_SPACE = "⦚"
"""A space within a mark, at which bash must not split."""
FAILS = "fails"
"""The function that is called with a program in a condition, and its words."""
_ASKED = "⦔"
"""The function that is written before a command in a condition."""
_SECONDS = 10.0
_REMEDY = "write `trinity import-verl --` before the command in the script, and run the script"
_PRELUDE = f"""\
ulimit -v 2097152 -f 2048  # KiB, of memory and of a file
note() {{ printf '%s\\0' "${{BASH_LINENO[1]}}" "$@" > "/calls/$BASHPID.$RANDOM"; }}
command_not_found_handle() {{ note "$@"; mark "\\$($*)"; return 0; }}
mark() {{ printf '{UNKNOWN}%s{END}' "${{1// /{_SPACE}}}"; }}
{_ASKED}() {{ case "$(type -t "$1")" in function | builtin) "$@" ;; *) note {FAILS} "$@"; return 1 ;; esac; }}
exec() {{ [ $# = 0 ] || {{ "$@"; exit; }}; }}
sum() {{
    local name
    for name in "${{@:2}}"; do case "${{!name-}}" in '' | *{END}*) mark "\\$(($1))"; return ;; esac; done
    eval "printf '%s' \\"\\$(($1))\\""
}}
[() {{ case "$*" in *{END}* | -[a-mp-yA-Z]' '* | '! '-[a-mp-yA-Z]' '*) return 1 ;; *) builtin [ "$@" ;; esac; }}
test() {{ [ "$@" ]; }}
basename() {{ local name="${{1%/}}"; name="${{name##*/}}"; printf '%s\\n' "${{name%"${{2-}}"}}"; }}
cd() {{ PWD='{UNKNOWN}$PWD{END}'; }}
pwd() {{ printf '%s\\n' "$PWD"; }}
PWD='{VARIABLE}PWD{END}' PATH=/nonexistent
unalias -a
builtin exec </dev/null >/dev/null
"""
_ISOLATED = (
    "--unshare-all", "--die-with-parent", "--new-session", "--clearenv", "--cap-drop", "ALL", "--dev", "/dev",
    "--tmpfs", "/work", "--chdir", "/work",
)  # fmt: skip
_LOG = re.compile(r"""(?m) &?\d?>>? *("[^"\n]*/[^"\n]*"|[^\s"'|&;]+/[^\s"'|&;]+)(?= *(2>&1)? *&? *$)""")
"""Output into a folder, which is not there, so that bash would not start the program."""
_INTERPRETER = re.compile(r"[^\s\"'=(]*/(python[\d.]*|torchrun)(?=[\s\"'}])")
_NAME = r"[A-Za-z_]\w*"
_SUM = re.compile(rf"\$\(\(((?:[\w\s+*/%()<>=!&|?:,-]|\$\{{?{_NAME}\}}?)*)\)\)")
_CONDITION = re.compile(r"(?m)\b(if|elif|while(?! *!)) +(! +)?(?!\w+=|getopts|shift)(?=[\w./-]+)")
_IN_OUTPUT = re.compile(r'(\$\( *)(?=[\w./-]+[^()"]*(?:\|\||&&))')
_FILE_TEST = re.compile(r"\[\[ (?:! )?-[a-mp-yG-S] [^\]\n]*\]\]")
_OPTIONS = re.compile(r"(?m)^\s*set +[-+][a-z]+( +pipefail)?(?=\s*(?:#.*)?$)")
_USE = re.compile(rf"\$\{{?({_NAME})(:?[-+=?])?")
_ASSIGNED = re.compile(
    rf"(?<![\w$\{{.-])({_NAME})(?:\[[^\]]*\])?\+?=|\bfor +({_NAME}) +in\b|\b(?:read|getopts)\b[^\n;]*?({_NAME}) *[;\n]"
)
_TESTED = re.compile(r"(?:\[\[?|\btest)\s[^\n;]*")
_OF_BASH = {"PWD", "PATH", "RANDOM", "UID", "EUID", "SECONDS", "LINENO", "REPLY", "BASH_SOURCE", "OPTARG", "OPTIND"}
_ALWAYS_SET = {"HOME", "USER", "LOGNAME", "HOSTNAME"}


class UnreadableScript(Exception):
    """A script that bash does not understand or cannot run here; `line` is None if there is no location."""

    def __init__(self, reason: str, line: int | None = None) -> None:
        super().__init__(reason)
        self.line = line


class Command(NamedTuple):
    line: int
    words: list[str]


class Trace(NamedTuple):
    commands: list[Command]
    unset: list[str]
    """Environment variables with a default, or in a test, that were assumed to be unset."""
    errors: str
    """What bash printed to stderr."""


def trace(text: str, arguments: Sequence[str], name: str) -> Trace:
    """Return the programs that the script `name` starts if called with `arguments`. Raises UnreadableScript."""
    bash, sandbox = shutil.which("bash"), shutil.which("bwrap")
    if bash is None or sandbox is None:
        raise UnreadableScript(f"is run by bash within bubblewrap (bwrap), which is not installed: {_REMEDY}")
    text = text.replace("\r\n", "\n")
    marks, unset = _environment(text)
    with TemporaryDirectory() as folder:
        script, prelude, calls = (Path(folder, name) for name in ("script", "prelude", "calls"))
        script.write_text(_rewritten(text), encoding="utf-8")
        prelude.write_text(f"BASH_ARGV0={shlex.quote(name)}\n{_PRELUDE}", encoding="utf-8")
        calls.mkdir()
        command = [sandbox, *_ISOLATED, "--ro-bind", bash, "/bash", "--bind", str(calls), "/calls"]
        command += ["--ro-bind", str(script), "/script", "--ro-bind", str(prelude), "/prelude"]
        for library in ("/lib", "/lib64", "/usr/lib", "/usr/lib64"):
            command += ["--ro-bind-try", library, library]
        for item in (*marks.items(), ("LC_ALL", "C.UTF-8"), ("BASH_ENV", "/prelude")):
            command += ["--setenv", *item]
        errors = _run([*command, "/bash", "/script", *arguments])
        words = [file.read_text(errors="replace") for file in calls.iterdir()]
        noted = [text.replace(f"{_ASKED} ", "").split("\0")[:-1] for text in words]
    if broken := re.search(r"(?m)line (\d+): (syntax error.*|unexpected E.*)$", errors):
        raise UnreadableScript(broken[2], int(broken[1]))
    if not noted and errors.startswith("bwrap:"):
        raise UnreadableScript(f"is run in a sandbox, which this system does not permit ({errors.strip()}): {_REMEDY}")
    return Trace(sorted(Command(int(line), words) for line, *words in noted if words), unset, errors)


def shown(text: str) -> str:
    """Return a text with its marks as written in the script."""
    for mark, character in ((VARIABLE, "$"), (UNKNOWN, ""), (END, ""), (_SPACE, " ")):
        text = text.replace(mark, character)
    return text


def _run(command: Sequence[str]) -> str:
    """Return the error output; that of a script that does not end is cut off."""
    try:
        done = subprocess.run(command, stdin=subprocess.DEVNULL, capture_output=True, timeout=_SECONDS, check=False)
    except subprocess.TimeoutExpired:
        return ""
    return done.stderr.decode(errors="replace")


def _environment(text: str) -> tuple[dict[str, str], list[str]]:
    """Return marks of the variables that a script takes from its environment, and those that it tests before it sets
    them."""
    assigned: dict[str, int] = {}
    for match in _ASSIGNED.finditer(text):
        assigned.setdefault(match[1] or match[2] or match[3], text.find("\n", match.end() - 1) % (len(text) + 1))
    tests = [match.span() for match in _TESTED.finditer(text)]
    free, unset, tested = set[str](), dict[str, None](), set[str]()
    for use in _USE.finditer(text):
        if use[1] in _OF_BASH | _ALWAYS_SET:
            continue
        is_tested = (use[2] and "{" in use[0]) or any(start <= use.start() < end for start, end in tests)
        tested |= {use[1]} if is_tested else set()
        if use.start() < assigned.get(use[1], len(text) + 1):
            free.add(use[1])
            unset |= {use[1]: None} if is_tested else {}
    return {name: f"{VARIABLE}{name}{END}" for name in (free - tested) | _ALWAYS_SET}, list(unset)


def _rewritten(text: str) -> str:
    """Return the script with marks for sums of unknown numbers, and without options that end it at a failure."""
    text = _SUM.sub(_summed, _LOG.sub("", _INTERPRETER.sub(r"\1", text)))
    text = _FILE_TEST.sub("false", _OPTIONS.sub(":", text))
    return _IN_OUTPUT.sub(rf"\1{_ASKED} ", _CONDITION.sub(rf"\1 \2{_ASKED} ", text))


def _summed(match: re.Match[str]) -> str:
    names = dict.fromkeys(re.findall(_NAME, match[1]))
    return f"$(sum {shlex.quote(match[1])} {' '.join(names)})" if names else match[0]
