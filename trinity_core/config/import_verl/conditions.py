"""Marks of what a script leaves open, and its conditions: True, False, or None where only a running shell knows."""

from __future__ import annotations

import operator
import re
from collections.abc import Callable, Sequence
from fnmatch import fnmatchcase

VARIABLE, UNKNOWN, END, GUESSED = "\ue000", "\ue001", "\ue002", "\ue003"
"""Characters for private use: they begin and end a mark within a text. `GUESSED` begins one that stands behind a value
that is set under a condition which is not known here, with the line."""
ALWAYS_SET = ("HOME", "PWD", "USER", "LOGNAME", "PATH", "SHELL", "HOSTNAME")
"""Environment variables that have a value wherever a script runs; all others are taken as not set."""
_MARK = re.compile(f"{VARIABLE}(.*?){END}", re.DOTALL)
_TEXTS: dict[str, Callable[[str, str], bool]] = {"<": operator.lt, ">": operator.gt}
_NUMBERS: dict[str, Callable[[int, int], bool]] = {
    "-eq": operator.eq,
    "-ne": operator.ne,
    "-lt": operator.lt,
    "-le": operator.le,
    "-gt": operator.gt,
    "-ge": operator.ge,
}


def variable(name: str) -> str:
    """The mark of an environment variable that the script does not set."""
    return f"{VARIABLE}{name}{END}"


def unknown(text: str) -> str:
    """The mark of what only a running shell knows."""
    return f"{UNKNOWN}{text}{END}"


def both(one: bool | None, other: bool | None) -> bool | None:
    """Kleene's conjunction."""
    return False if one is False or other is False else None if one is None or other is None else True


def either(one: bool | None, other: bool | None) -> bool | None:
    """Kleene's disjunction."""
    return negated(both(negated(one), negated(other)))


def negated(one: bool | None) -> bool | None:
    """Kleene's negation."""
    return None if one is None else not one


def taken_as_unset(word: str) -> list[str]:
    """The environment variables in a word that are taken as not set."""
    return [name for name in _MARK.findall(word) if name not in ALWAYS_SET]


def plain(word: str) -> str | None:
    """A word without marks; None where it holds what is not known here."""
    if UNKNOWN in word or GUESSED in word or any(name in ALWAYS_SET for name in _MARK.findall(word)):
        return None
    return _MARK.sub("", word)


def matches(word: str, pattern: str) -> bool | None:
    """Whether a word fits a pattern of `case` or `[[ … == … ]]`."""
    text, glob = plain(word), plain(pattern)
    if glob == "*":
        return True
    return None if text is None or glob is None else fnmatchcase(text, glob)


def holds(words: Sequence[str], globs: bool) -> bool | None:
    """The value of the words of `[ … ]`, or of `[[ … ]]`, whose right sides are patterns (`globs`)."""
    found, rest = _either(list(words), globs)
    return None if rest else found


def _either(words: list[str], globs: bool) -> tuple[bool | None, list[str]]:
    found, words = _both(words, globs)
    while words[:1] in (["||"], ["-o"]):
        other, words = _both(words[1:], globs)
        found = either(found, other)
    return found, words


def _both(words: list[str], globs: bool) -> tuple[bool | None, list[str]]:
    found, words = _single(words, globs)
    while words[:1] in (["&&"], ["-a"]):
        other, words = _single(words[1:], globs)
        found = both(found, other)
    return found, words


def _single(words: list[str], globs: bool) -> tuple[bool | None, list[str]]:
    if words[:1] == ["!"]:
        found, words = _single(words[1:], globs)
        return negated(found), words
    if words[:1] == ["("]:
        found, words = _either(words[1:], globs)
        return (found, words[1:]) if words[:1] == [")"] else (None, words)
    if len(words) > 2 and words[1] in ("=", "==", "!=", "=~", *_TEXTS, *_NUMBERS):
        return _compared(words[0], words[1], words[2], globs), words[3:]
    if len(words) > 1 and words[0] in ("-n", "-z"):
        given = _is_given(words[1])
        return given if words[0] == "-n" else negated(given), words[2:]
    if len(words) > 1 and re.fullmatch("-[a-zA-Z]", words[0]):
        return None, words[2:]  # files of the machine that would run the script
    return (_is_given(words[0]), words[1:]) if words else (False, [])


def _is_given(word: str) -> bool | None:
    """Whether a word is not empty."""
    if any(name in ALWAYS_SET for name in _MARK.findall(word)) or re.sub(f"{UNKNOWN}.*?{END}", "", _MARK.sub("", word)):
        return True
    return None if UNKNOWN in word else False


def _compared(left: str, sign: str, right: str, globs: bool) -> bool | None:
    if sign in ("=", "==", "!=") and globs:
        fits = matches(left, right)
        return negated(fits) if sign == "!=" else fits
    one, other = plain(left), plain(right)
    if one is None or other is None:
        return None
    if sign in _TEXTS:
        return _TEXTS[sign](one, other)
    if sign == "=~":
        try:
            return re.search(other, one) is not None
        except re.error:
            return None
    if sign in _NUMBERS:
        try:
            return _NUMBERS[sign](int(one), int(other))
        except ValueError:
            return False  # as a shell, which says that this is no number
    return (one == other) is (sign != "!=")
