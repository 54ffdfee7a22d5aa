"""Words of a shell script, expanded: variables, arrays, arguments and sums, as the script itself gives them."""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Sequence
from typing import Literal

from trinity_core.import_verl import shell_syntax as syntax
from trinity_core.import_verl.conditions import (
    ALWAYS_SET,
    END,
    UNKNOWN,
    VARIABLE,
    Field,
    integer,
    joined,
    pattern,
    plain,
    taken_as_unset,
    unknown,
    variable,
)  # fmt: skip
from trinity_core.import_verl.shell_syntax import Assignment, Command, Parameter, UnreadableShell, Word

_TOKEN = re.compile(
    f"{UNKNOWN}.*?{END}|{VARIABLE}.*?{END}|[ \t\n]+|[^ \t\n{UNKNOWN}{VARIABLE}]+|[{UNKNOWN}{VARIABLE}]", re.DOTALL
)
"""What a value without quotes is split into; a mark is never taken apart."""
_OF_THE_SHELL = re.compile(
    r"RANDOM|SRANDOM|SECONDS|LINENO|E?UID|PPID|BASH\w*|EPOCH\w+|FUNCNAME|PIPESTATUS|DIRSTACK|GROUPS|HOSTTYPE|MACHTYPE"
    r"|OSTYPE|SHLVL|SHELLOPTS|IFS|OPTIND|OPTERR|PS4|OLDPWD|COLUMNS|LINES|REPLY|_"
)
"""Variables that the shell sets."""
Kind = Literal["quoted", "literal", "value", "break"]
"""Piece of an expanded word: a value is split, and only quoted text holds no pattern; a break ends the word."""

_EMPTY: list[tuple[str, Kind]] = [("", "quoted")]


