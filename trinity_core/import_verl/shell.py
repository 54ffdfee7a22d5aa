"""The commands of a shell script with their words, as bash expands them, without starting any.

bash itself runs the script: restricted (`set -r`: it starts no program by a path and opens no file for writing),
without an environment, and with an empty PATH, so that every command that is not built into bash ends in
`command_not_found_handle`, which records its words. Constructs that restricted bash would refuse are rewritten first,
using tree-sitter's syntax tree. What only the training machine knows becomes a mark within a word: a variable that the
script does not set (`$HOME`), the output of a command (`$(date)`).
"""

from __future__ import annotations

import re
import shlex
import shutil
import subprocess
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from tempfile import TemporaryDirectory

import tree_sitter_bash
from tree_sitter import Language, Node, Parser

from trinity_core.children import Child

VARIABLE, UNKNOWN, END = "\ue000", "\ue001", "\ue002"
"""Private-use characters that begin and end a mark within a word."""
_SPACE, _NEWLINE = "\ue003", "\ue004"
"""A space within a mark, at which bash must not split; a newline within a word, at which bash would write it in two
parts."""
_ALWAYS_SET = ("HOME", "USER", "LOGNAME", "HOSTNAME")
"""Environment variables that have a value wherever a script runs."""
_SECONDS = 10.0
_FILE_TESTS = "bcdefghkprstuwxGLNOS"
_BEGIN, _PIECE_END = "\x1d", "\x1e"

_PRELUDE = f"""\
((BASH_VERSINFO[0] * 100 + BASH_VERSINFO[1] >= 501)) || exit 95
exec 9>&1 >/dev/null </dev/null
ulimit -v 2097152
__record() {{  # piece by piece, each by one write: the commands of a pipeline record at the same time
    local line word place
    for line in "${{BASH_LINENO[@]}}"; do ((line > PRELUDE_LINES)) && break; done
    printf '%s %s{_PIECE_END}' "$BASHPID" "{_BEGIN}$line $((BASH_SUBSHELL > 0 || __ASKED))"
    for word in "$@"; do
        word="=${{word//$'\\n'/{_NEWLINE}}}"  # bash writes at each newline
        printf '%s %s{_PIECE_END}' "$BASHPID" "${{word:0:500}}"
        for ((place = 500; place < ${{#word}}; place += 500)); do
            printf '%s +%s{_PIECE_END}' "$BASHPID" "${{word:place:500}}"
        done
    done
}} >&9
command_not_found_handle() {{
    __record "$@"
    ((BASH_SUBSHELL && ! __ASKED)) && __mark "\\$($*)"
    return "$__ASKED"
}}
__mark() {{ printf '{UNKNOWN}%s{END}' "${{1// /{_SPACE}}}"; }}
__ASKED=0
__asked() {{ local __ASKED=1; "$@"; }}
__fails() {{ local __ASKED=1; __record "$@"; return 1; }}
__run() {{ case "${{1-}}" in */*) command_not_found_handle "$@" ;; *) "$@" ;; esac; }}
__sum() {{
    local __name
    for __name in "${{@:2}}"; do
        case "${{!__name-}}" in '' | *[{VARIABLE}{UNKNOWN}]*) __mark "\\$(($1))"; return ;; esac
    done
    eval "printf '%s' \\"\\$(($1))\\""
}}
basename() {{ local name="${{1%/}}"; name="${{name##*/}}"; printf '%s\\n' "${{name%"${{2-}}"}}"; }}
pwd() {{ printf '%s\\n' "$PWD"; }}
exec() {{ (($# == 0)) || {{ "$@"; builtin exit; }}; }}
exit() {{ local code=$?; __record exit "$@"; builtin exit "${{1-$code}}"; }}
__is_open() {{  # what only the machine of the training knows: files, the output of its programs
    case "$*" in -[{_FILE_TESTS}]' '* | '! '-[{_FILE_TESTS}]' '* | *{UNKNOWN}*) ;; *) return 1 ;; esac
}}
test() {{ if __is_open "$@"; then __fails test "$@"; else builtin test "$@"; fi; }}
[() {{ if __is_open "$@"; then __fails [ "$@"; else builtin [ "$@"; fi; }}
source() {{ local __ASKED=1; __record source "$@"; }}
.() {{ local __ASKED=1; __record source "$@"; }}
cd() {{ PWD='{UNKNOWN}$PWD{END}'; }}; pushd() {{ cd; }}; popd() {{ cd; }}
enable -n kill history bind suspend disown
BASH_ARGV0=SCRIPT PWD='{VARIABLE}PWD{END}' PATH=/nonexistent
trap '' PIPE  # the next command of a pipeline has ended before it reads
set -rT
trap 'set +eumx +o pipefail' DEBUG
"""
_TOO_OLD = 95
_OF_BASH = ("PATH", "SHELL", "ENV", "BASH_ENV", "HISTFILE")
"""Variables that restricted bash does not change."""
_SET_BY_BASH = {
    "BASH_SOURCE",
    "PWD",
    "PATH",
    "RANDOM",
    "UID",
    "EUID",
    "SECONDS",
    "LINENO",
    "PIPESTATUS",
    "FUNCNAME",
    "REPLY",
}
_BUILTINS = {
    "alias", "bg", "bind", "break", "builtin", "caller", "cd", "command", "compgen", "complete", "continue",
    "declare", "dirs", "echo", "enable", "eval", "exec", "exit", "export", "false", "fc", "fg", "getopts", "hash",
    "help", "jobs", "let", "local", "logout", "mapfile", "popd", "printf", "pushd", "pwd", "read", "readarray",
    "readonly", "return", "set", "shift", "shopt", "source", "test", "times", "trap", "true", "type", "typeset",
    "ulimit", "umask", "unalias", "unset", "wait", ":", ".", "[",
}  # fmt: skip
_READS = ("read", "mapfile", "readarray", "getopts")
_FILE_TEST = re.compile(rf"\s-(?:[{_FILE_TESTS}]|nt|ot|ef)\s")
_USE = re.compile(rb"\$\{?([A-Za-z_]\w*)")
_DEFAULT = re.compile(rb":?[-+=?]")
_SUM = re.compile(r"\$\(\(((?:[\w\s+*/%()<>=!&|?:,-]|\$\{?[A-Za-z_]\w*\}?)*)\)\)")
_NAME = re.compile(r"[A-Za-z_]\w*")
_COMPLAINT = re.compile(r"(?m)^.*?: line (\d+): (?!.*write error: Broken pipe)(.*)$")
_SYNTAX = ("syntax error near", "syntax error: unexpected", "unexpected EOF", "unexpected end of file")


