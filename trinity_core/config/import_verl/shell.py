"""Shell scripts, read and never run: the words of each command, with what the script itself says of its variables.

Covered: quotes, comments, line continuations, arrays, `${NAME:-default}` and its kin, `$((…))`, positional arguments,
here-documents; conditions, `case`, loops and functions, as far as the script itself decides what is run.
Not covered: what only a running shell knows. A variable that the script does not set becomes a mark of the environment
(`variable`), and counts as not set in conditions; the output of a command becomes a mark of the unknown (`unknown`). Of
an assignment under a condition that is not known the first one is taken, and noted.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

from trinity_core.config.import_verl.arithmetic import integer
from trinity_core.config.import_verl.conditions import (
    both,
    either,
    holds,
    matches,
    negated,
    plain,
    taken_as_unset,
)
from trinity_core.config.import_verl.shell_words import ASSIGNED, DECLARE, GUESS, Shell, ShellText

_KEYWORD = re.compile(r"(if|then|elif|else|fi|while|until|for|select|do|done|case|esac|time|!|\{|\})(?=[\s;&|()]|$)")
_FUNCTION = re.compile(r"(?:function[ \t]+([\w-]+)(?:[ \t]*\([ \t]*\))?|([\w-]+)[ \t]*\([ \t]*\))\s*(?=\{)")
_SUCCEEDS = {":", "true", "echo", "printf", "export", "shift", "set", "unset", "cd", "mkdir", "sleep"}
_MOST_TURNS = 200
"""Of all loops of a script, and calls of its functions: more is no script that starts a training."""


@dataclass(frozen=True)
class ShellCommand:
    """A simple command."""

    line: int
    """Line of the script, from 1."""
    words: list[str]
    """Its words, expanded."""
    guessed: dict[str, int] = field(default_factory=dict)
    """What is set under a condition that is not known here, with the line: keys of words `key=value`, other words."""


@dataclass
class _Block:
    """An `if`, `case`, loop, group or subshell that is open."""

    kind: str
    outer: bool | None
    """Whether it is run itself."""
    live: bool | None
    """Whether the commands here are run: True, False, or None where only a running shell knows."""
    taken: bool | None = False
    """Whether an earlier branch was run."""
    holds: bool | None = False
    """The condition of the branch before."""
    subject: str = ""
    """What `case` compares."""
    at_pattern: bool = False
    name: str = ""
    items: list[str] | None = None
    """The variable of `for`, and the values that it has yet to take; None: not known."""
    start: int = 0
    """Where the body of the loop begins."""


class ShellScript(ShellText):
    """The commands of a script that are run, with the variables that stand above each."""

    def __init__(self, text: str, arguments: Sequence[str] = (), shell: Shell | None = None) -> None:
        """As of `ShellText`."""
        super().__init__(text, arguments, shell)
        self._blocks: list[_Block] = []
        self._status: bool | None = True
        """Whether the last command succeeded."""
        self._join = ""
        """`&&`, `||` or `|` before the next command."""
        self._negates = False

    @property
    def assumptions(self) -> list[str]:
        """What was assumed of the shell that would run the script, as sentences."""
        names, told = ", ".join(self._shell.defaulted), []
        if names:
            told.append(
                f"{names}: variables of the environment were taken as not set (to import other values, set them in the "
                "script)."
            )
        return [*told, *(f"`{command}` was taken to fail." for command in self._shell.failed)]

    def commands(self) -> Iterator[ShellCommand]:
        """Each command other than an assignment, in the order in which they are run."""
        while self._at < len(self._text):
            self._runs = self._running()
            if self._between():
                continue
            line, start = self._text.count("\n", 0, self._at) + 1, self._at
            words = self._words()
            if self._at == start:
                self._at += 1
                continue
            if words is not None and self._runs is not False:
                yield from self._performed(words, line)
            self._join, self._negates = "", False

    def _running(self) -> bool | None:
        live = self._blocks[-1].live if self._blocks else self._outer
        if self._join == "&&":
            return both(live, self._status)
        return both(live, negated(self._status)) if self._join == "||" else live

    def _performed(self, words: list[str], line: int) -> Iterator[ShellCommand]:
        """Carry out a command, and tell of it; sets its status."""
        piped = self._join == "|" or re.match(r"\|(?!\|)", self._text[self._at : self._at + 2]) is not None
        left = self._perform(words, line)
        if left:
            yield _command(line, left)
        if left and left[0] in self._shell.functions and self._counted():
            yield from self.within(self._shell.functions[left[0]], left[1:]).commands()
        if left[:1] in (["exit"], ["return"]) and self._runs and left[1:] in ([], ["0"]):
            self._at = len(self._text)
        status = None if piped or self._runs is None else self._status_of(left)
        self._status = negated(status) if self._negates else status

    def _counted(self) -> bool:
        self._shell.turns += 1
        return self._shell.turns <= _MOST_TURNS

    def _status_of(self, words: list[str]) -> bool | None:
        """Whether a command succeeds."""
        if not words or words[0] in _SUCCEEDS:
            return True
        if words[0] == "false":
            return False
        if words[0] in ("[", "[[", "test"):
            self._shell.defaulted.update(dict.fromkeys(name for word in words for name in taken_as_unset(word)))
            return holds(words[1:] if words[0] == "test" else words[1:-1], globs=words[0] == "[[")
        if words[0] == "((" and len(words) == 2:
            number = integer(self._expanded(words[1]), self._number)
            return None if number is None else number != 0
        return None

    def _between(self) -> bool:
        """Step over what stands between commands: separators, keywords, patterns, definitions of functions."""
        text, block = self._text, self._blocks[-1] if self._blocks else None
        if separator := re.compile(r"[ \t\n]+|\\\n|#[^\n]*|;;?&?|&&|\|\||[|&]").match(text, self._at):
            self._at = separator.end()
            if separator[0] in ("&&", "||", "|"):
                self._join = separator[0]
            elif separator[0].startswith(";;") and block and block.kind == "case":
                block.at_pattern = True
            return True
        if block and block.at_pattern and not re.compile(r"esac\b").match(text, self._at):
            self._pattern(block)
            return True
        if function := _FUNCTION.match(text, self._at):
            body = self._enclosed(function.end(), "{", "}")
            if self._runs is not False:
                self._shell.functions[function[1] or function[2]] = body
            return True
        if keyword := _KEYWORD.match(text, self._at):
            self._at = keyword.end()
            self._keyword(keyword[1])
            return True
        if text[self._at] in "()" and not text.startswith("((", self._at):
            self._keyword(text[self._at])
            self._at += 1
            return True
        return False

    def _keyword(self, word: str) -> None:
        """Open, turn or close a block."""
        block = self._blocks[-1] if self._blocks else None
        if word in ("if", "while", "until", "{", "("):
            self._blocks.append(_Block(word, self._runs, self._runs))
            self._join = ""
        elif word in ("for", "select"):
            self._blocks.append(self._loop())
            self._join = ""
        elif word == "case":
            subject = " ".join(self._skipped_word())
            self._skipped_word()  # in
            self._shell.defaulted.update(dict.fromkeys(taken_as_unset(subject)))
            self._blocks.append(_Block(word, self._runs, False, subject=subject, at_pattern=True))
            self._join = ""
        elif word == "!":
            self._negates = True
        elif block is None:
            return
        elif word in ("then", "elif", "else"):
            self._branch(block, word)
        elif word == "do":
            self._body(block)
        elif word == "done" and block.items and block.outer and self._counted():
            self._assign(block.name, [block.items.pop(0)], 0)
            self._at = block.start
        elif word in ("fi", "done", "esac", "}", ")"):
            self._blocks.pop()
            self._join = ""

    def _branch(self, block: _Block, word: str) -> None:
        if word == "then":
            block.holds = self._status
            block.live = both(block.outer, both(block.holds, negated(block.taken)))
            return
        block.taken = either(block.taken, block.holds)
        block.live = both(block.outer, negated(block.taken))

    def _loop(self) -> _Block:
        """`for NAME in …`, up to `do`."""
        block = _Block("for", self._runs, self._runs)
        self._blank()
        if self._text.startswith("((", self._at):
            self._enclosed(self._at, "(", ")")
            return block
        block.name, said = "".join(self._skipped_word()), self._at
        if self._skipped_word() == ["in"]:
            items = self._words() or []
            block.items = None if any(plain(each) is None or set(each) & set("*?{") for each in items) else items
            block.subject = items[0] if items else ""
        else:
            self._at = said
        return block

    def _body(self, block: _Block) -> None:
        """`do`: the body is run for each of the items that are known; else perhaps."""
        block.start, block.live = self._at, both(block.outer, None)
        if block.kind == "for" and block.items is not None:
            block.live = both(block.outer, bool(block.items))
            if block.items:
                self._assign(block.name, [block.items.pop(0)], 0)
        elif block.kind == "for" and block.name and block.subject:
            self._runs = block.live
            self._assign(block.name, [block.subject], 0)
        elif (self._status is False and block.kind == "while") or (self._status is True and block.kind == "until"):
            block.live = False

    def _pattern(self, block: _Block) -> None:
        """`PATTERN | PATTERN)` of `case`."""
        fits: bool | None = False
        while (char := self._peek()) and char != ")":
            before = self._at
            word = "" if char in " \t\n|(" else " ".join(self._word(split=False))
            fits = either(fits, matches(block.subject, word)) if word or self._at > before else fits
            self._at += self._at == before
        self._at += 1
        block.at_pattern = False
        block.live = both(block.outer, both(fits, negated(block.taken)))
        block.taken = either(block.taken, fits)

    def _perform(self, words: list[str], line: int) -> list[str]:
        """Follow assignments; returns the command that is left."""
        declares = bool(words) and words[0] in DECLARE
        named = words[1:] if declares else words
        count = next((place for place, word in enumerate(named) if not ASSIGNED.match(word)), len(named))
        if declares or count == len(named):
            for word in named:
                found = ASSIGNED.match(word)
                if found:
                    before = "".join(self._values.get(found[1], [])) if found[2] else ""
                    self._assign(found[1], [before + word[found.end() :]], line)
            return []
        words = named[count:]
        if words[0] == "shift":
            del self._arguments[: int(words[1]) if len(words) > 1 and words[1].isdigit() else 1]
        elif words[:2] == ["set", "--"]:
            self._arguments = words[2:]
        elif words[0] == "unset" and self._runs:
            for name in words[1:]:
                self._values.pop(name, None)
        return words


def _command(line: int, words: list[str]) -> ShellCommand:
    """A command without the marks of guesses in its words, which are told apart."""
    guessed = {}
    for word in words:
        if found := GUESS.search(word):
            guessed[GUESS.sub("", word).partition("=")[0]] = int(found[0][1:-1])
    return ShellCommand(line, [GUESS.sub("", word) for word in words], guessed)
