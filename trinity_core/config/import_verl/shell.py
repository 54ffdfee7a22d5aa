"""Shell scripts, read and never run: the words of each command, with what the script itself says of its variables.

Covered: quotes, comments, line continuations, arrays, `${NAME:-default}`, `$((…))`, positional arguments,
here-documents.
Not covered: what only a running shell knows. A variable that the script does not set becomes a mark of the environment
(`variable`), the output of a command a mark of the unknown (`unknown`); of an assignment within `if`, `for` or `case`
the first one is taken, and noted.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

from trinity_core.config.import_verl.arithmetic import integer

VARIABLE, UNKNOWN, END = "\ue000", "\ue001", "\ue002"
"""Characters for private use: they begin and end a mark within a text."""
_NAME = re.compile(r"[A-Za-z_]\w*")
_ASSIGNED = re.compile(r"([A-Za-z_]\w*)(\+?)=")
_FIELD = re.compile(f"(?:{UNKNOWN}.*?{END}|\\S)+", re.DOTALL)
"""A field of an unquoted value; a mark is never taken apart."""
_ENDS = "\n;&|()"
_DECLARE = {"export", "local", "declare", "readonly", "typeset"}
_OPEN, _CLOSE = {"if", "for", "while", "until", "case", "select", "{"}, {"fi", "done", "esac", "}"}
_BETWEEN = {"then", "else", "elif", "do", "!", "time"}


def variable(name: str) -> str:
    """The mark of an environment variable that the script does not set."""
    return f"{VARIABLE}{name}{END}"


def unknown(text: str) -> str:
    """The mark of what only a running shell knows."""
    return f"{UNKNOWN}{text}{END}"


@dataclass(frozen=True)
class ShellCommand:
    """A simple command."""

    line: int
    """Line of the script, from 1."""
    words: list[str]
    """Its words, expanded."""
    guessed: dict[str, int] = field(default_factory=dict)
    """Variables behind the words that are set under a condition, with the line."""


class ShellScript:
    """The commands of a script, with the variables that stand above each."""

    def __init__(self, text: str, arguments: Sequence[str] = (), values: dict[str, list[str]] | None = None) -> None:
        """`arguments` are what the script would be called with; `values` are variables that are set already."""
        self._text, self._at, self._depth = text.replace("\r\n", "\n"), 0, 0
        self._arguments = list(arguments)
        self._values = {} if values is None else values
        self._guessed: dict[str, int] = {}
        self._touched: dict[str, int] = {}

    def commands(self) -> Iterator[ShellCommand]:
        """Each command other than an assignment, in the order of the text."""
        while self._at < len(self._text):
            self._touched = {}
            line = self._text.count("\n", 0, self._at) + 1
            words = self._perform(self._words(), line)
            if words:
                yield ShellCommand(line, words, dict(self._touched))

    def within(self, text: str) -> ShellScript:
        """A script in a word of this one, as in `bash -c "…"`."""
        return ShellScript(text, self._arguments, self._values)

    def _words(self) -> list[str]:
        """The words up to the end of a command."""
        words: list[str] = []
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
                bare = not words or words[0] in _DECLARE
                assigned = _ASSIGNED.match(self._text, self._at) if bare else None
                if assigned and self._text.startswith("(", assigned.end()):
                    self._array(assigned)
                else:
                    words += self._word(split=assigned is None)
        self._at += 1
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
                self._at += 2
                continue
            if char == "'":
                self._at += 1
                found = [self._until("'")]
                self._at += 1
            elif char == '"':
                self._at += 1
                found = self._double('"')
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
            return self._value(name[0])
        self._at += 1
        return [] if text.startswith("$'", start) else ["$"]

    def _output(self, command: str) -> str:
        """What a command in `$(…)` prints: known of `pwd` and `basename`, which only look at texts."""
        words = self.within(command)._words()
        if words == ["pwd"]:
            return variable("PWD")
        if words[:1] == ["basename"] and len(words) == 2:
            return words[1].rstrip("/").rpartition("/")[2]
        return unknown(f"$({command})")

    def _special(self, name: str) -> list[str]:
        if name in "@*":
            return list(self._arguments)
        if name == "#":
            return [str(len(self._arguments))]
        place = int(name) if name.isdigit() else 0
        return [self._arguments[place - 1]] if 0 < place <= len(self._arguments) else [unknown(f"${name}")]

    def _parameter(self, inner: str) -> list[str]:
        """`${…}`."""
        found = re.fullmatch(r"(\w+|[@*#])(?:\[[@*]\])?(?:(:?[-=?+])(.*))?", inner, re.DOTALL)
        if found is None:
            return [unknown(f"${{{inner}}}")]
        name, operator, word = found.groups()
        is_special = not _NAME.fullmatch(name)
        value = self._special(name) if is_special else self._value(name)
        given = not any(UNKNOWN in each for each in value) if is_special else name in self._values
        if operator is None:
            return value
        if operator.startswith(":"):
            given = given and value not in ([], [""])
        if operator.endswith("+"):
            return [self._expanded(word)] if given else []
        if given or operator.endswith("?"):
            return value
        default = self._expanded(word)
        if operator.endswith("="):
            self._values[name] = [default]
        return [default]

    def _expanded(self, text: str) -> str:
        """The text with its variables replaced, without the quotes around it."""
        inner = self.within(text)
        quoted = text[:1] == text[-1:] and text[:1] in ('"', "'") and len(text) > 1
        return " ".join(inner._word(split=False) if quoted else inner._double(""))

    def _calculated(self, text: str) -> str:
        number = integer(self._expanded(text), lambda name: "".join(self._values.get(name, [])))
        return unknown(f"$(({text}))") if number is None else str(number)

    def _value(self, name: str) -> list[str]:
        if name in self._guessed:
            self._touched[name] = self._guessed[name]
        return self._values.get(name, [variable(name)])

    def _perform(self, words: list[str], line: int) -> list[str]:
        """Follow keywords and assignments; returns the command that is left."""
        while words and (words[0] in _OPEN or words[0] in _CLOSE or words[0] in _BETWEEN):
            keyword = words.pop(0)
            self._depth += (keyword in _OPEN) - (keyword in _CLOSE)
            if keyword == "for" and len(words) > 2 and words[1] == "in":
                self._assign(words[0], words[2:3], line)
                return []
        declares = bool(words) and words[0] in _DECLARE
        named = words[1:] if declares else words
        count = next((place for place, word in enumerate(named) if not _ASSIGNED.match(word)), len(named))
        if declares or count == len(named):
            for word in named[:count]:
                found = _ASSIGNED.match(word)
                if found:
                    before = "".join(self._values.get(found[1], [])) if found[2] else ""
                    self._assign(found[1], [before + word[found.end() :]], line)
            return []
        words = named[count:]
        if words[0] == "shift":
            del self._arguments[: int(words[1]) if len(words) > 1 and words[1].isdigit() else 1]
        elif words[:2] == ["set", "--"]:
            self._arguments = words[2:]
        return words

    def _assign(self, name: str, value: list[str], line: int) -> None:
        """Set a variable. Under a condition an earlier value stays, and the variable counts as guessed."""
        if self._depth > 0:
            self._guessed[name] = line
        elif self._touched:
            self._guessed[name] = min(self._touched.values())
        else:
            self._guessed.pop(name, None)
        if self._depth <= 0 or name not in self._values:
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
