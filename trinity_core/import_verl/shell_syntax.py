"""The syntax tree of a shell script: commands, and words with their quotes."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal, TypeAlias

DECLARE = ("export", "local", "declare", "readonly", "typeset")


class UnreadableShell(Exception):
    """A construct of the shell that is not followed."""

    def __init__(self, line: int, construct: str) -> None:
        super().__init__(f"line {line}: {construct}")
        self.line, self.construct = line, construct


@dataclass(frozen=True)
class Text:
    """Characters of the script."""

    text: str
    quoted: bool = False


@dataclass(frozen=True)
class Quoted:
    """What stands in double quotes."""

    parts: Word


@dataclass(frozen=True)
class Parameter:
    """`$NAME` or `${…}`."""

    text: str
    name: str
    index: str = ""
    """`@`, `*` or a number, for an array."""
    sign: str = ""
    """`:-`, `##`, `length` …; `?` followed by a space for what is not followed."""
    word: Word = ()
    """What stands behind the sign."""
    replacement: Word = ()
    """What stands behind the second `/`."""


@dataclass(frozen=True)
class Output:
    """`$(…)`, or backquotes, which have no `body`."""

    text: str
    body: tuple[Chain, ...] = ()


@dataclass(frozen=True)
class Sum:
    """`$((…))`."""

    text: str
    parts: Word


Part: TypeAlias = Text | Quoted | Parameter | Output | Sum
Word: TypeAlias = tuple[Part, ...]


@dataclass(frozen=True)
class Assignment:
    """`NAME=word`, `NAME+=word` or `NAME=(words)`."""

    line: int
    name: str
    adds: bool
    word: Word = ()
    items: tuple[Word, ...] | None = None


@dataclass(frozen=True)
class Simple:
    """A command with its arguments, or assignments alone."""

    line: int
    text: str
    assignments: tuple[Assignment, ...]
    words: tuple[Word | Assignment, ...]
    """Words, with assignments for a command that declares variables."""
    redirected: tuple[Word, ...] = ()
    """The files of redirections."""


@dataclass(frozen=True)
class Test:
    """`[[ … ]]`: its words, and its signs `!`, `&&` and `||`."""

    line: int
    text: str
    words: tuple[Word | str, ...]


@dataclass(frozen=True)
class If:
    """Conditions with what follows each; `else` has none."""

    branches: tuple[tuple[tuple[Chain, ...], tuple[Chain, ...]], ...]


@dataclass(frozen=True)
class For:
    """`for NAME in WORDS`."""

    line: int
    text: str
    name: str
    words: tuple[Word, ...]
    body: tuple[Chain, ...]


@dataclass(frozen=True)
class Case:
    """`case WORD in`, with the text and the patterns of each clause."""

    word: Word
    clauses: tuple[tuple[str, tuple[Word, ...], tuple[Chain, ...]], ...]


@dataclass(frozen=True)
class Function:
    """A definition."""

    name: str
    body: Command


@dataclass(frozen=True)
class Group:
    """`{ … }`, or `( … )`, whose variables are its own."""

    body: tuple[Chain, ...]
    isolated: bool


Command: TypeAlias = Simple | Test | If | For | Case | Function | Group


@dataclass(frozen=True)
class Pipeline:
    """Commands that are joined by `|`."""

    commands: tuple[Command, ...]
    negated: bool


@dataclass(frozen=True)
class Chain:
    """Pipelines that are joined by `&&` and `||`, each with the sign before it."""

    items: tuple[tuple[Literal["", "&&", "||"], Pipeline], ...]
    background: bool
