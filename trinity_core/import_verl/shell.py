"""Shell scripts, read and never run: the words of each command, with the values that the script itself gives.

Covered is what veRL's examples are written in: variables, arrays, arguments, `${…}` and `$((…))`, `if`, `&&` and `||`,
pipelines, `case`, `for … in …`, functions, groups and subshells. Whatever else decides what is run, or changes a
variable in a way that is not followed (`while`, `mapfile`, `{1..3}` …), raises UnreadableShell.

What only a running shell knows counts as false, failed, not set or without output, and `ShellScript.assumptions` says
so. Within words a variable of the environment becomes a mark (`variable`), and the output of a command another
(`unknown`). That is why a real bash is not asked: without its machine it would give empty words in their place, and
its commands would have to run to be known.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass

from trinity_core.import_verl import shell_syntax as syntax
from trinity_core.import_verl.conditions import (
    UNKNOWN,
    Field,
    holds,
    joined,
    pattern,
    plain,
    taken_as_unset,
    unknown,
)  # fmt: skip
from trinity_core.import_verl.shell_parser import Parser
from trinity_core.import_verl.shell_syntax import Assignment, Chain, Command, UnreadableShell
from trinity_core.import_verl.shell_words import ShellWords

_NOT_FOLLOWED = ("break", "continue", "getopts", "mapfile", "readarray", "let", "shopt", "enable", "alias")
_FLAGS = "aehuvxbfmBCET"
"""Options of `set` that change no word of the commands that are run."""
_DEEPEST = 40
"""Functions that call each other."""


@dataclass(frozen=True)
class ShellCommand:
    """A simple command."""

    line: int
    """Line of the script, from 1."""
    words: list[str]
    """Its words, expanded."""


class _Leave(Exception):
    """`exit`, or `return` of a function."""

    def __init__(self, exits: bool) -> None:
        super().__init__()
        self.exits = exits


class ShellScript(ShellWords):
    """The commands of a script that are run, with the variables that stand above each."""

    def __init__(self, text: str, arguments: Sequence[str] = ()) -> None:
        """`arguments` are what the script would be called with."""
        self._text = text.replace("\r\n", "\n")
        super().__init__(arguments)
        self._scopes: list[dict[str, list[str] | None]] = []
        """Local variables of each function that runs, with their values outside of it."""
        self._silent: dict[str, None] = {}
        self._asks = self._guarded = self._errexit = self._pipefail = False
        """Within a condition; where a failure ends nothing; `set -e`; `set -o pipefail`."""

    @property
    def assumptions(self) -> list[str]:
        """What was assumed of the shell that would run the script, as sentences."""
        names, hint = ", ".join(self._unset), "to import other values, set them in the script"
        unset = [f"{names}: variables of the environment were taken as not set ({hint})."] if names else []
        silent = (f"`{command}` was taken to give no words." for command in self._silent)
        return [*unset, *(f"`{command}` was taken to fail." for command in self._failed), *silent]

    def commands(self) -> Iterator[ShellCommand]:
        """Each command other than an assignment, in the order in which they are run. Raises UnreadableShell."""
        tree = Parser(self._text).script()
        try:
            yield from self._run(tree)
        except _Leave:
            return

    # commands

    def _run(self, chains: Sequence[Chain]) -> Iterator[ShellCommand]:
        for chain in chains:
            if chain.background:
                yield from self._isolated(self._chain(chain))
                self._end(0)
            else:
                yield from self._chain(chain)

    def _chain(self, chain: Chain) -> Iterator[ShellCommand]:
        guarded, (_, last) = self._guarded, chain.items[-1]
        for sign, pipeline in chain.items:
            if sign and (self._code == 0) is not (sign == "&&"):
                continue
            self._guarded = is_guarded = guarded or pipeline is not last or pipeline.negated
            yield from self._pipeline(pipeline)
            if self._errexit and self._code and not (is_guarded or self._assumed or _is_compound(pipeline)):
                raise _Leave(exits=True)
        self._guarded = guarded

    def _pipeline(self, pipeline: syntax.Pipeline) -> Iterator[ShellCommand]:
        codes = []
        for command in pipeline.commands:
            run = self._command(command)
            yield from run if len(pipeline.commands) == 1 else self._isolated(run)
            codes.append(self._code)
        if self._pipefail:
            self._code = next((code for code in reversed(codes) if code), 0)
        if pipeline.negated:
            self._code = int(not self._code)

    def _isolated(self, commands: Iterator[ShellCommand]) -> Iterator[ShellCommand]:
        """Commands of a subshell, which changes nothing outside of itself."""
        kept = self._values.copy(), self._functions.copy(), self._arguments, self._called
        flags = self._asks, self._guarded, self._errexit, self._pipefail
        depth = len(self._scopes)
        with suppress(_Leave):
            yield from commands
        del self._scopes[depth:]
        self._values, self._functions, self._arguments, self._called = kept
        self._asks, self._guarded, self._errexit, self._pipefail = flags

    def _command(self, command: Command) -> Iterator[ShellCommand]:
        match command:
            case syntax.Simple():
                yield from self._simple(command)
            case syntax.Test():
                fields = [[(word, True)] if isinstance(word, str) else self._unsplit(word) for word in command.words]
                self._unset |= dict.fromkeys(name for field in fields for name in taken_as_unset(joined(field)))
                try:
                    self._end(holds(fields, self._text_of), command.text)
                except ValueError:
                    raise UnreadableShell(command.line, f"`{command.text}`") from None
            case syntax.If():
                yield from self._if(command)
            case syntax.For():
                yield from self._for(command)
            case syntax.Case():
                yield from self._case(command)
            case syntax.Function():
                self._functions[command.name] = command.body
                self._end(0)
            case syntax.Group():
                body = self._run(command.body)
                yield from self._isolated(body) if command.isolated else body

    def _if(self, command: syntax.If) -> Iterator[ShellCommand]:
        for condition, body in command.branches:
            before = self._asks, self._guarded
            self._asks = self._guarded = True
            self._end(0)
            yield from self._run(condition)
            self._asks, self._guarded = before
            if self._code == 0:
                yield from self._run(body)
                return
        self._end(0)

    def _for(self, command: syntax.For) -> Iterator[ShellCommand]:
        fields = self._without_unset([field for word in command.words for field in self._fields(word)])
        globs = (re.search(r"[*?\[]", text) for field in fields for text, quoted in field if not quoted)
        if any(globs) or any(UNKNOWN in text for field in fields for text, _ in field):
            self._silent[command.text] = None
            fields = []
        self._end(0)
        for field in fields:
            self._assign(command.line, command.name, [joined(field)])
            yield from self._run(command.body)

    def _case(self, command: syntax.Case) -> Iterator[ShellCommand]:
        word = self._single(command.word)
        self._unset |= dict.fromkeys(taken_as_unset(word))
        self._end(0)
        for text, patterns, body in command.clauses:
            for glob in patterns:
                known = pattern(self._unsplit(glob)) if glob == (syntax.Text("*"),) or plain(word) is not None else None
                if known is None:
                    self._failed[text] = None
                elif known.fullmatch(plain(word) or ""):
                    yield from self._run(body)
                    return

    def _simple(self, command: syntax.Simple) -> Iterator[ShellCommand]:
        declared = [
            (word, self._value_of(word)) if isinstance(word, Assignment) else [*self._fields(word)]
            for word in command.words
        ]
        fields = [field for word in declared if isinstance(word, list) for field in word]
        words = [joined(field) for field in fields]
        for file in command.redirected:
            self._single(file)
        if not words:
            values = [self._assigned(assignment, self._value_of(assignment)) for assignment in command.assignments]
            silent = self._asks and any(UNKNOWN in text for value in values for text in value)
            self._end(None if silent else 0, command.text)
            return
        if words[0] in self._functions:
            yield from self._call(command, words)
            return
        for assignment in command.assignments:
            self._value_of(assignment)
        if words[0] in syntax.DECLARE:
            self._declare(command, words, [word for word in declared if isinstance(word, tuple)])
        else:
            value = self._builtin(command, words, fields)
            self._end(value, command.text)
            self._assumed = value is None or (
                value is True and words[0] not in ("true", ":", "set", "shift", "test", "[")
            )
        yield ShellCommand(command.line, words)
        if words[0] == "exit" or (words[0] == "return" and self._scopes) or (words[0] == "exec" and len(words) > 1):
            raise _Leave(exits=words[0] != "return")

    def _call(self, command: syntax.Simple, words: list[str]) -> Iterator[ShellCommand]:
        """A function with its arguments, and the assignments before its name."""
        if len(self._scopes) >= _DEEPEST:
            raise UnreadableShell(command.line, f"the function `{words[0]}` within itself")
        before = self._arguments, self._called, self._asks
        self._arguments, self._called = words[1:], False
        self._scopes.append({})
        for assignment in command.assignments:
            value = self._value_of(assignment)
            self._local(assignment.name)
            self._assigned(assignment, value)
        self._end(0)
        try:
            yield from self._command(self._functions[words[0]])
        except _Leave as leave:
            if leave.exits:
                raise
        self._arguments, self._called, self._asks = before
        for name, outer in self._scopes.pop().items():
            self._values.pop(name, None)
            self._values |= {} if outer is None else {name: outer}

    def _end(self, value: bool | int | None, text: str = "") -> None:
        """The end of a command: True or False as a condition, its exit code, or None for what only a machine knows."""
        self._assumed = value is None
        self._code = 1 if value is None else value if type(value) is int else int(not value)
        if value is None:
            self._failed[" ".join(text.split())] = None

    def _builtin(self, command: syntax.Simple, words: list[str], fields: list[Field]) -> bool | int | None:
        """The outcome of a command of the shell, or of another one."""
        match words:
            case ["false", *_]:
                return False
            case ["return" | "exit", *code]:
                if words[0] == "return" and not self._scopes:
                    return False
                if not code or code[0] == unknown("$?"):
                    return None if self._assumed and self._code else self._code
                return int(code[0]) % 256 if re.fullmatch(r"[0-9]+", code[0]) else None if UNKNOWN in code[0] else 2
            case ["[" | "test", *_]:
                arguments = self._without_unset(fields)
                self._unset |= dict.fromkeys(name for field in arguments for name in taken_as_unset(joined(field)))
                if words[0] == "[" and words[-1] != "]":
                    return False
                arguments = arguments[1 : len(arguments) - (words[0] == "[")]
                try:
                    return holds(arguments) if arguments else False
                except ValueError:  # as a shell, which says what it expects
                    return False
            case ["shift", *count]:
                if not re.fullmatch(r"[0-9]*", "".join(count[:1])):
                    raise UnreadableShell(command.line, f"`{command.text}`")
                number = int(count[0]) if count else 1
                if number > len(self._arguments):
                    return False
                self._arguments = self._arguments[number:]
            case ["set", *options]:
                self._set(command, options)
            case ["unset", *names]:
                for name in [name for name in names if name not in ("-v", "-f")]:
                    self._remove(command, name, "-f" in names)
            case ["cd" | "pushd" | "popd", *_]:
                self._values["PWD"] = [unknown("$PWD")]
            case ["read", *names]:
                for name in names:
                    self._values |= {name: [unknown(f"${name}")]} if re.fullmatch(r"[A-Za-z_]\w*", name) else {}
                self._values["REPLY"] = [unknown("$REPLY")]
            case ["eval" | "source" | ".", *_]:
                self._failed[" ".join(command.text.split())] = None
            case [name, *_] if name in _NOT_FOLLOWED or words[:2] == ["printf", "-v"]:
                raise UnreadableShell(command.line, f"`{' '.join(words[:2] if name == 'printf' else words[:1])}`")
        return None if self._asks and words[0] not in ("true", ":", "set", "unset") else True

    def _set(self, command: syntax.Simple, options: list[str]) -> None:
        while options and re.fullmatch(r"[-+].+", options[0]):
            option, *options = options
            if option == "--":
                self._arguments, self._called = options, False
                return
            names = option[1:].replace("o", "")
            if "o" in option and options:
                name, *options = options
                self._pipefail = option[0] == "-" if name == "pipefail" else self._pipefail
                names += {"errexit": "e", "pipefail": "", "nounset": "u", "xtrace": "x"}.get(name, "?")
            if set(names) - set(_FLAGS):
                raise UnreadableShell(command.line, f"`{command.text}`")
            self._errexit = option[0] == "-" if "e" in names else self._errexit
        if options:
            self._arguments, self._called = options, False

    def _remove(self, command: syntax.Simple, name: str, function: bool) -> None:
        if not re.fullmatch(r"[\w.:-]+", name) or name in self._readonly:
            raise UnreadableShell(command.line, f"`{command.text}`")
        if function or name not in self._values:
            self._functions.pop(name, None)
        else:
            del self._values[name]

    # variables

    def _declare(self, command: syntax.Simple, words: list[str], assigned: list[tuple[Assignment, list[str]]]) -> None:
        """`export`, `local`, `declare` and the like."""
        options, names = [w for w in words[1:] if w[:1] in "-+"], [w for w in words[1:] if w[:1] not in "-+"]
        flags = set("".join(options)) - set("-+")
        if flags & set("Ailnuc") or not all(re.fullmatch(r"[A-Za-z_]\w*", name) for name in names):
            raise UnreadableShell(command.line, f"`{command.text}`")
        if not flags & set("pfF"):
            for name in [*names, *(assignment.name for assignment, _ in assigned)]:
                if words[0] in ("local", "declare", "typeset") and "g" not in flags and self._scopes:
                    self._local(name)
            for assignment, value in assigned:
                self._assigned(assignment, value)
            if words[0] == "readonly" or "r" in flags:
                self._readonly |= {*names, *(assignment.name for assignment, _ in assigned)}
        self._end(0)

    def _local(self, name: str) -> None:
        """Make a variable one of the function that runs."""
        if name not in self._scopes[-1]:
            self._scopes[-1][name] = self._values.pop(name, None)


def _is_compound(pipeline: syntax.Pipeline) -> bool:
    """Whether a pipeline is one command that only fails if a command in it does, which `set -e` has judged by then."""
    [*others, last] = pipeline.commands
    is_group = isinstance(last, syntax.Group) and not last.isolated
    return not others and (is_group or isinstance(last, syntax.If | syntax.For | syntax.Case))


__all__ = ["ShellCommand", "ShellScript", "UnreadableShell"]