class ShellWords:
    """The variables of a script, and what its words expand to with them."""

    def __init__(self, arguments: Sequence[str]) -> None:
        self._arguments = list(arguments)
        self._called = True
        """Whether these are the script's own, to which its user may add others."""
        self._values: dict[str, list[str]] = {}
        self._readonly: frozenset[str] = frozenset()
        self._functions: dict[str, Command] = {}
        self._unset: dict[str, None] = {}
        self._failed: dict[str, None] = {}
        self._code = 0
        """The exit code of the last command."""
        self._assumed = False
        """Whether that code is an assumption."""

    def _value_of(self, assignment: Assignment) -> list[str]:
        if assignment.items is None:
            return [self._single(assignment.word)]
        return [joined(field) for word in assignment.items for field in self._fields(word)]

    def _assigned(self, assignment: Assignment, value: list[str]) -> list[str]:
        """Follow an assignment of a value that is expanded already; returns the value."""
        before = self._values.get(assignment.name, [])
        if assignment.items is not None:
            value = [*before, *value] if assignment.adds else value
        else:
            if assignment.adds and assignment.name not in self._values and assignment.name in ALWAYS_SET:
                before = [variable(assignment.name)]
            value = ["".join(before[:1]) + value[0] if assignment.adds else value[0], *before[1:]]
        self._assign(assignment.line, assignment.name, value)
        return value

    def _assign(self, line: int, name: str, value: list[str]) -> None:
        if name in self._readonly or name in ("IFS", "POSIXLY_CORRECT", "GLOBIGNORE"):
            raise UnreadableShell(line, f"`{name}=`")
        self._values[name] = value

    # words

    def _fields(self, word: Word) -> list[Field]:
        """The words that a word expands to."""
        fields: list[Field] = []
        field: Field | None = None
        for text, kind in self._pieces(word):
            for token in _TOKEN.findall(text) if kind == "value" else [text]:
                if kind == "break" or (kind == "value" and token[0] in " \t\n"):
                    fields += [] if field is None else [field]
                    field = None
                else:
                    field = [*(field or []), (token, kind == "quoted")]
        return fields if field is None else [*fields, field]

    def _single(self, word: Word) -> str:
        """What a word expands to where it is never split."""
        return joined(self._unsplit(word))

    def _unsplit(self, word: Word) -> Field:
        return [(" " if kind == "break" else text, kind == "quoted") for text, kind in self._pieces(word)]

    def _without_unset(self, fields: list[Field]) -> list[Field]:
        """The words without those that are nothing but variables that are not set."""
        kept = []
        for field in fields:
            names = taken_as_unset(joined(field))
            if names and joined(field) == "".join(map(variable, names)) and not any(quoted for _, quoted in field):
                self._unset |= dict.fromkeys(names)
            else:
                kept.append(field)
        return kept

    def _pieces(self, word: Word, quoted: bool = False, kind: Kind = "literal") -> Iterator[tuple[str, Kind]]:
        """What a word expands to; its characters without quotes are of `kind`."""
        for part in word:
            match part:
                case syntax.Text(text, own):
                    yield text, "quoted" if quoted or own else kind
                case syntax.Quoted(parts):
                    inner = list(self._pieces(parts, True))
                    yield from inner if inner or parts else _EMPTY
                case Parameter():
                    yield from self._parameter(part, quoted)
                case syntax.Output():
                    yield self._output(part), "quoted" if quoted else "value"
                case syntax.Sum():
                    number = integer(self._single(part.parts), self._text_of)
                    yield unknown(part.text) if number is None else str(number), "quoted" if quoted else "value"

    def _text_of(self, name: str) -> str:
        """The value of a variable within a sum."""
        return "".join(self._values.get(name, [variable(name)])[:1])

    def _parameter(self, part: Parameter, quoted: bool) -> Iterator[tuple[str, Kind]]:
        values, is_set = self._value_at(part)
        sign, all_values = part.sign.removeprefix(":"), {part.name, part.index} & {"@", "*"}
        if sign in ("-", "=", "?", "+"):
            joined = " ".join(values)
            is_null = not is_set or (part.sign[0] == ":" and plain(joined) == "")
            if is_null and re.match(r"[A-Za-z_]", part.name):
                self._unset |= dict.fromkeys([*taken_as_unset(joined), *(() if is_set else [part.name])])
            if sign == "=" and is_null:
                values = [self._single(part.word)]
                self._assign(0, part.name, values)
            elif is_null is (sign == "-") and sign in "-+":
                inner = list(self._pieces(part.word, quoted, "value"))
                yield from inner if inner or not quoted else _EMPTY
                return
            elif sign == "+":
                values = [""]
        elif part.sign:
            values = self._changed(part, values)
        if quoted and "*" in all_values:
            values = [" ".join(values)]
        elif not all_values:
            values = values[:1] or [""]
        for place, value in enumerate(values):
            if place:
                yield "", "break"
            yield value, "quoted" if quoted else "value"

    def _value_at(self, part: Parameter) -> tuple[list[str], bool]:
        """The values of a parameter, and whether it is set. One of the environment has its mark."""
        name, index = part.name, part.index
        if name in ("@", "*"):
            return self._arguments, bool(self._arguments)
        if name == "#":
            return [self._count(part, self._arguments)], True
        if name == "?" and not self._assumed:
            return [str(self._code)], True
        if name.isdecimal() and int(name):
            positional = self._arguments[int(name) - 1 : int(name)]
            return positional or ([unknown(f"${name}")] if self._called else []), bool(positional)
        if name in self._values:
            values = self._values[name]
            values = values if index in ("@", "*") else values[int(index or 0) : int(index or 0) + 1]
            return values, bool(values)
        if not re.match(r"[A-Za-z_]", name) or _OF_THE_SHELL.fullmatch(name):
            return [unknown(part.text)], True
        if index in ("@", "*"):
            self._unset[name] = None
            return [], False
        return [unknown(part.text) if index else variable(name)], name in ALWAYS_SET

    def _count(self, part: Parameter, values: Sequence[str]) -> str:
        """The number of values; output of a command may be any number of them."""
        return unknown(part.text) if any(UNKNOWN in value for value in values) else str(len(values))

    def _changed(self, part: Parameter, values: list[str]) -> list[str]:
        """The values without a piece, in small letters …; a mark where that is not known."""
        sign, of_all = part.sign, bool({part.name, part.index} & {"@", "*"})
        if sign == "length" and of_all:
            return [self._count(part, values)]
        if sign == ":" and part.name == "@":
            first = integer(self._single(part.word), self._text_of)
            return [unknown(part.text)] if first is None or first < 1 else values[first - 1 :]
        word, other = self._unsplit(part.word), self._single(part.replacement)
        is_plain = all(isinstance(piece, syntax.Text | Parameter) for piece in part.replacement)
        changed = (_changed(value, sign, word, other if is_plain else UNKNOWN) for value in values)
        return [unknown(part.text) if value is None else value for value in changed]

    def _output(self, part: syntax.Output) -> str:
        """What a command in `$(…)` prints: known of `echo`, `pwd` and `basename`, which only look at texts.

        Of `… && echo A || echo B`, which asks the machine for something special, it is B.
        """
        items = part.body[0].items if len(part.body) == 1 else ()
        commands = [pipeline.commands[0] for _, pipeline in items if len(pipeline.commands) == 1]
        simple = [command for command in commands if isinstance(command, syntax.Simple)]
        asks = [sign for sign, _ in items] == ["", "&&", "||"] and len(simple) == 3
        if asks and all(command.words[:1] == ((syntax.Text("echo"),),) for command in simple[1:]):
            self._failed[" ".join(simple[0].text.split())] = None
            items, simple = items[2:], simple[2:]
        words: list[str] = []
        if len(simple) == len(items) == 1:
            values = self._values.copy()
            arguments = [word for word in simple[0].words if not isinstance(word, Assignment)]
            words = [joined(field) for argument in arguments for field in self._fields(argument)]
            self._values = values
        match words:
            case [name, *_] if name in self._functions:
                return unknown(part.text)
            case ["pwd"]:
                return self._text_of("PWD")
            case ["echo", *rest] if not re.match(r"-[neE]+$", "".join(rest[:1])):
                return " ".join(rest).rstrip("\n")
            case ["basename", path] if UNKNOWN not in path and not path.startswith("-"):
                name = path.rstrip("/").rpartition("/")[2]
                return name if name and VARIABLE not in name else unknown(part.text)
        return unknown(part.text)


