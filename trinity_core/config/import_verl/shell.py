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
from collections.abc import Generator, Sequence
from dataclasses import dataclass
from fnmatch import fnmatchcase

from trinity_core.config.import_verl.conditions import (
    END,
    UNKNOWN,
    holds,
    integer,
    plain,
    taken_as_unset,
    unknown,
    variable,
)

_NAME = re.compile(r"[A-Za-z_]\w*")
_ASSIGNED = re.compile(r"([A-Za-z_]\w*)(\+?)=")
_FIELD = re.compile(f"(?:{UNKNOWN}.*?{END}|\\S)+", re.DOTALL)
"""A field of an unquoted value; a mark is never taken apart."""
_QUOTED = re.compile(r"'([^']*)'|\"([^\"]*)\"")
_ASKS = re.compile(r"([^&|]+?)\s*&&\s*echo\s+\S+\s*\|\|\s*echo\s+(\S+)")
_BETWEEN = re.compile(r"(?:[ \t\n;]|\\\n|#[^\n]*|&(?!&))*")
_JOIN = re.compile(r"(?:[ \t]|\\\n)*(&&|\|\|?)(?:[ \t\n]|\\\n|#[^\n]*)*")
_KEYWORD = re.compile(r"(if|then|elif|else|fi)(?=[\s;&|]|$)")
_FUNCTION = re.compile(r"(?:function[ \t]+([\w-]+)(?:[ \t]*\([ \t]*\))?|([\w-]+)[ \t]*\([ \t]*\))\s*\{")
_FOR = re.compile(r"for[ \t]+([A-Za-z_]\w*)[ \t]+in(?=[\s;])")
_CASE = re.compile(r"case(?=[ \t])")
_LOOP = re.compile(r"(?:[;\n&|]|\b(?:do|then|else)(?=[ \t]))[ \t]*(for|while|until|select|done)(?=[\s;&|]|$)")
"""A word that begins or ends a loop."""
_NOT_READ = re.compile(r"(?:for|while|until|select|case|time|coproc|!|[{}])(?=\s|$)|\(\(|[()&|]|[\w-]+[ \t]*\(\)")
"""What begins a command that is not followed."""
_ENDS = "\n;&|()"
_DECLARE = {"export", "local", "declare", "readonly", "typeset"}


class UnreadableShell(Exception):
    """A construct of the shell that is not followed."""

    def __init__(self, line: int, construct: str) -> None:
        super().__init__(f"line {line}: {construct}")
        self.line, self.construct = line, construct


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


