"""What a shell script leaves open, as marks in its words, and the value of its conditions and sums."""

from __future__ import annotations

import ast
import operator
import re
from collections.abc import Callable, Sequence
from fnmatch import fnmatchcase

VARIABLE, UNKNOWN, END = "\ue000", "\ue001", "\ue002"
"""Characters for private use: they begin and end a mark within a text."""
ALWAYS_SET = ("HOME", "PWD", "USER", "LOGNAME", "PATH", "SHELL", "HOSTNAME")
"""Environment variables that have a value wherever a script runs; all others are taken as not set."""
_MARK = re.compile(f"{VARIABLE}(.*?){END}", re.DOTALL)
_COMPARISONS: dict[str, Callable[[int, int], bool]] = {
    "-eq": operator.eq,
    "-ne": operator.ne,
    "-lt": operator.lt,
    "-le": operator.le,
    "-gt": operator.gt,
    "-ge": operator.ge,
}
_OPERATORS: dict[type[ast.operator], Callable[[int, int], int]] = {
    ast.Add: operator.add,
    ast.Sub: operator.sub,
    ast.Mult: operator.mul,
    ast.Div: lambda a, b: abs(a) // abs(b) * (1 if (a < 0) == (b < 0) else -1),
    ast.Mod: lambda a, b: abs(a) % abs(b) * (-1 if a < 0 else 1),
}
"""A shell rounds quotients towards zero."""
_LARGEST = 2**63


def variable(name: str) -> str:
    """The mark of an environment variable that the script does not set."""
    return f"{VARIABLE}{name}{END}"


def unknown(text: str) -> str:
    """The mark of what only a running shell knows."""
    return f"{UNKNOWN}{text}{END}"


def taken_as_unset(word: str) -> list[str]:
    """The environment variables in a word that are taken as not set."""
    return [name for name in _MARK.findall(word) if name not in ALWAYS_SET]


def holds(words: Sequence[str], globs: bool) -> bool | None:
    """The value of the words of `[ … ]`, or of `[[ … ]]`, whose right sides are patterns (`globs`).

    None where only a running shell knows: files of its machine, values of its environment, the output of commands.
    """
    for signs, decides in ((("||", "-o"), True), (("&&", "-a"), False)):
        places = [place for place, word in enumerate(words) if word in signs]
        if places:
            cuts = zip([-1, *places], [*places, len(words)], strict=True)
            values = [holds(words[start + 1 : end], globs) for start, end in cuts]
            return decides if decides in values else None if None in values else not decides
    if words[:1] == ["!"]:
        value = holds(words[1:], globs)
        return None if value is None else not value
    if len(words) == 3:
        return _compared(words[0], words[1], words[2], globs)
    if len(words) == 2 and words[0] in ("-n", "-z"):
        given = _is_given(words[1])
        return None if given is None else given is (words[0] == "-n")
    return _is_given(words[0]) if len(words) == 1 else None if words else False


def plain(word: str) -> str | None:
    """A word without marks; None where it holds what is not known here."""
    if UNKNOWN in word or any(name in ALWAYS_SET for name in _MARK.findall(word)):
        return None
    return _MARK.sub("", word)


def _is_given(word: str) -> bool | None:
    """Whether a word is not empty."""
    if any(name in ALWAYS_SET for name in _MARK.findall(word)) or re.sub(f"{UNKNOWN}.*?{END}", "", _MARK.sub("", word)):
        return True
    return None if UNKNOWN in word else False


def _compared(left: str, sign: str, right: str, globs: bool) -> bool | None:
    one, other = plain(left), plain(right)
    if one is None or other is None:
        return None
    if sign in ("=", "==", "!="):
        return (fnmatchcase(one, other) if globs else one == other) is (sign != "!=")
    try:
        return _COMPARISONS[sign](int(one), int(other)) if sign in _COMPARISONS else None
    except ValueError:
        return False  # as a shell, which says that this is no number


def integer(text: str, value_of: Callable[[str], str]) -> int | None:
    """The value of an expression of `+ - * / %` and brackets; `value_of` gives the text of a variable.

    None for anything else: a variable that has no number, a division by 0, what 64 bits do not hold.
    """
    try:
        value = _value(ast.parse(" ".join(text.split()), mode="eval").body, value_of)
    except (SyntaxError, ValueError, ZeroDivisionError, RecursionError):
        return None
    return value if abs(value) < _LARGEST else None


def _value(node: ast.expr, value_of: Callable[[str], str]) -> int:
    """Raises ValueError for what is no whole number."""
    if isinstance(node, ast.Constant) and type(node.value) is int:
        return node.value
    if isinstance(node, ast.Name):
        return int(value_of(node.id))
    if isinstance(node, ast.UnaryOp) and isinstance(node.op, ast.USub):
        return -_value(node.operand, value_of)
    if isinstance(node, ast.BinOp) and type(node.op) in _OPERATORS:
        return _OPERATORS[type(node.op)](_value(node.left, value_of), _value(node.right, value_of))
    raise ValueError(f"'{ast.unparse(node)}' is no whole number")