class UnreadableShell(Exception):
    """A script that bash does not understand or that does not end; `line` is None if there is no location."""

    def __init__(self, reason: str, line: int | None = None) -> None:
        super().__init__(reason)
        self.line = line


@dataclass(frozen=True)
class ShellCommand:
    """A command that is not built into bash, or `exit`."""

    line: int
    is_asked: bool
    """True if the script continues with its output, or depends on its success."""
    words: list[str]


@dataclass(frozen=True)
class ShellRun:
    commands: list[ShellCommand]
    unset: list[str]
    """Environment variables that were assumed to be unset."""
    failures: dict[int, str]


def dry_run(text: str, arguments: Sequence[str] = (), name: str = "script.sh") -> ShellRun:
    """Return what the script `name` would run if called with `arguments`. Raises UnreadableShell."""
    text = text.replace("\r\n", "\n").replace("\0", "")
    rewriting = _Rewriting.of(text)
    marks, unset = rewriting.environment()
    prelude = _PRELUDE.replace("SCRIPT", shlex.quote(name))
    lines = prelude.count("\n")
    with TemporaryDirectory() as folder:
        script = Path(folder, "script")
        script.write_text(prelude.replace("PRELUDE_LINES", str(lines)) + rewriting.result(), encoding="utf-8")
        (work := Path(folder, "work")).mkdir()
        recorded, complaints, has_ended = _bash([str(script), *arguments], work, marks)
    commands, failures = _commands(recorded, lines), dict[int, str]()
    for line, reason in _COMPLAINT.findall(complaints):
        if int(line) > lines:
            failures.setdefault(int(line) - lines, shown(reason))
    for line, reason in failures.items():
        if any(words in reason for words in _SYNTAX):
            raise UnreadableShell(reason, line)
    if not has_ended and not commands:
        raise UnreadableShell(f"does not end within {_SECONDS:.0f} s where no program is run")
    return ShellRun(commands, unset, failures)


def variable(name: str) -> str:
    """Return the mark of an environment variable that the script does not set."""
    return f"{VARIABLE}{name}{END}"