class ShellScript:
    """The commands of a script that are run, with the variables that stand above each."""

    def __init__(self, text: str, arguments: Sequence[str] = ()) -> None:
        """`arguments` are what the script would be called with."""
        self._text, self._at = text.replace("\r\n", "\n"), 0
        self._arguments = list(arguments)
        self._values: dict[str, list[str]] = {}
        self._functions: dict[str, tuple[str, int]] = {}
        """By name: what stands between its braces, and the line of that."""
        self._unset: dict[str, None] = {}
        self._failed: dict[str, None] = {}
        self._silent: dict[str, None] = {}
        self._locals: dict[str, list[str] | None] = {}
        """Of the function that runs: its local variables with the values that they have outside of it."""
        self._first_line = 1
        self._ended = ""
        """`exit` or `return` where the script has called it."""
        self._documents: list[str] = []
        """The last lines of here-documents that begin on the next line."""
        self._runs = True
        """Whether the command that is read is run."""
        self._in_quotes = False

    @property
    def assumptions(self) -> list[str]:
        """What was assumed of the shell that would run the script, as sentences."""
        names, hint = ", ".join(self._unset), "to import other values, set them in the script"
        unset = [f"{names}: variables of the environment were taken as not set ({hint})."] if names else []
        silent = (f"`{command}` was taken to give no words." for command in self._silent)
        return [*unset, *(f"`{command}` was taken to fail." for command in self._failed), *silent]

    def commands(self) -> Generator[ShellCommand, None, bool]:
        """Each command other than an assignment, in the order in which they are run; returns whether the last one
        succeeds. Raises UnreadableShell."""
        ifs: list[_If] = []
        status = True
        while (at := self._next()) < len(self._text):
            live, asks = (ifs[-1].live, ifs[-1].asks) if ifs else (True, False)
            if function := _FUNCTION.match(self._text, at):
                body = self._enclosed(function.end() - 1, "{", "}")
                self._functions[function[1] or function[2]] = body, self._line(function.end())
            elif loop := _FOR.match(self._text, at):
                yield from self._for(loop, live)
            elif case := _CASE.match(self._text, at):
                self._at = case.end()
                yield from self._case(live)
            elif keyword := _KEYWORD.match(self._text, at):
                self._at = keyword.end()
                self._branch(ifs, keyword[1], live, status)
            else:
                status = yield from self._list(live, asks)
        return status

    def _next(self) -> int:
        """Step to the next command, over here-documents; the place of it."""
        at = self._skip(re.compile(r"[ \t;&]*(?:#[^\n]*)?"))
        while self._documents and self._peek() == "\n":
            last = re.escape(self._documents.pop(0))
            end = re.compile(rf"\n(?:.*\n)*?[ \t]*{last}(?=\n|\Z)|\Z").search(self._text, at)
            at = self._at = end.end() if end else len(self._text)
        return self._skip(_BETWEEN)

    def _run(self, body: str, line: int, arguments: Sequence[str] | None = None) -> Generator[ShellCommand, None, bool]:
        """The commands of a part of this script that begins in a line."""
        inner = self._within(body)
        inner._first_line, inner._arguments = line, self._arguments if arguments is None else list(arguments)
        inner._locals = self._locals if arguments is None else {}
        status = yield from inner.commands()
        for name, value in inner._locals.items() if arguments is not None else ():
            self._values.pop(name, None)
            self._values |= {} if value is None else {name: value}
        if inner._ended == "exit" or (inner._ended and arguments is None):
            self._at, self._ended = len(self._text), inner._ended
        return status

    def _for(self, loop: re.Match[str], live: bool) -> Generator[ShellCommand, None, None]:
        """`for NAME in WORDS; do …; done`, for each word that is known here."""
        self._runs, start, self._at = live, self._at, loop.end()
        words = self._words()
        head = " ".join(self._text[start : self._at].split())
        begin = re.compile(r"[;\s]*do(?=\s)").match(self._text, self._at)
        if begin is None:
            raise self._not_read("a loop without `do`")
        depth, line, self._at = 1, self._line(begin.end()), begin.end()
        for found in _LOOP.finditer(self._text, begin.end() - len("do")):
            depth += -1 if found[1] == "done" else 1
            if not depth:
                body, self._at = self._text[begin.end() : found.start()], found.end()
                break
        else:
            raise self._not_read("a loop without `done`")
        if live and any(UNKNOWN in word for word in words):
            self._silent[head] = None
            words = []
        for word in words if live else ():
            self._values[loop[1]] = [word]
            yield from self._run(body, line)
            if self._ended:
                break

    def _case(self, live: bool) -> Generator[ShellCommand, None, None]:
        """`case WORD in PATTERN | PATTERN) …;; … esac`."""
        self._runs, start = live, self._skip(re.compile(r"[ \t]+"))
        word = "".join(self._word(split=False))
        if live:
            self._unset |= dict.fromkeys(taken_as_unset(word))
        self._skip(re.compile(r"\s*in(?=\s)"))
        while not (end := re.compile(r"(?:\s|#[^\n]*)*(?:esac(?=[\s;]|$)|\Z)").match(self._text, self._at)):
            self._skip(re.compile(r"(?:\s|#[^\n]*)*\(?"))
            patterns = [self._expanded(pattern.strip()) for pattern in self._until(")").split("|")] if live else []
            known = [each for each in patterns if each == "*" or (plain(word) is not None and plain(each) is not None)]
            if known != patterns:
                self._failed[f"case {' '.join(self._text[start : self._at].split())})"] = None
            body = re.compile(r"(.*?)(;;|(?=\besac\b)|\Z)", re.DOTALL).match(self._text, self._at + 1)
            assert body is not None
            line, self._at = self._line(body.start()), body.end()
            if re.search(r"\bcase\b", body[1]):
                raise self._not_read("`case` within `case`")
            if any(fnmatchcase(plain(word) or "", plain(pattern) or "") for pattern in known):
                live = False
                yield from self._run(body[1], line)
        self._at = max(self._at, end.end())

    def _branch(self, ifs: list[_If], word: str, live: bool, status: bool) -> None:
        if word == "if":
            ifs.append(_If(live, live))
            return
        if not ifs:
            raise self._not_read(f"`{word}` without an `if`")
        block = ifs[-1]
        if word == "then":
            block.live = block.outer and not block.taken and status
            block.taken, block.asks = block.taken or block.live, False
        elif word == "fi":
            ifs.pop()
        else:
            block.live, block.asks = block.outer and not block.taken, word == "elif"

    def _list(self, live: bool, asks: bool) -> Generator[ShellCommand, None, bool]:
        """Commands that are joined by `&&`, `||` and `|`; returns whether they succeed."""
        runs, status = live, True
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
                    status = yield from self._run(body, line, left[1:])
                else:
                    status = self._succeeds(left, self._text[start : self._at].strip(), asks)
                    if left:
                        yield ShellCommand(self._line(start), left)
                if left[:1] in (["exit"], ["return"]):
                    self._at, self._ended = len(self._text), left[0]
            joined = _JOIN.match(self._text, self._at)
            if joined is None:
                return status
            self._at = joined.end()
            runs = live and (runs if joined[1] == "|" else status is (joined[1] == "&&"))

    def _succeeds(self, words: list[str], text: str, asks: bool) -> bool:
        """Whether a command succeeds: a condition by what is known of it, another command unless an `if` asks it."""
        if not words:
            return True
        if words[0] in ("break", "continue"):
            raise self._not_read(f"`{words[0]}`")
        value: bool | None = words[0] != "false"
        if words[0] in ("[", "[[", "test"):
            self._unset |= dict.fromkeys(name for word in words for name in taken_as_unset(word))
            value = holds(words[1:] if words[0] == "test" else words[1:-1], globs=words[0] == "[[")
        elif asks and words[0] not in ("true", ":", "false"):
            value = None
        if value is None:
            self._failed[" ".join(text.split())] = None
        return bool(value)

    def _assigned(self, words: list[str]) -> list[str]:
        """Follow assignments and `shift`; returns the command that is left."""
        declares = bool(words) and words[0] in _DECLARE
        named = words[1:] if declares else words
        count = next((place for place, word in enumerate(named) if not _ASSIGNED.match(word)), len(named))
        if declares or count == len(named):
            for word in named:
                if assigned := _ASSIGNED.match(word):
                    if words[0] == "local":
                        self._locals.setdefault(assigned[1], self._values.get(assigned[1]))
                    before = "".join(self._values.get(assigned[1], [])) if assigned[2] else ""
                    self._values[assigned[1]] = [before + word[assigned.end() :]]
            return []
        words = named[count:]
        if words[0] == "shift":
            del self._arguments[: int(words[1]) if len(words) > 1 and words[1].isdigit() else 1]
        elif words[:2] == ["set", "--"]:
            self._arguments = words[2:]
        elif words[0] == "unset":
            for name in words[1:]:
                self._values.pop(name, None)
        return words

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
                bare = not words or words[0] in _DECLARE or all(map(_ASSIGNED.match, words))
                assigned = _ASSIGNED.match(self._text, self._at) if bare else None
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
        begins = not opened or (not split and _ASSIGNED.fullmatch(fields[-1]) is not None)
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
        place = int(name) if name.isdigit() else 0
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
        given = not any(UNKNOWN in each for each in value) if is_special else name in self._values
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

    def _within(self, text: str) -> ShellScript:
        """A text of this script, which sees the same variables."""
        inner = ShellScript(text, self._arguments)
        inner._values, inner._unset, inner._failed = self._values, self._unset, self._failed
        inner._silent, inner._functions = self._silent, self._functions
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
