"""`calculate`, a calculator as a tool: a plugin of the recipe `tools.yaml`.

plugin_dir: configs/tools
workflow_args: {tools: [calculate]}
"""

from __future__ import annotations

import ast
import operator
from collections.abc import Callable
from fractions import Fraction

from trinity_core.workflows import TOOLS

MOST_CHARACTERS = 200
"""Of an expression: so the work is bounded, as no power can be taken."""
BINARY: dict[type[ast.operator], Callable[[Fraction, Fraction], Fraction]] = {
    ast.Add: operator.add,
    ast.Sub: operator.sub,
    ast.Mult: operator.mul,
    ast.Div: operator.truediv,
}
UNARY: dict[type[ast.unaryop], Callable[[Fraction], Fraction]] = {ast.USub: operator.neg, ast.UAdd: operator.pos}


@TOOLS.register("calculate")
def calculate(expression: str) -> str:
    """The value of +, -, *, / and brackets."""
    if len(expression) > MOST_CHARACTERS:
        raise ValueError(f"an expression has at most {MOST_CHARACTERS} characters")
    value = _value(ast.parse(expression.strip(), mode="eval").body)
    return str(value.numerator) if value.denominator == 1 else f"{float(value):.10g}"


def _value(node: ast.expr) -> Fraction:
    match node:
        case ast.Constant(value=int() | float() as number) if not isinstance(number, bool):
            return Fraction(str(number))
        case ast.BinOp(left, sign, right) if type(sign) in BINARY:
            return BINARY[type(sign)](_value(left), _value(right))
        case ast.UnaryOp(sign, inner) if type(sign) in UNARY:
            return UNARY[type(sign)](_value(inner))
    raise ValueError(f"'{ast.unparse(node)}' is neither a number nor +, -, *, / of some")