def shown(text: str) -> str:
    """Return a text with its marks as written in the script."""
    for mark, character in ((VARIABLE, "$"), (UNKNOWN, ""), (END, ""), (_SPACE, " ")):
        text = text.replace(mark, character)
    return text


@dataclass
class _Rewriting:
    """A script without constructs that restricted bash refuses, and with marked conditions."""

    source: bytes
    edits: list[tuple[int, int, str]] = field(default_factory=list)
    used: dict[str, int] = field(default_factory=dict)
    """Variable → position of its first use; likewise below."""
    asked: dict[str, int] = field(default_factory=dict)
    """Variables with a default, or in a test."""
    assigned: dict[str, int] = field(default_factory=dict)
    """End of the first assignment."""

    @classmethod
    def of(cls, text: str) -> _Rewriting:
        rewriting = cls(text.encode(errors="surrogateescape"))
        tree = Parser(Language(tree_sitter_bash.language())).parse(rewriting.source)
        rewriting._look(tree.root_node)
        for use in _USE.finditer(rewriting.source):
            rewriting.used.setdefault(use[1].decode(), use.start())
        return rewriting

    def result(self) -> str:
        pieces, at = [], 0
        for begin, end, replacement in sorted(self.edits, key=lambda edit: edit[:2]):
            if begin >= at:
                pieces += [self.source[at:begin], replacement.encode()]
                at = end
        return b"".join([*pieces, self.source[at:]]).decode(errors="surrogateescape")

    def environment(self) -> tuple[dict[str, str], list[str]]:
        """Return marks of the variables that a script takes from its environment, and the variables it tests before
        setting them."""
        never = len(self.source) + 1
        free = {name for name, place in self.used.items() if place < self.assigned.get(name, never)}
        unset = [name for name, place in self.asked.items() if place < self.assigned.get(name, never)]
        others = free - {*self.asked} - _SET_BY_BASH
        return (
            {name: variable(name) for name in (*_ALWAYS_SET, *others)},
            [name for name in unset if name not in _ALWAYS_SET and name not in _SET_BY_BASH],
        )

    def _text(self, node: Node) -> str:
        return self.source[node.start_byte : node.end_byte].decode(errors="surrogateescape")

    def _edit(self, node: Node, replacement: str) -> None:
        self.edits.append((node.start_byte, node.end_byte, replacement))

    def _insert(self, node: Node, text: str) -> None:
        self.edits.append((node.start_byte, node.start_byte, text))

    def _look(self, top: Node) -> None:
        stack = [(top, False)]
        while stack:
            node, is_condition = stack.pop()
            self._note_names(node)
            if not self._rewrite(node, is_condition):
                conditions = self._conditions(node)
                inherits = is_condition and node.type != "command_substitution"
                stack += [(child, inherits or child.id in conditions) for child in reversed(node.children)]

    def _conditions(self, node: Node) -> set[int]:
        """Return children on whose success the script depends: what a program determines counts as failed."""
        if node.type in ("if_statement", "elif_clause") or (
            node.type == "while_statement" and node.children[0].type == "while"
        ):
            return {
                child.id
                for child in node.children_by_field_name("condition")
                if node.type != "while_statement" or child.type != "negated_command"
            }
        is_in_substitution = any(above.type == "command_substitution" for above in _above(node))
        return {node.children[0].id} if node.type == "list" and is_in_substitution else set()

    def _rewrite(self, node: Node, is_condition: bool) -> bool:
        """Rewrite a node; return True if its children need no rewriting."""
        text = self._text(node) if node.type in ("test_command", "arithmetic_expansion") else ""
        if node.type == "file_redirect":
            self._remove_file(node)
            return True
        if node.type == "test_command" and _FILE_TEST.search(text):
            self._edit(node, f"__fails {shlex.quote(text)}")
            return True
        if (
            node.type == "arithmetic_expansion"
            and (match := _SUM.fullmatch(text))
            and (names := _NAME.findall(match[1]))
        ):
            self._edit(node, f"$(__sum {shlex.quote(match[1])} {' '.join(dict.fromkeys(names))})")
            return True
        if node.type == "command" and (name := node.child_by_field_name("name")) is not None:
            word, line = self._text(name), self.source[: name.start_byte].rpartition(b"\n")[2]
            asked = "__asked " if is_condition and word not in _BUILTINS else ""
            # The grammar also parses the end of `a=$b/$c/d` as a command, and the inside of some tests.
            if (not line or line[-1:] in b" \t;&|(`{!") and line.rfind(b"[ ") <= line.rfind(b" ]"):
                self._insert(name, asked + ("__run " if re.search(r"[/$`'\"\\]", word) else ""))
        if node.type == "variable_name":
            self._rename(node)
        return False

    def _remove_file(self, node: Node) -> None:
        """Remove a file redirection. In tree-sitter, words of a command after the file belong to the redirection."""
        [file, *others] = node.children_by_field_name("destination") or [node]
        above = node.parent
        is_alone = above is not None and above.type == "redirected_statement" and not above.child_by_field_name("body")
        self.edits.append((node.start_byte, file.end_byte, ": " if is_alone and not others else " "))
        for word in others:
            self._look(word)

    def _rename(self, node: Node) -> None:
        name, parent = self._text(node), node.parent
        if name == "BASH_SOURCE" and parent is not None:
            self._edit(parent if parent.type == "subscript" else node, "0")
        elif name in _OF_BASH and parent is not None and parent.type == "variable_assignment":
            self._edit(node, f"OF_{name}")

    def _note_names(self, node: Node) -> None:
        if node.type == "variable_assignment":
            name = node.child_by_field_name("name")
            if name is not None and (match := _NAME.match(self._text(name))):
                self.assigned[match[0]] = min(node.end_byte, self.assigned.get(match[0], node.end_byte))
        elif node.type == "command" and (name := node.child_by_field_name("name")) and self._text(name) in _READS:
            for word in node.children_by_field_name("argument"):
                self.assigned.setdefault(self._text(word), node.end_byte)
        elif node.type == "variable_name" and node.parent is not None:
            self._note_use(node, node.parent)

    def _note_use(self, node: Node, parent: Node) -> None:
        name = self._text(node)
        if parent.type == "subscript" and parent.parent is not None:
            parent = parent.parent
        if parent.type in ("for_statement", "declaration_command", "c_style_for_statement"):
            self.assigned.setdefault(name, node.end_byte)
        elif parent.type in ("simple_expansion", "expansion") and _NAME.fullmatch(name):
            has_default = _DEFAULT.match(self.source, node.end_byte) is not None and parent.type == "expansion"
            of_test = any(above.type == "test_command" for above in _above(parent))
            if has_default or of_test:
                self.asked.setdefault(name, node.start_byte)