def _is_known(value: str) -> bool:
    return UNKNOWN not in value and VARIABLE not in value


def _changed(value: str, sign: str, word: Field, other: str) -> str | None:
    """A value changed as an operator of `${…}` says; None where that is not known."""
    if sign[0] in "#%" and UNKNOWN not in value:
        return _stripped(value, word, sign)
    if not _is_known(value):
        return None
    match sign:
        case "length":
            return str(len(value))
        case "^" | "^^":
            return value[:1].upper() + (value[1:] if sign == "^" else value[1:].upper())
        case "," | ",,":
            return value[:1].lower() + (value[1:] if sign == "," else value[1:].lower())
        case "/" | "//":
            regex = pattern(word)
            if regex is None or regex.fullmatch("") or not _is_known(other) or re.search(r"[&\\']", other):
                return None
            return regex.sub(lambda _: other, value, count=int(sign == "/"))
    return None


def _stripped(value: str, word: Field, sign: str) -> str | None:
    """A value without what fits a pattern at its beginning (`#`) or end (`%`); doubled, the longest piece.

    None where that depends on a variable of the environment.
    """
    regex, front = pattern(word), sign[0] == "#"
    if regex is None:
        return None
    places: Iterable[int] = range(len(value) + 1)
    if front is (len(sign) == 2):
        places = reversed(range(len(value) + 1))
    cut = next((at for at in places if regex.fullmatch(value[:at] if front else value[at:])), None)
    if cut is None:
        return value if _is_known(value) or not any("*" in text for text, quoted in word if not quoted) else None
    removed, kept = (value[:cut], value[cut:]) if front else (value[cut:], value[:cut])
    reaches = word[0 if front else -1] if word else ("", True)
    is_sure = _is_known(kept) and reaches == ("*", False) if len(sign) == 2 else _is_known(removed)
    return kept if is_sure or _is_known(value) else None
