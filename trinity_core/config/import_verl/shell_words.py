"""The words of a shell script: quotes, arrays, variables and sums, with what the script itself says of them.

A variable that the script does not set becomes a mark of the environment (`variable`); what only a running shell knows
becomes a mark of the unknown (`unknown`).
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass, field
from fnmatch import fnmatchcase
from typing import Self

from trinity_core.config.import_verl.arithmetic import integer
from trinity_core.config.import_verl.conditions import END, GUESSED, UNKNOWN, VARIABLE, plain, unknown, variable

_NAME = re.compile(r"[A-Za-z_]\w*")
ASSIGNED = re.compile(r"([A-Za-z_]\w*)(\+?)=")
_FIELD = re.compile(f"(?:{UNKNOWN}.*?{END}|\\S)+", re.DOTALL)
"""A field of an unquoted value; a mark is never taken apart."""
_QUOTED = re.compile(r"'([^']*)'|\"([^\"]*)\"")
_ASKS = re.compile(r"([^&|]+?)\s*&&\s*echo\s+\S+\s*\|\|\s*echo\s+(\S+)")
GUESS = re.compile(f"{GUESSED}[0-9]+{END}")
_ENDS = "\n;&|()"
DECLARE = {"export", "local", "declare", "readonly", "typeset"}


@dataclass
class Shell:
    """What a script and the pieces of it that are read apart have in common."""

    values: dict[str, list[str]] = field(default_factory=dict)
    functions: dict[str, str] = field(default_factory=dict)
    defaulted: dict[str, None] = field(default_factory=dict)
    """Variables of the environment that were taken as not set."""
    failed: dict[str, None] = field(default_factory=dict)
    """Commands that were taken to fail."""
    turns: int = 0


class ShellText:
    """A text of shell that is read from its beginning to its end, word by word."""

    def __init__(self, text: str, arguments: Sequence[str] = (), shell: Shell | None = None) -> None:
        """`arguments` are what the script would be called with; `shell` is that of the script around it."""
        self._text, self._at = text.replace("\r\n", "\n"), 0
        self._arguments = list(arguments)
        self._shell = Shell() if shell is None else shell
        self._outer: bool | None = True
        """Whether the text as a whole is run."""
        self._runs: bool | None = True
        """Whether the command that is read is run."""
        self._in_quotes = False

    def within(self, text: str, arguments: Sequence[str] | None = None) -> Self:
        """A script in a word of this one, as in `bash -c "…"`, or a function's body."""
        inner = type(self)(text, self._arguments if arguments is None else arguments, self._shell)
        inner._outer = inner._runs = self._runs
        inner._in_quotes = self._in_quotes
        return inner

    @property
    def _values(self) -> dict[str, list[str]]:
        return self._shell.values

    def _blank(self) -> None:
        while self._peek() in (" ", "\t", "\n") and self._peek():
            self._at += 1

    def _skipped_word(self) -> list[str]:
        self._blank()
        return self._word(split=False)

    def _words(self) -> list[str]:
        """The words up to the end of a command."""
        words: list[str] = []
        if self._text.startswith("((", self._at):
            return ["((", self._enclosed(self._at, "(", ")")[1:-1]]
        if re.compile(r"\[\[\s").match(self._text, self._at):
            return self._test()
        while (char := self._peek()) and char not in _ENDS:
            if char in " \t":
                self._at += 1
            elif self._text.startswith("\\\n", self._at):
                self._at += 2
            elif char == "#":
                self._until("\n")
            elif redirected := re.compile(r"\d?[<>]+[&|]?-?").match(self._text, self._at):
                self._redirect(redirected)
            else:
                bare = not words or words[0] in DECLARE
                assigned = ASSIGNED.match(self._text, self._at) if bare else None
                if assigned and self._text.startswith("(", assigned.end()):
                    self._array(assigned)
                else:
                    words += self._word(split=assigned is None)
        return words

    def _test(self) -> list[str]:
        """The words and signs of `[[ … ]]`."""
        words, self._at = ["[["], self._at + 2
        while self._peek() and words[-1] != "]]":
            self._blank()
            sign = re.compile(r"&&|\|\||[()<>&|;]").match(self._text, self._at)
            if sign:
                self._at = sign.end()
            words += [sign[0]] if sign else self._word(split=False) or [""]
        return words

    def _redirect(self, operator: re.Match[str]) -> None:
        """Step over a redirection and its target, or over a here-document."""
        self._at = operator.end()
        if operator[0].rstrip("-") != "<<":
            while self._peek() in (" ", "\t"):
                self._at += 1
            self._word()
            return
        delimiter = "".join(self._word())
        end = re.compile(rf"\n[\t ]*{re.escape(delimiter)}[ \t]*(?=\n|$)").search(self._text, self._at)
        self._text = self._text[: self._at] + (
            "\n" * self._text.count("\n", self._at, end.end()) + self._text[end.end() :] if end else ""
        )

    def _array(self, assigned: re.Match[str]) -> None:
        """`NAME=(…)` and `NAME+=(…)`."""
        self._at = assigned.end() + 1
        items: list[str] = []
        while (char := self._peek()) and char != ")":
            if char in " \t\n":
                self._at += 1
            elif self._text.startswith("\\\n", self._at):
                self._at += 2
            elif char == "#":
                self._until("\n")
            elif char in _ENDS + "<>":
                self._at += 1
            else:
                items += self._word()
        self._at += 1
        line = self._text.count("\n", 0, assigned.start()) + 1
        self._assign(assigned[1], ([*self._values.get(assigned[1], [])] if assigned[2] else []) + items, line)

    def _word(self, split: bool = True) -> list[str]:
        """One word; several, or none, where variables outside quotes say so."""
        fields, open_ = [""], False
        while (char := self._peek()) and char not in " \t<>" + _ENDS:
            if char == "\\":
                fields[-1] += (
                    "" if self._text.startswith("\n", self._at + 1) else self._text[self._at + 1 : self._at + 2]
                )
                open_ = open_ or not self._text.startswith("\n", self._at + 1)
                self._at += 2
                continue
            if char == "'":
                self._at += 1
                found = [self._until("'")]
                self._at += 1
            elif char == '"':
                self._at += 1
                self._in_quotes = True
                found = self._double('"')
                self._in_quotes = False
                self._at += 1
            elif char == "~" and self._is_home(fields, open_, split):
                found = [variable("HOME")]
                self._at += 1
            elif char in "$`":
                found = self._dollar()
                if split:
                    found = [piece for value in found for piece in _FIELD.findall(value)]
            else:
                found = [char]
                self._at += 1
            open_ = open_ or bool(found)
            if found:
                fields = [*fields[:-1], fields[-1] + found[0], *found[1:]]
        return fields if open_ else []

    def _is_home(self, fields: list[str], opened: bool, split: bool) -> bool:
        """Whether a `~` here is the user's home: at the beginning of a word or of a value that is assigned."""
        begins = not opened or (not split and ASSIGNED.fullmatch(fields[-1]) is not None)
        return begins and self._text[self._at + 1 : self._at + 2] in ("/", "", " ", "\n", ";", ")", ":")

    def _double(self, end: str) -> list[str]:
        """The inside of double quotes, up to `end`: one text; several, or none, where an array stands in it."""
        fields, nothing = [""], False
        while (char := self._peek()) and char != end:
            if char == "\\" and self._text[self._at + 1 : self._at + 2] in ('"', "\\", "$", "`", "\n"):
                fields[-1] += self._text[self._at + 1].replace("\n", "")
                self._at += 2
            elif char in "$`":
                found = self._dollar()
                nothing = nothing or not found
                found = found or [""]
                fields = [*fields[:-1], fields[-1] + found[0], *found[1:]]
            else:
                fields[-1] += char
                self._at += 1
        return [] if nothing and fields == [""] else fields

    def _dollar(self) -> list[str]:
        """The value of what begins with `$` or a backquote here."""
        text, start = self._text, self._at
        if text[start] == "`":
            self._at += 1
            inner = self._until("`")
            self._at += 1
            return [unknown(f"`{inner}`")]
        if text.startswith("$((", start) and (inner := self._enclosed(start + 1, "(", ")")).endswith(")"):
            return [self._calculated(inner[1:-1])]
        if text.startswith("$(", start):
            return [self._output(self._enclosed(start + 1, "(", ")"))]
        if text.startswith("${", start):
            return self._parameter(self._enclosed(start + 1, "{", "}"))
        if found := re.compile(r"[@*#?$!0-9]").match(text, start + 1):
            self._at = found.end()
            return self._special(found[0])
        if name := _NAME.match(text, start + 1):
            self._at = name.end()
            return self._value(name[0])[:1]
        self._at += 1
        return [] if text.startswith("$'", start) else ["$"]

    def _output(self, command: str) -> str:
        """What a command in `$(…)` prints: known of `pwd` and `basename`, which only look at texts.

        Of `… && echo A || echo B`, which asks the machine for something special, it is B.
        """
        if asks := _ASKS.fullmatch(command.strip()):
            if self._runs is not False:
                self._shell.failed[" ".join(asks[1].split())] = None
            return self._expanded(asks[2])
        inner = self.within(command)
        words = inner._words()
        if words == ["pwd"]:
            return variable("PWD")
        if words[:1] == ["basename"] and len(words) == 2:
            return words[1].rstrip("/").rpartition("/")[2]
        return unknown(f"$({command})")

    def _special(self, name: str) -> list[str]:
        if name in "@*":
            return [" ".join(self._arguments)] if name == "*" and self._in_quotes else list(self._arguments)
        if name == "#":
            return [str(len(self._arguments))]
        place = int(name) if name.isdigit() else 0
        return [self._arguments[place - 1]] if 0 < place <= len(self._arguments) else [unknown(f"${name}")]

    def _parameter(self, inner: str) -> list[str]:
        """`${…}`."""
        found = re.fullmatch(r"(\w+|[@*#])(\[[@*]\])?(?:(:?[-=?+])(.*))?", inner, re.DOTALL)
        if found is None:
            return self._transformed(inner)
        name, index, operator, word = found.groups()
        is_special = not _NAME.fullmatch(name)
        value = self._special(name) if is_special else self._value(name)
        if index == "[*]":
            value = [" ".join(value)]
        elif index is None and not is_special:
            value = value[:1]
        given = not any(UNKNOWN in each for each in value) if is_special else name in self._values
        if operator is None:
            return value
        if not given and not is_special and operator[-1] in "-=" and self._runs is not False:
            self._shell.defaulted[name] = None
        if operator.startswith(":"):
            given = given and value not in ([], [""])
        if operator.endswith("+"):
            return [self._expanded(word)] if given else []
        if given or operator.endswith("?"):
            return value
        default = self._expanded(word)
        if operator.endswith("=") and self._runs is not False:
            self._values[name] = [default]
        return [default]

    def _transformed(self, inner: str) -> list[str]:
        """`${#NAME}`, `${NAME[n]}`, and a value without a piece of it or with another: `${NAME##*/}`, `${NAME/a/b}`."""
        not_known = [unknown(f"${{{inner}}}")]
        if counted := re.fullmatch(r"#(\w+)(\[[@*]\])?", inner):
            values = self._values.get(counted[1], [])
            text = plain("".join(values[:1]))
            return [str(len(values))] if counted[2] else not_known if text is None else [str(len(text))]
        if indexed := re.fullmatch(r"(\w+)\[(\d+)\]", inner):
            return self._values.get(indexed[1], [])[int(indexed[2]) :][:1]
        if sliced := re.fullmatch(r"(@|\w+)(\[@\])?:(\d+)(?::(\d+))?", inner):
            start, count = int(sliced[3]), int(sliced[4]) if sliced[4] else None
            if sliced[1] == "@" or sliced[2]:
                values = ["", *self._arguments] if sliced[1] == "@" else self._value(sliced[1])
                return values[start:][:count]
            text = plain("".join(self._value(sliced[1])[:1]))
            return not_known if text is None else [text[start:][:count]]
        found = re.fullmatch(r"([A-Za-z_]\w*)(##?|%%?|//?|,,|\^\^)(.*)", inner, re.DOTALL)
        value = "".join(self._value(found[1])[:1]) if found else ""
        if found is None or UNKNOWN in value:
            return not_known
        sign, word = found[2], self._expanded(found[3])
        if sign in (",,", "^^"):
            return [value.lower() if sign == ",," else value.upper()] if VARIABLE not in value else not_known
        if sign[0] == "/":
            old, _, new = word.partition("/")
            return (
                [value.replace(old, new, -1 if sign == "//" else 1)] if old and not set(old) & set("*?[") else not_known
            )
        return [_stripped(value, word, sign)]

    def _expanded(self, text: str) -> str:
        """The text with its variables replaced, without the quotes around it."""
        if not self._in_quotes:
            text = re.sub(r"^~(?=/|$)", variable("HOME"), _QUOTED.sub(lambda found: found[1] or found[2] or "", text))
        inner = self.within(text)
        quoted = text[:1] == text[-1:] and text[:1] in ('"', "'") and len(text) > 1
        return " ".join(inner._word(split=False) if quoted else inner._double(""))

    def _calculated(self, text: str) -> str:
        inner = self._expanded(text)
        guesses = "".join(GUESS.findall(inner))
        number = integer(GUESS.sub("", inner), self._number)
        return unknown(f"$(({text}))") if number is None else f"{number}{guesses}"

    def _number(self, name: str) -> str:
        """The text of a variable, for sums. That of one that is guessed is no number."""
        return "".join(self._value(name)[:1])

    def _value(self, name: str) -> list[str]:
        """The values of a variable: one, or those of an array."""
        return self._values.get(name, [variable(name)])

    def _assign(self, name: str, value: list[str], line: int) -> None:
        """Set a variable. Where only a running shell knows whether that is done, an earlier value stays unless it is
        empty, and the value is marked as guessed."""
        if self._runs is False:
            return
        if self._runs is None:
            mark, before = f"{GUESSED}{line}{END}", self._values.get(name)
            earlier = value if before in (None, [], [""]) else before
            value = [_FIELD.sub(rf"\g<0>{mark}", each) for each in earlier]
        self._values[name] = value

    def _peek(self) -> str:
        return self._text[self._at : self._at + 1]

    def _until(self, end: str) -> str:
        """The text up to `end`, or all that is left; stops at `end`."""
        place = self._text.find(end, self._at)
        place = len(self._text) if place < 0 else place
        text, self._at = self._text[self._at : place], place
        return text

    def _enclosed(self, start: int, opening: str, closing: str) -> str:
        """The text between the bracket at `start` and the one that closes it; stops after it."""
        depth, at = 0, start
        while at < len(self._text):
            char = self._text[at]
            depth += (char == opening) - (char == closing)
            at += 1
            if not depth:
                break
        self._at = at
        return self._text[start + 1 : at - 1]


def _stripped(value: str, pattern: str, sign: str) -> str:
    """A value without what fits a pattern at its beginning (`#`) or end (`%`); doubled, the longest piece."""
    places = range(len(value) + 1)
    if sign[0] == "#":
        cuts = places if sign == "#" else reversed(places)
        return next((value[place:] for place in cuts if fnmatchcase(value[:place], pattern)), value)
    cuts = reversed(places) if sign == "%" else places
    return next((value[:place] for place in cuts if fnmatchcase(value[place:], pattern)), value)
