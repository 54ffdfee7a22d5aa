"""Shell scripts, read and never run: the words of each command, with the values that the script itself gives.

Covered is what veRL's examples are written in: variables and `${NAME:-default}`, arrays, quotes, comments, line
continuations, positional arguments, `$((…))`, `if` with `[ … ]` or `[[ … ]]`, `&&` and `||`, `case`, `for … in …` and
functions. A here-document is passed over. Whatever else decides what is run (`while`, subshells …) raises
UnreadableShell.

What only a running shell knows counts as false, failed, not set or without output, and `ShellScript.assumptions` says
so. Within words a variable of the environment becomes a mark (`variable`), and the output of a command another
(`unknown`).
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from fnmatch import fnmatchcase
from functools import cached_property
from typing import Self

from trinity_core.config.import_verl.conditions import UNKNOWN, holds, plain, taken_as_unset, unknown
from trinity_core.config.import_verl.shell_words import ASSIGNED, DECLARE, ShellWords, UnreadableShell

_BETWEEN = re.compile(r"(?:[ \t\n;]|\\\n|#[^\n]*|&(?!&))*")
_JOIN = re.compile(r"(?:[ \t]|\\\n)*(&&|\|\|?)(?:[ \t\n]|\\\n|#[^\n]*)*")
_KEYWORD = re.compile(r"(if|then|elif|else|fi)(?=[\s;&|]|$)")
_FUNCTION = re.compile(r"(?:function[ \t]+([\w-]+)(?:[ \t]*\([ \t]*\))?|([\w-]+)[ \t]*\([ \t]*\))\s*\{")
_FOR = re.compile(r"for[ \t]+([A-Za-z_]\w*)[ \t]+in(?=[\s;])")
_CASE = re.compile(r"case(?=[ \t])")
_CASE_BODY = re.compile(r"(.*?)(;;&|;;|;&|(?<=[;\n&|)])[ \t]*(?=esac(?:[\s;&|)]|$))|\Z)", re.DOTALL)
_HIDDEN = re.compile(
    r"(?<!<)(<<-?[ \t]*([\"']?)(\w+)\2[^\n]*\n)(?:[^\n]*\n)*?[ \t]*\3(?=\n|\Z)"
    r"|\\.|'[^']*'|\"(?:\\.|[^\"\\])*\"|(?<![^\s;&|()])#[^\n]*",
    re.DOTALL,
)
"""What holds no end of a command: a here-document, below its first line, quoted text, a comment."""
_UNQUOTED = re.compile(r"\$(?:\{[^}]*\}|\(.*\)|[*?])", re.DOTALL)
_BRACES = re.compile(r"\{[^\s{}]*(?:,|\.\.)[^\s{}]*\}")
_LOOP = re.compile(r"(?:[;\n&|(){]|\b(?:do|then|else)(?=[ \t]))[ \t]*(for|while|until|select|done)(?=[\s;&|]|$)")
"""A word that begins or ends a loop."""
_NOT_READ = re.compile(r"(?:for|while|until|select|case|time|coproc|!|[{}])(?=\s|$)|\(\(|[()&|]|[\w-]+[ \t]*\(\)")
"""What begins a command that is not followed."""


@dataclass(frozen=True)
class ShellCommand:
    """A simple command."""

    line: int
    """Line of the script, from 1."""
    words: list[str]
    """Its words, expanded."""


@dataclass
class _If:
    """An `if` that is open."""

    outer: bool
    """Whether it is run itself."""
    live: bool
    """Whether the commands here are run."""
    taken: bool = False
    """Whether a branch was run."""
    asks: bool = True
    """True up to `then`."""


class ShellScript(ShellWords):
    """The commands of a script that are run, with the variables that stand above each."""

    def __init__(self, text: str, arguments: Sequence[str] = ()) -> None:
        """`arguments` are what the script would be called with."""
        super().__init__(text, arguments)
        self._functions: dict[str, tuple[str, int]] = {}
        """By name: what stands between its braces, and the line of that."""
        self._silent: dict[str, None] = {}
        self._locals: dict[str, list[str] | None] = {}
        """Of the function that runs: its local variables with the values that they have outside of it."""
        self._ended = ""
        """`exit` or `return` where the script has called it."""
        self._status = True
        """Whether the last command succeeded."""

    @cached_property
    def _bare(self) -> str:
        """The text with what is hidden as `x` and line continuations as spaces, each character in its place."""

        def blank(found: re.Match[str]) -> str:
            kept = found[1] or ""
            return kept + (" " if found[0] == "\\\n" else "x") * (len(found[0]) - len(kept))

        return _HIDDEN.sub(blank, self._text)

    @property
    def assumptions(self) -> list[str]:
        """What was assumed of the shell that would run the script, as sentences."""
        names, hint = ", ".join(self._unset), "to import other values, set them in the script"
        unset = [f"{names}: variables of the environment were taken as not set ({hint})."] if names else []
        silent = (f"`{command}` was taken to give no words." for command in self._silent)
        return [*unset, *(f"`{command}` was taken to fail." for command in self._failed), *silent]

    def commands(self) -> Iterator[ShellCommand]:
        """Each command other than an assignment, in the order in which they are run. Raises UnreadableShell."""
        ifs: list[_If] = []
        while (at := self._next()) < len(self._text):
            live, asks = (ifs[-1].live, ifs[-1].asks) if ifs else (True, False)
            if function := _FUNCTION.match(self._text, at):
                body = self._enclosed(function.end() - 1, "{", "}", self._bare)
                if live:
                    self._functions[function[1] or function[2]] = body, self._line(function.end())
            elif loop := _FOR.match(self._text, at):
                yield from self._for(loop, live)
            elif case := _CASE.match(self._text, at):
                self._at = case.end()
                yield from self._case(live)
            elif keyword := _KEYWORD.match(self._text, at):
                self._at = keyword.end()
                self._branch(ifs, keyword[1], live)
            else:
                yield from self._list(live, asks)

    def _next(self) -> int:
        """Step to the next command, over here-documents; the place of it."""
        at = self._skip(re.compile(r"[ \t;&]*(?:#[^\n]*)?"))
        while self._documents and self._peek() == "\n":
            last = re.escape(self._documents.pop(0))
            end = re.compile(rf"\n(?:.*\n)*?[ \t]*{last}(?=\n|\Z)|\Z").search(self._text, at)
            at = self._at = end.end() if end else len(self._text)
        return self._skip(_BETWEEN)

    def _run(
        self, body: str, line: int, arguments: Sequence[str] | None = None, assigned: Sequence[str] = ()
    ) -> Iterator[ShellCommand]:
        """The commands of a part of this script that begins in a line; of a function, with its arguments and the
        assignments before its name."""
        inner = self._within(body)
        inner._first_line, inner._arguments = line, self._arguments if arguments is None else list(arguments)
        inner._locals, inner._status = self._locals if arguments is None else {}, self._status
        inner._assigned(["local", *assigned])
        yield from inner.commands()
        self._status = inner._status
        for name, value in inner._locals.items() if arguments is not None else ():
            self._values.pop(name, None)
            self._values |= {} if value is None else {name: value}
        if inner._ended == "exit" or (inner._ended and arguments is None):
            self._at, self._ended = len(self._text), inner._ended

    def _for(self, loop: re.Match[str], live: bool) -> Iterator[ShellCommand]:
        """`for NAME in WORDS; do …; done`, for each word that is known here."""
        self._runs, start, self._at = live, self._at, loop.end()
        words = self._words()
        head = " ".join(self._text[start : self._at].split())
        bare = _UNQUOTED.sub("$", self._bare[start : self._at])
        globs = re.search(r"[*?]", " ".join([bare, *words] if "$" in bare else [bare]))
        if live and (braces := _BRACES.search(bare)):
            raise self._not_read(f"`{braces[0]}`")
        begin = re.compile(r"[;\s]*do(?=\s)").match(self._text, self._at)
        if begin is None:
            raise self._not_read("a loop without `do`")
        depth, line, self._at = 1, self._line(begin.end()), begin.end()
        for found in _LOOP.finditer(self._bare, begin.end() - len("do")):
            depth += -1 if found[1] == "done" else 1
            if not depth:
                body, self._at = self._text[begin.end() : found.start()], found.end()
                break
        else:
            raise self._not_read("a loop without `done`")
        if live and (globs or any(UNKNOWN in word for word in words)):
            self._silent[head] = None
            words = []
        self._status = self._status or live
        for word in words if live else ():
            self._values[loop[1]] = [word]
            yield from self._run(body, line)
            if self._ended:
                break

    def _case(self, live: bool) -> Iterator[ShellCommand]:
        """`case WORD in PATTERN | PATTERN) …;; … esac`."""
        self._runs, start = live, self._skip(re.compile(r"[ \t]+"))
        word = "".join(self._word(split=False))
        if live:
            self._unset |= dict.fromkeys(taken_as_unset(word))
            self._status = True
        self._skip(re.compile(r"\s*in(?=\s)"))
        while not (end := re.compile(r"(?:\s|#[^\n]*)*(?:esac(?=[\s;&|)]|$)|\Z)").match(self._text, self._at)):
            self._skip(re.compile(r"(?:\s|#[^\n]*)*\(?"))
            first, place = self._at, self._bare.find(")", self._at)
            self._at = place = place if place >= 0 else len(self._text)
            parts = re.compile(r"[^|]+").finditer(self._bare, first, place)
            patterns = [self._expanded(self._text[slice(*part.span())].strip()) for part in parts] if live else []
            known = [each for each in patterns if each == "*" or (plain(word) is not None and plain(each) is not None)]
            if known != patterns:
                self._failed[f"case {' '.join(self._text[start : self._at].split())})"] = None
            body = _CASE_BODY.match(self._bare, self._at + 1)
            assert body is not None
            if body[2] in (";&", ";;&") or re.search(r"\bcase\b", body[1]):
                raise self._not_read(f"`{body[2]}`" if body[2].endswith("&") else "`case` within `case`")
            if body.end() == len(self._text):
                raise self._not_read("a `case` without `; esac`")
            line, self._at = self._line(body.start()), body.end()
            if any(fnmatchcase(plain(word) or "", plain(pattern) or "") for pattern in known):
                live = False
                yield from self._run(self._text[slice(*body.span(1))], line)
        self._at = max(self._at, end.end())

    def _branch(self, ifs: list[_If], word: str, live: bool) -> None:
        if word == "if":
            ifs.append(_If(live, live))
            return
        if not ifs:
            raise self._not_read(f"`{word}` without an `if`")
        block = ifs[-1]
        if word == "then":
            block.live = block.outer and not block.taken and self._status
            block.taken, block.asks = block.taken or block.live, False
        elif word == "fi":
            ifs.pop()
            self._status = self._status or (block.outer and not block.taken and not block.live)
        else:
            block.live, block.asks = block.outer and not block.taken, word == "elif"

    def _list(self, live: bool, asks: bool) -> Iterator[ShellCommand]:
        """Commands that are joined by `&&`, `||` and `|`."""
        runs = live
        while True:
            if refused := _NOT_READ.match(self._text, self._at):
                raise self._not_read(f"`{refused[0].strip()}`")
            self._runs, start = runs, self._at
            words = self._words()
            if runs:
                left = self._assigned(words)
                if left and left[0] in self._functions:
                    if asks:
                        raise self._not_read(f"the function `{left[0]}` in a condition")
                    body, line = self._functions[left[0]]
                    yield from self._run(body, line, left[1:], words[: len(words) - len(left)])
                else:
                    self._status = self._succeeds(left, self._text[start : self._at].strip(), asks)
                    if left:
                        yield ShellCommand(self._line(start), left)
                if left[:1] in (["exit"], ["return"]):
                    self._at, self._ended = len(self._text), left[0]
            joined = _JOIN.match(self._text, self._at)
            if joined is None:
                return
            self._at = joined.end()
            runs = live and (runs if joined[1] == "|" else self._status is (joined[1] == "&&"))

    def _succeeds(self, words: list[str], text: str, asks: bool) -> bool:
        """Whether a command succeeds: a condition by what is known of it, another command unless an `if` asks it."""
        if not words:
            return True
        if words[0] in ("break", "continue"):
            raise self._not_read(f"`{words[0]}`")
        value: bool | None = words[0] != "false"
        if words[0] in ("return", "exit"):
            number = "".join(words[1:]).replace(unknown("$?"), "") or ("0" if self._status else "1")
            value = None if UNKNOWN in number else number == "0"
        elif words[0] in ("[", "[[", "test"):
            self._unset |= dict.fromkeys(name for word in words for name in taken_as_unset(word))
            value = holds(words[1:] if words[0] == "test" else words[1:-1], globs=words[0] == "[[")
        elif asks and words[0] not in ("true", ":", "false"):
            value = None
        if value is None:
            self._failed[" ".join(text.split())] = None
        return bool(value)

    def _assigned(self, words: list[str]) -> list[str]:
        """Follow assignments and `shift`; returns the command that is left."""
        declares = bool(words) and words[0] in DECLARE
        named = words[1:] if declares else words
        count = next((place for place, word in enumerate(named) if not ASSIGNED.match(word)), len(named))
        if declares or count == len(named):
            for word in named:
                assigned = ASSIGNED.match(word)
                name = assigned[1] if assigned else word
                if words[0] == "local" and name not in self._locals:
                    self._locals[name] = self._values.pop(name, None)
                if assigned:
                    before = "".join(self._values.get(name, [])) if assigned[2] else ""
                    self._values[name] = [before + word[assigned.end() :]]
            return []
        words = named[count:]
        if words[0] == "shift":
            del self._arguments[: int(words[1]) if len(words) > 1 and words[1].isdigit() else 1]
        elif words[:2] == ["set", "--"]:
            self._arguments[:] = words[2:]
        elif words[0] == "unset":
            for name in words[1:]:
                self._values.pop(name, None)
        return words

    def _within(self, text: str) -> Self:
        inner = super()._within(text)
        inner._silent, inner._functions = self._silent, self._functions
        return inner


__all__ = ["ShellCommand", "ShellScript", "UnreadableShell"]
