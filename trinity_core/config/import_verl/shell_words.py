"""Words of a shell script: quotes, variables, arrays, arguments and sums, as the script itself gives them."""

from __future__ import annotations

import re
from collections.abc import Sequence
from fnmatch import fnmatchcase
from typing import Self

from trinity_core.config.import_verl.conditions import END, UNKNOWN, integer, unknown, variable

_NAME = re.compile(r"[A-Za-z_]\w*")
ASSIGNED = re.compile(r"([A-Za-z_]\w*)(\+?)=")
_FIELD = re.compile(f"(?:{UNKNOWN}.*?{END}|\\S)+", re.DOTALL)
"""A field of an unquoted value; a mark is never taken apart."""
_QUOTED = re.compile(r"'([^']*)'|\"([^\"]*)\"")
_ASKS = re.compile(r"([^&|]+?)\s*&&\s*echo\s+\S+\s*\|\|\s*echo\s+(\S+)")
_ENDS = "\n;&|()"
DECLARE = {"export", "local", "declare", "readonly", "typeset"}


class UnreadableShell(Exception):
    """A construct of the shell that is not followed."""

    def __init__(self, line: int, construct: str) -> None:
        super().__init__(f"line {line}: {construct}")
        self.line, self.construct = line, construct


class ShellWords:
    """A script that is read word by word, and the variables that stand above each."""

    def __init__(self, text: str, arguments: Sequence[str] = ()) -> None:
        self._text, self._at = text.replace("\r\n", "\n"), 0
        self._arguments = list(arguments)
        self._values: dict[str, list[str]] = {}
        self._unset: dict[str, None] = {}
        self._failed: dict[str, None] = {}
        self._first_line = 1
        self._documents: list[str] = []
        """The last lines of here-documents that begin on the next line."""
        self._runs = True
        """Whether the command that is read is run."""
        self._in_quotes = False

    def _words(self) -> list[str]:
        """The words up to the end of a command."""
        words: list[str] = []
        if re.compile(r"\[\[\s").match(self._text, self._at):
            return self._test()
        while (char := self._peek()) and char not in _ENDS:
            if char in " \t" or self._text.startswith("\\\n", self._at):
                self._at += 1 + (char == "\\")
            elif char == "#":
                self._until("\n")
            elif redirected := re.compile(r"\d?[<>]+[&|]?-?[ \t]*").match(self._text, self._at):
                self._at = redirected.end()
                end = self._word()
                if re.fullmatch(r"\d?<<-?[ \t]*", redirected[0]):
                    self._documents += end
            else:
                bare = not words or words[0] in DECLARE or all(map(ASSIGNED.match, words))
                assigned = ASSIGNED.match(self._text, self._at) if bare else None
                if assigned and self._text.startswith("(", assigned.end()):
                    self._array(assigned)
                else:
                    words += self._word(split=assigned is None)
        return words

    def _test(self) -> list[str]:
        """The words and signs of `[[ … ]]`."""
        words, self._at = ["[["], self._at + 2
        while self._skip(re.compile(r"\s*")) < len(self._text) and words[-1] != "]]":
            sign = re.compile(r"&&|\|\||[()<>&|;]").match(self._text, self._at)
            if sign and sign[0] not in ("&&", "||"):
                raise self._not_read(f"`{sign[0]}` in a condition")
            self._at = sign.end() if sign else self._at
            words += [sign[0]] if sign else self._word(split=False) or [""]
        return words

    def _array(self, assigned: re.Match[str]) -> None:
        """`NAME=(…)` and `NAME+=(…)`."""
        self._at = assigned.end() + 1
        items = [*self._values.get(assigned[1], [])] if assigned[2] else []
        while self._skip(re.compile(r"(?:\s|\\\n|#[^\n]*)*")) < len(self._text) and self._peek() != ")":
            if self._peek() in _ENDS + "<>":
                raise self._not_read(f"`{self._peek()}` in an array")
            items += self._word()
        self._at += 1
        if self._runs:
            self._values[assigned[1]] = items

    def _word(self, split: bool = True) -> list[str]:
        """One word; several, or none, where variables outside quotes say so."""
        fields, opened = [""], False
        while (char := self._peek()) and char not in " \t<>" + _ENDS:
            if self._text.startswith("\\\n", self._at):
                self._at += 2
                continue
            if char == "\\":
                pieces = [self._text[self._at + 1 : self._at + 2]]
                self._at += 2
            elif char in "'\"":
                self._at += 1
                pieces = [self._until("'")] if char == "'" else self._double('"')
                self._at += 1
            elif char == "~" and self._is_home(fields, opened, split):
                pieces = [variable("HOME")]
                self._at += 1
            elif char in "$`":
                pieces = self._dollar()
                if split:
                    pieces = [piece for value in pieces for piece in _FIELD.findall(value)]
            else:
                pieces = [char]
                self._at += 1
            opened = opened or bool(pieces)
            if pieces:
                fields = [*fields[:-1], fields[-1] + pieces[0], *pieces[1:]]
        return fields if opened else []

    def _is_home(self, fields: list[str], opened: bool, split: bool) -> bool:
        """Whether a `~` here is the user's home: at the beginning of a word or of a value that is assigned."""
        begins = not opened or (not split and ASSIGNED.fullmatch(fields[-1]) is not None)
        return begins and self._text[self._at + 1 : self._at + 2] in ("/", "", " ", "\n", ";", ")", ":")

    def _double(self, end: str) -> list[str]:
        """The inside of double quotes, up to `end`: one text; several, or none, where an array stands in it."""
        fields, nothing, before, self._in_quotes = [""], False, self._in_quotes, end == '"' or self._in_quotes
        while (char := self._peek()) and char != end:
            if char == "\\" and self._text[self._at + 1 : self._at + 2] in ('"', "\\", "$", "`", "\n"):
                fields[-1] += self._text[self._at + 1].replace("\n", "")
                self._at += 2
            elif char in "$`":
                pieces = self._dollar()
                nothing = nothing or not pieces
                pieces = pieces or [""]
                fields = [*fields[:-1], fields[-1] + pieces[0], *pieces[1:]]
            else:
                fields[-1] += char
                self._at += 1
        self._in_quotes = before
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
            number = integer(self._expanded(inner[1:-1]), lambda name: "".join(self._value(name)[:1]))
            return [unknown(f"$(({inner[1:-1]}))") if number is None else str(number)]
        if text.startswith("$(", start):
            return [self._output(self._enclosed(start + 1, "(", ")"))]
        if text.startswith("${", start):
            return self._parameter(self._enclosed(start + 1, "{", "}"))
        if special := re.compile(r"[@*#?$!0-9]").match(text, start + 1):
            self._at = special.end()
            return self._special(special[0])
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
            if self._runs:
                self._failed[" ".join(asks[1].split())] = None
            return self._expanded(asks[2])
        words = self._within(command)._words()
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
        place = int(name) if name.isdecimal() else 0
        return [self._arguments[place - 1]] if 0 < place <= len(self._arguments) else [unknown(f"${name}")]

    def _parameter(self, inner: str) -> list[str]:
        """`${…}`: a value, one of an array, with a default, or without a piece of it (`${NAME##*/}`)."""
        if piece := re.fullmatch(r"@:(\d+)", inner):
            return self._arguments[max(int(piece[1]) - 1, 0) :]
        parsed = re.fullmatch(r"(\w+|[@*#])(\[[@*]\])?(?:(:?[-=?+]|##?|%%?)(.*))?", inner, re.DOTALL)
        if parsed is None:
            return [unknown(f"${{{inner}}}")]
        name, index, sign, word = parsed.groups()
        is_special = not _NAME.fullmatch(name)
        value = self._special(name) if is_special else self._value(name)
        if index == "[*]":
            value = [" ".join(value)]
        elif index is None and not is_special:
            value = value[:1]
        if sign is None:
            return value
        if sign[0] in "#%":
            known = not any(UNKNOWN in each for each in value)
            return [_stripped("".join(value), self._expanded(word), sign)] if known else [unknown(f"${{{inner}}}")]
        is_argument = not name.isdecimal() or int(name) <= len(self._arguments)
        given = is_argument if is_special else name in self._values
        if not given and not is_special and sign[-1] in "-=" and self._runs:
            self._unset[name] = None
        given = given and not (sign.startswith(":") and value in ([], [""]))
        if sign.endswith("+"):
            return [self._expanded(word)] if given else []
        if given or sign.endswith("?"):
            return value
        default = self._expanded(word)
        if sign.endswith("=") and self._runs:
            self._values[name] = [default]
        return [default]

    def _expanded(self, text: str) -> str:
        """The text with its variables replaced, without the quotes around it."""
        if not self._in_quotes:
            text = re.sub(r"^~(?=/|$)", variable("HOME"), _QUOTED.sub(lambda part: part[1] or part[2] or "", text))
        quoted = text[:1] == text[-1:] and text[:1] in ('"', "'") and len(text) > 1
        inner = self._within(text)
        return " ".join(inner._word(split=False) if quoted else inner._double(""))

    def _within(self, text: str) -> Self:
        """A text of this script, which sees the same variables."""
        inner = type(self)(text, self._arguments)
        inner._values, inner._unset, inner._failed = self._values, self._unset, self._failed
        inner._runs, inner._in_quotes = self._runs, self._in_quotes
        return inner

    def _value(self, name: str) -> list[str]:
        """The values of a variable: one, or those of an array."""
        return self._values.get(name, [variable(name)])

    def _peek(self) -> str:
        return self._text[self._at : self._at + 1]

    def _skip(self, pattern: re.Pattern[str]) -> int:
        """Step over what a pattern fits; the place behind it."""
        skipped = pattern.match(self._text, self._at)
        self._at = skipped.end() if skipped else self._at
        return self._at

    def _until(self, end: str) -> str:
        """The text up to `end`, or all that is left; stops at `end`."""
        place = self._text.find(end, self._at)
        place = len(self._text) if place < 0 else place
        text, self._at = self._text[self._at : place], place
        return text

    def _enclosed(self, start: int, opening: str, closing: str, bare: str = "") -> str:
        """The text between the bracket at `start` and the one that closes it; stops after it.

        `bare` is the text with what holds no bracket blanked out.
        """
        depth, at, text = 0, start, bare or self._text
        while at < len(text):
            char = text[at]
            depth += (char == opening) - (char == closing)
            at += 1
            if not depth:
                break
        self._at = at
        return self._text[start + 1 : at - 1]

    def _line(self, at: int) -> int:
        return self._text.count("\n", 0, at) + self._first_line

    def _not_read(self, construct: str) -> UnreadableShell:
        return UnreadableShell(self._line(self._at), construct)


def _stripped(value: str, pattern: str, sign: str) -> str:
    """A value without what fits a pattern at its beginning (`#`) or end (`%`); doubled, the longest piece."""
    places = range(len(value) + 1)
    if sign[0] == "#":
        cuts = places if sign == "#" else reversed(places)
        return next((value[place:] for place in cuts if fnmatchcase(value[:place], pattern)), value)
    cuts = reversed(places) if sign == "%" else places
    return next((value[:place] for place in cuts if fnmatchcase(value[place:], pattern)), value)
