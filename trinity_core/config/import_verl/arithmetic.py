"""Whole numbers of a shell: `$((1024 * (2 + a)))`."""

from __future__ import annotations

import ast
import operator
from collections.abc import Callable

_OPERATORS: dict[type[ast.operator], Callable[[int, int], int]] = {
    ast.Add: operator.add,
    ast.Sub: operator.sub,
    ast.Mult: operator.mul,
    ast.Div: operator.floordiv,
    ast.FloorDiv: operator.floordiv,
    ast.Mod: operator.mod,
}
_LARGEST = 2**63


def integer(text: str, value_of: Callable[[str], str]) -> int | None:
    """The value of an expression of `+ - * / %` and brackets; `value_of` gives the text of a variable.

    None for anything else: a variable that has no number, a division by 0, what 64 bits do not hold.
    """
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
    if isinstance(node, ast.BinOp) and type(node.op) in _OPERATORS:
        return _OPERATORS[type(node.op)](_value(node.left, value_of), _value(node.right, value_of))
    raise ValueError(f"'{ast.unparse(node)}' is no whole number")
