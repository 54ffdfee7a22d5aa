"""Reads a shell script to its syntax tree; nothing is expanded or run.

Whatever decides what is run and is not in this tree (`while`, `((…))`, `{1..3}` …) raises UnreadableShell.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Literal

from trinity_core.import_verl.shell_syntax import (
    DECLARE,
    Assignment,
    Case,
    Chain,
    Command,
    For,
    Function,
    Group,
    If,
    Output,
    Parameter,
    Part,
    Pipeline,
    Quoted,
    Simple,
    Sum,
    Test,
    Text,
    UnreadableShell,
    Word,
)  # fmt: skip

_CLOSING = ("then", "elif", "else", "fi", "do", "done", "esac", "}")
_REFUSED = ("while", "until", "select", "coproc", "]]")
_ENDS = " \t\n;&|()<>"
_RESERVED = re.compile(r"(?:[a-z]+|[{}!]|\[\[|\]\])(?=[\s;&|()<>]|$)")
_ASSIGNED = re.compile(r"([A-Za-z_]\w*)(\+?)=")
_ELEMENT = re.compile(r"([A-Za-z_]\w*\[[^\]\n]*\])\+?=")
_FUNCTION = re.compile(r"function[ \t]+([\w.:-]+)(?:[ \t]*\([ \t]*\))?|([\w.:-]+)[ \t]*\([ \t]*\)")
_REDIRECTION = re.compile(r"&>>?|\d*(?:<<<|<<-?|<>|<&|>&|>>|>\||<|>)")
_PARAMETER = re.compile(r"\$\{(#?)([A-Za-z_]\w*|\d+|[@*#?$!-])(?:\[(@|\*|\d+)\])?")
_OPERATOR = re.compile(r":?[-=?+]|##?|%%?|//?+(?![#%])|:|\^\^?(?=\})|,,?(?=\})")
_SPECIAL = re.compile(r"\$([A-Za-z_]\w*|[@*#?$!0-9-])")
_ESCAPES = dict(zip("abefnrtvE\\'\"?", "\a\b\x1b\f\n\r\t\v\x1b\\'\"?", strict=True))
"""Escapes within `$'…'`."""


_DECLARERS = [(Text(name),) for name in DECLARE]


class Parser:
    """Reads a script from its beginning to its end."""

    def __init__(self, text: str) -> None:
        self._text, self._at = text, 0
        self._documents: list[tuple[str, bool]] = []
        """The last lines of here-documents that begin on the next line, and whether tabs may stand before each."""

    def script(self) -> tuple[Chain, ...]:
        """The whole script. Raises UnreadableShell."""
        body = self._body()
        if self._at < len(self._text):
            raise self.refused(f"`{self._reserved() or self._peek(2).strip() or self._peek()}`")
        return body

    def refused(self, construct: str, at: int | None = None) -> UnreadableShell:
        """The error for a construct at a place, by default here."""
        return UnreadableShell(self._line(self._at if at is None else at), construct)

    # commands

    def _body(self) -> tuple[Chain, ...]:
        """Commands up to what can only close a larger one."""
        chains = []
        while self._lines() and self._reserved() not in _CLOSING and self._peek() != ")" and self._peek(2) != ";;":
            chains.append(self._chain())
        return tuple(chains)

    def _chain(self) -> Chain:
        sign: Literal["", "&&", "||"] = ""
        items = [(sign, self._pipeline())]
        while sign := self._joint():
            self._at += 2
            self._lines()
            items.append((sign, self._pipeline()))
        background = self._peek() == "&"
        if background or (self._peek() == ";" and self._peek(2) not in (";;", ";&")):
            self._at += 1
        elif self._peek() not in ("", "\n", ")") and self._peek(2) != ";;" and self._reserved() not in _CLOSING:
            raise self.refused(f"`{self._peek(2).strip()}`")
        return Chain(tuple(items), background)

    def _joint(self) -> Literal["", "&&", "||"]:
        following = self._next(2)
        return "&&" if following == "&&" else "||" if following == "||" else ""

    def _pipeline(self) -> Pipeline:
        negated = False
        while (word := self._reserved()) in ("!", "time"):
            negated ^= word == "!"
            self._at += len(word)
            self._blank()
        commands = [self._command()]
        while self._next() == "|" and self._peek(2) != "||":
            self._at += 2 if self._peek(2) == "|&" else 1
            self._lines()
            commands.append(self._command())
        return Pipeline(tuple(commands), negated)

    def _command(self) -> Command:
        word, start = self._reserved(), self._at
        if word in _CLOSING + _REFUSED or self._peek(2) == "((":
            raise self.refused(f"`{word or '(('}`")
        function = _FUNCTION.match(self._text, start)
        if function and (function[1] or word != "function"):
            self._at = function.end()
            self._lines()
            return Function(function[1] or function[2], self._command())
        readers: dict[str, Callable[[int], Command]]
        readers = {"if": self._if, "for": self._for, "case": self._case, "[[": self._test, "{": self._group}
        reader = readers.get(word)
        if reader is None and self._peek() != "(":
            return self._simple()
        self._at += len(word) if reader else 1
        command: Command = (reader or self._group)(start)
        while self._blank() or self._redirection() is not None:
            pass
        return command

    def _group(self, start: int) -> Group:
        body, isolated = self._body(), self._text[start] == "("
        if isolated and self._peek() != ")":
            raise self.refused("`(` without `)`", start)
        self._at += isolated
        if not isolated:
            self._expect("}", "{", start)
        return Group(body, isolated)

    def _if(self, start: int) -> If:
        branches: list[tuple[tuple[Chain, ...], tuple[Chain, ...]]] = []
        word = "if"
        while word in ("if", "elif"):
            condition = self._body()
            self._expect("then", word, start)
            branches.append((condition, self._body()))
            word = self._reserved()
            self._at += len(word)
        if word == "else":
            branches.append(((), self._body()))
            self._expect("fi", "if", start)
        elif word != "fi":
            raise self.refused("`if` without `fi`", start)
        return If(tuple(branches))

    def _for(self, start: int) -> For:
        self._blank()
        head = re.compile(r"([A-Za-z_]\w*)[ \t]+in(?=[\s;])").match(self._text, self._at)
        if head is None:
            raise self.refused("`for` without names and `in`", start)
        self._at, words = head.end(), []
        while self._next() not in ("", ";", "\n"):
            words.append(self._argument())
        text = " ".join(self._text[start : self._at].split())
        self._at += self._peek() == ";"
        self._lines()
        self._expect("do", "for", start)
        body = self._body()
        self._expect("done", "for", start)
        return For(self._line(start), text, head[1], tuple(words), body)

    def _case(self, start: int) -> Case:
        self._blank()
        word = self._word()
        self._lines()
        self._expect("in", "case", start)
        head, clauses = " ".join(self._text[start : self._at].split()), []
        while self._lines() and self._reserved() != "esac":
            self._at += self._peek() == "("
            first, patterns, sign = self._at, [], "|"
            while sign == "|":
                self._blank()
                patterns.append(self._word())
                sign = self._next()
                self._at += 1
            if sign != ")":
                raise self.refused(f"`{sign}` in a pattern of `case`")
            text = f"{head} {' '.join(self._text[first : self._at].split())}"
            body = self._body()
            if self._peek(2) == ";&" or self._peek(3) == ";;&":
                raise self.refused(f"`{self._peek(3).strip()}`")
            clauses.append((text, tuple(patterns), body))
            if self._peek(2) != ";;":
                break
            self._at += 2
        self._expect("esac", "case", start)
        return Case(word, tuple(clauses))

    def _expect(self, word: str, opening: str, start: int) -> None:
        if self._reserved() != word:
            raise self.refused(f"`{opening}` without `{word}`", start)
        self._at += len(word)

    def _simple(self) -> Simple:
        start, redirected = self._at, []
        assignments: list[Assignment] = []
        words: list[Word | Assignment] = []
        while True:
            self._blank()
            file = self._redirection()
            if file is not None:
                redirected.append(file)
                continue
            if self._peek() in _ENDS:
                break
            declares = bool(words) and words[0] in _DECLARERS
            assigned = _ASSIGNED.match(self._text, self._at) if declares or not words else None
            if not words and (element := _ELEMENT.match(self._text, self._at)):
                raise self.refused(f"`{element[1]}=`")
            if assigned and declares:
                words.append(self._assignment(assigned))
            elif assigned:
                assignments.append(self._assignment(assigned))
            else:
                words.append(self._argument())
        if not (words or assignments or redirected):
            raise self.refused(f"`{self._peek(2).strip()}`" if self._peek() else "a command without an end")
        text = self._text[start : self._at].strip()
        return Simple(self._line(start), text, tuple(assignments), tuple(words), tuple(redirected))

    def _redirection(self) -> Word | None:
        """The file of a redirection that stands here; None if there is none."""
        match = _REDIRECTION.match(self._text, self._at)
        if match is None:
            return None
        self._at = match.end()
        if self._peek() == "(":
            raise self.refused(f"`{match[0]}(`")
        self._blank()
        start = self._at
        word = self._word()
        if not word:
            raise self.refused(f"`{match[0]}` without a file")
        if "<<" in match[0] and "<<<" not in match[0]:
            last = re.sub(r"[\\'\"]", "", self._text[start : self._at])
            self._documents.append((last, match[0].endswith("-")))
        return word

    def _assignment(self, match: re.Match[str]) -> Assignment:
        line, self._at = self._line(self._at), match.end()
        if self._peek() != "(":
            return Assignment(line, match[1], bool(match[2]), self._word(assigned=True))
        start, items = self._at, []
        self._at += 1
        while self._lines() and self._peek() != ")":
            if self._peek() in _ENDS or re.compile(r"\[[^\]\n]*\]=").match(self._text, self._at):
                raise self.refused(f"`{self._peek()}` in an array")
            items.append(self._argument())
        if not self._peek():
            raise self.refused("`(` without `)`", start)
        self._at += 1
        return Assignment(line, match[1], bool(match[2]), items=tuple(items))

    def _test(self, start: int) -> Test:
        words: list[Word | str] = []
        while self._lines() and self._reserved() != "]]":
            sign = self._reserved() if self._reserved() == "!" else self._joint()
            self._at += len(sign)
            words.append(sign or self._word())
            if not words[-1] or self._peek(2) == "=~":
                raise self.refused(f"`{self._peek(2).strip()}` in a condition")
        self._expect("]]", "[[", start)
        return Test(self._line(start), " ".join(self._text[start : self._at].split()), tuple(words))

    # words

    def _argument(self) -> Word:
        """A word in which braces would be expanded, which is refused."""
        start, word = self._at, self._word()
        bare = "".join(part.text if isinstance(part, Text) and not part.quoted else "\0" for part in word)
        while braces := re.search(r"\{([^{}]*)\}", bare):
            if "," in braces[1] or ".." in braces[1]:
                raise self.refused(f"`{braces[0]}`".replace("\0", "…"), start)
            bare = bare.replace(braces[0], "\0")
        return word

    def _word(self, ends: str = _ENDS, assigned: bool = False, quoted: bool = False) -> Word:
        """One word, up to one of `ends`; `quoted` within double quotes."""
        parts: list[Part] = []
        plain = re.compile(rf"[^\\'\"$`~{re.escape(ends)}]+")
        while (char := self._peek()) and char not in ends:
            if self._peek(2) == "\\\n":
                self._at += 2
            elif char == "\\":
                following = self._text[self._at + 1 : self._at + 2]
                keeps = not following or (quoted and following not in '"\\$`}')
                parts.append(Text("\\" + following if keeps else following, True))
                self._at += 2
            elif char == '"':
                parts.append(self._double())
            elif char == "'" and not quoted:
                parts.append(Text(self._single_quoted(), True))
            elif char in "$`":
                parts.append(self._dollar(quoted))
            elif char == "~" and not quoted and self._begins(parts, assigned):
                parts.append(self._home(ends))
            else:
                match = plain.match(self._text, self._at)
                text = match[0] if match else char
                self._at += len(text)
                if parts and isinstance(before := parts[-1], Text) and before.quoted == quoted:
                    parts[-1] = Text(before.text + text, quoted)
                else:
                    parts.append(Text(text, quoted))
        return tuple(parts)

    def _begins(self, parts: list[Part], assigned: bool) -> bool:
        """Whether a `~` here may be a home: at the beginning of a word or of a value, or behind a `:` of a value."""
        if not parts:
            return True
        last = parts[-1]
        if not isinstance(last, Text) or last.quoted:
            return False
        named = len(parts) == 1 and _ASSIGNED.match(last.text)
        return bool(named and named.end() == len(last.text)) or (last.text[-1] == ":" and bool(assigned or named))

    def _home(self, ends: str) -> Part:
        match = re.compile(r"~([\w.+-]*)").match(self._text, self._at)
        assert match is not None
        if match[1] and self._text[match.end() : match.end() + 1] == "/":
            raise self.refused(f"`{match[0]}/`")
        self._at += 1
        follows = self._peek()
        is_home = not follows or follows in "/:" or follows in ends
        return Quoted((Parameter("~", "HOME"),)) if is_home else Text("~")

    def _single_quoted(self) -> str:
        end = self._text.find("'", self._at + 1)
        if end < 0:
            raise self.refused("a quote without an end")
        text, self._at = self._text[self._at + 1 : end], end + 1
        return text

    def _double(self) -> Quoted:
        start, parts = self._at, []
        self._at += 1
        while (char := self._peek()) != '"':
            if not char:
                raise self.refused("a quote without an end", start)
            if self._peek(2) == "\\\n":
                self._at += 2
            elif char in "$`":
                parts.append(self._dollar(True))
            else:
                match = re.compile(r"\\([\"\\$`])|\\|[^\"\\$`]+").match(self._text, self._at)
                assert match is not None
                self._at = match.end()
                parts.append(Text(match[1] or match[0], True))
        self._at += 1
        return Quoted(tuple(parts))

    def _dollar(self, quoted: bool) -> Part:
        """What begins with `$` or a backquote here."""
        start, follows = self._at, self._text[self._at + 1 : self._at + 2]
        if self._peek() == "`":
            match = re.compile(r"`(?:[^`\\]|\\.)*`", re.DOTALL).match(self._text, start)
            if match is None:
                raise self.refused("a quote without an end")
            self._at = match.end()
            return Output(match[0])
        if self._peek(3) == "$((":
            return self._sum()
        if follows == "(":
            self._at += 2
            body = self._body()
            if self._peek() != ")":
                raise self.refused("`$(` without `)`", start)
            self._at += 1
            return Output(self._text[start : self._at], body)
        if follows == "{":
            return self._parameter(quoted)
        if follows == "[":
            raise self.refused("`$[`")
        if follows == "'" and not quoted:
            return Text(self._ansi(), True)
        if follows == '"' and not quoted:
            self._at += 1
            return self._double()
        match = _SPECIAL.match(self._text, start)
        self._at = match.end() if match else start + 1
        return Parameter(match[0], match[1]) if match else Text("$", quoted)

    def _ansi(self) -> str:
        """The text of `$'…'`."""
        match = re.compile(r"\$'((?:[^'\\]|\\.)*)'", re.DOTALL).match(self._text, self._at)
        if match is None or re.search(r"\\[0-7xuUc]", match[1].replace("\\\\", "")):
            raise self.refused("`$'`")
        self._at = match.end()
        return re.sub(r"\\(.)", lambda escape: _ESCAPES.get(escape[1], escape[0]), match[1])

    def _sum(self) -> Sum:
        start, depth, parts = self._at, 2, []
        self._at += 3
        while depth:
            char = self._peek()
            if not char or (depth == 1 and char != ")"):
                raise self.refused("`$((` without `))`", start)
            if char in "$`":
                parts.append(self._dollar(True))
                continue
            depth += (char == "(") - (char == ")")
            self._at += 1
            parts += [Text(char, True)] if depth > 1 and char != '"' else []
        return Sum(self._text[start : self._at], tuple(parts))

    def _parameter(self, quoted: bool) -> Parameter:
        """`${…}`."""
        start, match = self._at, _PARAMETER.match(self._text, self._at)
        self._at = match.end() if match else start + 2
        if match and (match[1] or match[2] == "#") and self._peek() != "}":
            match, self._at = None, start + 2
        word: Word = ()
        replacement: Word = ()
        sign = "length" if match and match[1] else ""
        if self._peek() != "}":
            operator = _OPERATOR.match(self._text, self._at) if match else None
            sign = operator[0] if operator else "? "
            self._at = operator.end() if operator else self._at
            if sign in ("/", "//"):
                word = self._word("/}")
                if self._peek() == "/":
                    self._at += 1
                    replacement = self._word("}", quoted=quoted)
            else:
                word = self._word("}", quoted=quoted and sign[0] not in "#%")
        if self._peek() != "}":
            raise self.refused("`${` without `}`", start)
        self._at += 1
        text = self._text[start : self._at]
        return Parameter(text, match[2] if match else "", (match[3] or "") if match else "", sign, word, replacement)

    # characters

    def _peek(self, count: int = 1) -> str:
        return self._text[self._at : self._at + count]

    def _next(self, count: int = 1) -> str:
        """The next characters that are no blanks."""
        self._blank()
        return self._peek(count)

    def _reserved(self) -> str:
        match = _RESERVED.match(self._text, self._at)
        return match[0] if match else ""

    def _blank(self) -> bool:
        """Step over blanks and a comment; whether there were any."""
        before = self._at
        match = re.compile(r"(?:[ \t]|\\\n)*(?:#[^\n]*)?").match(self._text, self._at)
        self._at = match.end() if match else self._at
        return self._at > before

    def _lines(self) -> bool:
        """Step over blanks, comments, ends of lines and here-documents; whether anything is left."""
        while self._blank() or self._peek() == "\n":
            while self._documents and self._peek() == "\n":
                last, tabs = self._documents.pop(0)
                indent = r"\t*" if tabs else ""
                match = re.compile(rf"\n(?:.*\n)*?{indent}{re.escape(last)}(?=\n|\Z)").match(self._text, self._at)
                self._at = match.end() if match else len(self._text)
            self._at += self._peek() == "\n"
        return self._at < len(self._text)

    def _line(self, at: int) -> int:
        return self._text.count("\n", 0, at) + 1
