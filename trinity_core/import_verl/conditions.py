"""What a shell script leaves open, as marks in its words; its patterns, conditions and sums."""

from __future__ import annotations

import ast
import operator
import re
from collections.abc import Callable, Sequence

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
_NO_SUM = re.compile(r"--|\+\+|\b[0-9]\w*[^\W0-9]")
"""What Python reads otherwise: a decrement, a number with letters or `_`."""
_CLASSES = {"digit": "0-9", "alpha": "A-Za-z", "alnum": "A-Za-z0-9", "upper": "A-Z", "lower": "a-z", "space": r"\s"}

Field = list[tuple[str, bool]]
"""The pieces of an expanded word, and whether each stood in quotes."""


def variable(name: str) -> str:
    """The mark of an environment variable that the script does not set."""
    return f"{VARIABLE}{name}{END}"


def unknown(text: str) -> str:
    """The mark of what only a running shell knows."""
    return f"{UNKNOWN}{text}{END}"


def taken_as_unset(word: str) -> list[str]:
    """The environment variables in a word that are taken as not set."""
    return [name for name in _MARK.findall(word) if name not in ALWAYS_SET]


def plain(word: str) -> str | None:
    """A word without marks; None where it holds what is not known here."""
    if UNKNOWN in word or any(name in ALWAYS_SET for name in _MARK.findall(word)):
        return None
    return _MARK.sub("", word)


def pattern(field: Field) -> re.Pattern[str] | None:
    """A shell's pattern, in which quoted characters stand for themselves.

    None for one with what is not known here, or with a class of characters that is not followed.
    """
    chars = [(char, quoted) for text, quoted in field for char in plain(text) or ""]
    if any(plain(text) is None for text, _ in field):
        return None
    regex, at = "", 0
    while at < len(chars):
        char, quoted = chars[at]
        at += 1
        if char == "[" and not quoted and (end := _end_of_class(chars, at)):
            inner = _character_class(chars[at:end])
            if inner is None:
                return None
            regex, at = regex + inner, end + 1
        else:
            regex += {"*": ".*", "?": "."}.get(char, re.escape(char)) if not quoted else re.escape(char)
    return re.compile(regex, re.DOTALL)


def _end_of_class(chars: Sequence[tuple[str, bool]], at: int) -> int:
    """The place of the `]` that ends a class of characters, 0 if there is none."""
    first = at + (at < len(chars) and chars[at] in (("!", False), ("^", False)))
    ends = (place for place in range(first + 1, len(chars)) if chars[place] == ("]", False))
    end = next(ends, 0)
    if "[:" in "".join(char for char, _ in chars[at:end]):  # its own bracket ends a named class
        end = next(ends, 0)
    return end


def _character_class(chars: Sequence[tuple[str, bool]]) -> str | None:
    negated = chars[0] in (("!", False), ("^", False))
    text = "".join(f"\\{char}" if quoted or char in "\\[]^&~|" else char for char, quoted in chars[negated:])
    text = re.sub(r"\\\[:(\w+):\\\]", lambda named: _CLASSES.get(named[1], "[:"), text)
    if "[:" in text.replace("\\[", "") or re.search(r"\\\[[.=:]", text):
        return None
    try:
        re.compile(regex := f"[{'^' if negated else ''}{text}]")
    except re.error:  # a range from a later to an earlier character
        return None
    return regex


def joined(field: Field) -> str:
    """The text of an expanded word."""
    return "".join(text for text, _ in field)


def holds(words: Sequence[Field], text_of: Callable[[str], str] | None = None) -> bool | None:
    """The value of the words of `[ … ]`; with `text_of`, the text of a variable, of those of `[[ … ]]`.

    None where only a running shell knows: files of its machine, values of its environment, the output of commands.
    Raises ValueError for what is no condition.
    """
    texts = [joined(word) for word in words]
    if len(texts) == 3 and (texts[1] in ("=", "==", "!=") or texts[1] in _COMPARISONS):
        return _compared(words[0], texts[1], words[2], text_of)
    for signs, decides in ((("||", "-o"), True), (("&&", "-a"), False)):
        places = [place for place, text in enumerate(texts) if text == signs[text_of is None]]
        if places:
            cuts = zip([-1, *places], [*places, len(words)], strict=True)
            values = [holds(words[start + 1 : end], text_of) for start, end in cuts]
            return decides if decides in values else None if None in values else not decides
    if len(texts) > 1 and texts[0] == "!":
        value = holds(words[1:], text_of)
        return None if value is None else not value
    if len(texts) == 2 and texts[0] in ("-n", "-z"):
        is_given = _is_given(texts[1])
        return None if is_given is None else is_given is (texts[0] == "-n")
    if len(texts) == 1:
        return _is_given(texts[0])
    if "(" in texts or re.fullmatch(r"-[A-Za-z] \S+|\S+ (?:-nt|-ot|-ef|[<>]) \S+", " ".join(texts)):
        return None
    raise ValueError("no condition")


def _is_given(word: str) -> bool | None:
    """Whether a word is not empty."""
    if any(name in ALWAYS_SET for name in _MARK.findall(word)) or re.sub(f"{UNKNOWN}.*?{END}", "", _MARK.sub("", word)):
        return True
    return None if UNKNOWN in word else False


def _compared(left: Field, sign: str, right: Field, text_of: Callable[[str], str] | None) -> bool | None:
    one, other = plain(joined(left)), plain(joined(right))
    if one is None or other is None:
        return None
    if sign not in _COMPARISONS:
        wanted = pattern(right if text_of else [(other, True)])
        return None if wanted is None else (wanted.fullmatch(one) is not None) is (sign != "!=")
    if text_of:  # sums, in which nothing is 0
        first, second = (integer(text or "0", text_of) for text in (one, other))
        return None if first is None or second is None else _COMPARISONS[sign](first, second)
    if not all(re.fullmatch(r"\s*[+-]?[0-9]+\s*", text) for text in (one, other)):
        return False  # as a shell, which says that this is no number
    return _COMPARISONS[sign](int(one), int(other))


def integer(text: str, value_of: Callable[[str], str]) -> int | None:
    """The value of an expression of `+ - * / %` and brackets; `value_of` gives the text of a variable.

    None for anything else: a variable that has no number, a division by 0, what 64 bits do not hold.
    """
    if _NO_SUM.search(text):
        return None
    try:
        return _value(ast.parse(" ".join(text.split()), mode="eval").body, value_of)
    except (SyntaxError, ValueError, ZeroDivisionError, RecursionError, MemoryError):
        return None


def _value(node: ast.expr, value_of: Callable[[str], str]) -> int:
    """Raises ValueError for what is no whole number."""
    if isinstance(node, ast.Constant):
        return _number(ast.unparse(node))
    if isinstance(node, ast.Name):
        return _number(value_of(node.id))
    if isinstance(node, ast.UnaryOp) and isinstance(node.op, ast.USub):
        return -_value(node.operand, value_of)
    if isinstance(node, ast.BinOp) and type(node.op) in _OPERATORS:
        value = _OPERATORS[type(node.op)](_value(node.left, value_of), _value(node.right, value_of))
        if abs(value) < _LARGEST:
            return value
    raise ValueError(f"'{ast.unparse(node)}' is no whole number")


def _number(text: str) -> int:
    """The value of a decimal number; others, also octal ones, are not followed."""
    if not re.fullmatch(r"\s*-?(0|[1-9][0-9]{0,17})\s*", text):
        raise ValueError(f"'{text}' is no whole number")
    return int(text)