def _above(node: Node) -> Iterator[Node]:
    above = node.parent
    while above is not None:
        yield above
        above = above.parent


def _bash(command: Sequence[str], folder: Path, variables: Mapping[str, str]) -> tuple[str, str, bool]:
    """Return bash's records, its error messages, and whether it ended in time. Raises UnreadableShell."""
    bash = shutil.which("bash")
    if bash is None:
        raise UnreadableShell("bash, which reads scripts, was not found")
    child = Child(
        [bash, "--norc", *command], environment={**variables, "LC_ALL": "C.UTF-8"}, folder=folder,
        stdout=subprocess.PIPE, stderr=subprocess.PIPE,
    )  # fmt: skip
    try:
        output, errors = child.process.communicate(timeout=_SECONDS)
        has_ended = True
    except subprocess.TimeoutExpired:
        child.kill()
        output, errors = child.process.communicate(timeout=_SECONDS)
        has_ended = False
    finally:
        child.kill()
    if child.process.returncode == _TOO_OLD:
        raise UnreadableShell("bash 5.1 or newer reads scripts; this one is older")
    if has_ended and child.process.returncode < 0:
        raise UnreadableShell("ended bash, perhaps for lack of memory")
    return output.decode(errors="replace"), errors.decode(errors="replace"), has_ended


def _commands(recorded: str, skipped: int) -> list[ShellCommand]:
    by_process: dict[str, ShellCommand] = {}
    commands: list[ShellCommand] = []
    for written in recorded.split(_PIECE_END)[:-1]:
        process, _, piece = written.partition(" ")
        if piece.startswith(_BEGIN):
            line, is_asked = piece.removeprefix(_BEGIN).split()
            by_process[process] = ShellCommand(int(line) - skipped, is_asked == "1", [])
            commands.append(by_process[process])
            continue
        words, text = by_process[process].words, piece[1:].replace(_NEWLINE, "\n")
        if piece.startswith("="):
            words.append(text)
        else:
            words[-1] += text
    return commands


__all__ = ["END", "UNKNOWN", "VARIABLE", "ShellCommand", "ShellRun", "UnreadableShell", "dry_run", "shown", "variable"]
