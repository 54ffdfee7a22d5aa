"""Answers that verifiers of reasoning-gym evaluate as Python: which of them may be.

`eval` of a list, and sympy's `parse_expr` of a formula, call whatever an answer calls. An answer is handed on only if
it is data or a formula; one that would have to be run is no answer. What is not Python is handed on too, as neither
can evaluate it: beyond Python, `parse_expr` knows the factorial's `!` alone, which no answer needs.
"""

from __future__ import annotations

import ast

EVALUATED = frozenset({
    "binary_matrix", "countdown", "intermediate_integration", "n_queens", "polynomial_multiplication", "puzzle24",
    "simple_integration", "spiral_matrix", "string_insertion",
})  # fmt: skip
"""Generators whose verifiers evaluate an answer."""
FUNCTIONS = frozenset({
    "Abs", "abs", "acos", "acosh", "asin", "asinh", "atan", "atanh", "cos", "cosh", "cot", "csc", "erf", "exp", "ln",
    "log", "sec", "sin", "sinh", "sqrt", "tan", "tanh",
})  # fmt: skip
"""What a formula may call."""
DATA = (
    ast.Expression, ast.Constant, ast.List, ast.Tuple, ast.Name, ast.Load, ast.UnaryOp, ast.UAdd, ast.USub, ast.BinOp,
    ast.Add, ast.Sub, ast.Mult, ast.Div, ast.Pow, ast.BitXor, ast.Call,
)  # fmt: skip
LARGEST_EXPONENT = 100
"""Of a number, and of all powers of powers together: `9**9**9` would take for ever."""


def is_evaluable(answer: str) -> bool:
    """True if evaluating the answer runs nothing but arithmetic and the functions of formulas, or fails."""
    try:
        tree = ast.parse(answer.strip().replace("!", ""), mode="eval")
        return "!" not in answer and all(map(_is_harmless, ast.walk(tree))) and _power(tree) <= LARGEST_EXPONENT
    except (SyntaxError, ValueError):
        return True
    except (RecursionError, MemoryError):
        return False


def _is_harmless(node: ast.AST) -> bool:
    match node:
        case ast.Call(func=ast.Name(id=name), keywords=[]):
            return name in FUNCTIONS
        case ast.Name(id=name):
            return "_" not in name
        case ast.BinOp(op=ast.Pow(), right=exponent):
            return _exponent(exponent) is not None or any(isinstance(one, ast.Name) for one in ast.walk(exponent))
        case _:
            return isinstance(node, DATA) and not isinstance(node, ast.Call)


def _power(node: ast.AST) -> float:
    """The product of the exponents on the way to a number, where it is largest."""
    own = _exponent(node.right) if isinstance(node, ast.BinOp) and isinstance(node.op, ast.Pow) else None
    return max(1.0, own or 1.0) * max((_power(child) for child in ast.iter_child_nodes(node)), default=1.0)


def _exponent(node: ast.expr) -> float | None:
    """The size of an exponent that is a number or a fraction of two, with or without a sign; else None."""
    match node:
        case ast.Constant(value=int() | float() as number):
            return abs(number)
        case ast.UnaryOp(operand=operand):
            return _exponent(operand)
        case ast.BinOp(left=above, op=ast.Div(), right=below):
            sizes = _exponent(above), _exponent(below)
            return sizes[0] / sizes[1] if sizes[0] is not None and sizes[1] else None
        case _:
            return None
