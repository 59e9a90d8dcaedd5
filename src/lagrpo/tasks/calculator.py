"""Task `calculator`: arithmetic that takes a tool, and the tool, exact arithmetic. Other tasks get the tool by
environment.tools = ["calculator"].

The problems are those of task `arithmetic`, by default products of numbers of three digits. Solved examples, with calls
and results, precede each problem.
"""

from __future__ import annotations

import ast
import operator
from dataclasses import dataclass
from fractions import Fraction
from functools import partial
from typing import Any, Literal

from lagrpo.tasks import arithmetic
from lagrpo.tasks.base import Ask, Messages, option
from lagrpo.tasks.tools import Tools

score = arithmetic.score
EXAMPLES = (27, 34), (615, 8), (90, 471)
OPERATIONS: dict[type, Any] = {
    ast.Add: operator.add, ast.Sub: operator.sub, ast.Mult: operator.mul,
    ast.Div: operator.truediv, ast.FloorDiv: operator.floordiv, ast.Mod: operator.mod,
    ast.UAdd: operator.pos, ast.USub: operator.neg,
}  # fmt: skip
LONGEST = 200  # characters of an expression
LARGEST = 10**100


@dataclass(frozen=True, slots=True)
class Options:
    """The options of this task."""

    operations: tuple[Literal["+", "-", "*"], ...] = option(("*",), "operations to sample from")
    digits: int = option(3, "operands have up to this many digits", least=1, most=4)
    examples: int = option(2, "solved problems before each", least=0, most=3)


def load(options: Options, seed: int) -> tuple[dict[str, list[arithmetic.Problem]], Ask]:
    """The problems of each split, and how one is asked."""
    train, test = arithmetic.split(tuple(dict.fromkeys(options.operations)) or ("*",), options.digits, seed)
    return {"train": train, "test": test}, partial(_ask, options.examples)


def _ask(examples: int, problem: arithmetic.Problem) -> tuple[Messages, str]:
    sign, a, b = problem
    solved = [message for x, y in EXAMPLES[:examples] for message in _solve(f"{x} {sign} {y}")]
    return [*solved, {"role": "user", "content": f"What is {a} {sign} {b}?"}], calculate(f"{a} {sign} {b}")


def _solve(expression: str) -> Messages:
    """A conversation in which the tool is called."""
    call, result = {"name": "calculate", "arguments": {"expression": expression}}, calculate(expression)
    return [
        {"role": "user", "content": f"What is {expression}?"},
        {"role": "assistant", "content": "", "tool_calls": [{"type": "function", "function": call}]},
        {"role": "tool", "name": "calculate", "content": result},
        {"role": "assistant", "content": result},
    ]


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
        value = _evaluate(ast.parse(expression.strip(), mode="eval").body)
    except SyntaxError as error:
        raise ValueError(f"{expression!r} is not an arithmetic expression") from error
    return str(value) if value.denominator == 1 else str(float(value))


def _evaluate(node: ast.AST) -> Fraction:
    if isinstance(node, ast.Constant) and type(node.value) in (int, float):
        value = Fraction(str(node.value))
    elif isinstance(node, ast.UnaryOp) and type(node.op) in OPERATIONS:
        value = OPERATIONS[type(node.op)](_evaluate(node.operand))
    elif isinstance(node, ast.BinOp) and type(node.op) in OPERATIONS:
        value = Fraction(OPERATIONS[type(node.op)](_evaluate(node.left), _evaluate(node.right)))
    else:
        raise ValueError("an expression has numbers, + - * / // % and parentheses")
    if abs(value.numerator) > LARGEST or value.denominator > LARGEST:
        raise ValueError("the number is too large")
    return value


ENVIRONMENT = Tools({"calculate": calculate}, score)
