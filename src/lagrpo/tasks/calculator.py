"""The tool `calculator`: exact arithmetic, for tools = ["calculator"]."""

from __future__ import annotations

import ast
import operator
from fractions import Fraction
from typing import Any

OPERATIONS: dict[type, Any] = {
    ast.Add: operator.add, ast.Sub: operator.sub, ast.Mult: operator.mul,
    ast.Div: operator.truediv, ast.FloorDiv: operator.floordiv, ast.Mod: operator.mod,
    ast.UAdd: operator.pos, ast.USub: operator.neg,
}  # fmt: skip
LONGEST = 200  # characters of an expression
LARGEST = 10**100


def calculate(expression: str) -> str:
    """Compute an arithmetic expression.

    Args:
        expression: Numbers with + - * / // % and parentheses, such as 12 * (3 + 4).

    Returns:
        The value.
    """
    if len(expression) > LONGEST:
        raise ValueError(f"the expression has more than {LONGEST} characters")
    try:
        tree = ast.parse(expression.strip(), mode="eval").body
    except SyntaxError as error:
        raise ValueError(f"{expression!r} is no arithmetic expression") from error
    value = _value(tree)
    return str(value) if value.denominator == 1 else str(float(value))


def _value(node: ast.AST) -> Fraction:
    if isinstance(node, ast.Constant) and type(node.value) in (int, float):
        value = Fraction(str(node.value))
    elif isinstance(node, ast.UnaryOp) and type(node.op) in OPERATIONS:
        value = OPERATIONS[type(node.op)](_value(node.operand))
    elif isinstance(node, ast.BinOp) and type(node.op) in OPERATIONS:
        value = Fraction(OPERATIONS[type(node.op)](_value(node.left), _value(node.right)))
    else:
        raise ValueError("an expression has numbers, + - * / // % and parentheses")
    if abs(value.numerator) > LARGEST or value.denominator > LARGEST:
        raise ValueError("the number is too large")
    return value
