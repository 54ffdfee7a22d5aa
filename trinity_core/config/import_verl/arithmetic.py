"""Whole numbers of a shell: `$((1024 * (2 + a)))`."""

from __future__ import annotations

import ast
import operator
import re
from collections.abc import Callable

_OPERATORS: dict[type[ast.operator], Callable[[int, int], int]] = {
    ast.Add: operator.add,
    ast.Sub: operator.sub,
    ast.Mult: operator.mul,
    ast.Div: lambda a, b: abs(a) // abs(b) * (1 if (a < 0) == (b < 0) else -1),
    ast.Mod: lambda a, b: abs(a) % abs(b) * (-1 if a < 0 else 1),
}
"""A shell rounds quotients towards zero."""
_COMPARISONS: dict[type[ast.cmpop], Callable[[int, int], bool]] = {
    ast.Lt: operator.lt,
    ast.LtE: operator.le,
    ast.Gt: operator.gt,
    ast.GtE: operator.ge,
    ast.Eq: operator.eq,
    ast.NotEq: operator.ne,
}
_SIGNS = {"&&": " and ", "||": " or "}
_LARGEST = 2**63


def integer(text: str, value_of: Callable[[str], str]) -> int | None:
    """The value of an expression of `+ - * / %`, comparisons, `&& || !` and brackets; `value_of` gives the text of a
    variable.

    None for anything else: a variable that has no number, a division by 0, what 64 bits do not hold.
    """
    text = re.sub(r"&&|\|\|", lambda sign: _SIGNS[sign[0]], text)
    text = re.sub(r"!(?!=)", " not ", " ".join(text.split()))
    try:
        found = _value(ast.parse(text.strip(), mode="eval").body, value_of)
    except (SyntaxError, ValueError, ZeroDivisionError, RecursionError):
        return None
    return found if abs(found) < _LARGEST else None


def _value(node: ast.expr, value_of: Callable[[str], str]) -> int:
    """Raises ValueError for what is no whole number."""
    if isinstance(node, ast.Constant) and type(node.value) is int:
        return node.value
    if isinstance(node, ast.Name):
        return int(value_of(node.id))
    if isinstance(node, ast.UnaryOp) and isinstance(node.op, ast.USub):
        return -_value(node.operand, value_of)
    if isinstance(node, ast.UnaryOp) and isinstance(node.op, ast.Not):
        return int(not _value(node.operand, value_of))
    if isinstance(node, ast.BoolOp):
        values = [_value(each, value_of) != 0 for each in node.values]
        return int(all(values) if isinstance(node.op, ast.And) else any(values))
    if isinstance(node, ast.Compare) and len(node.ops) == 1 and type(node.ops[0]) in _COMPARISONS:
        compare = _COMPARISONS[type(node.ops[0])]
        return int(compare(_value(node.left, value_of), _value(node.comparators[0], value_of)))
    if isinstance(node, ast.BinOp) and type(node.op) in _OPERATORS:
        return _OPERATORS[type(node.op)](_value(node.left, value_of), _value(node.right, value_of))
    raise ValueError(f"'{ast.unparse(node)}' is no whole number")
