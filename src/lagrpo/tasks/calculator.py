"""Task `calculator`: arithmetic that takes a tool, and the tool.

The task has the problems of `arithmetic`, by default products of numbers of three digits, after
solved examples. Other tasks get the tool by task.tools = ["calculator"].
"""

from __future__ import annotations

import ast
import operator
from functools import partial
from typing import Any, Literal

from lagrpo.tasks import Messages, RowTask, arithmetic
from lagrpo.tasks.environments import Tools
from lagrpo.tasks.numbers import evaluate
from lagrpo.types import JsonView

EXAMPLES = ((27, 34), (615, 8), (90, 471))
"""The operands of the solved examples."""

OPERATIONS: dict[type, Any] = {
    ast.Add: operator.add,
    ast.Sub: operator.sub,
    ast.Mult: operator.mul,
    ast.Div: operator.truediv,
    ast.FloorDiv: operator.floordiv,
    ast.Mod: operator.mod,
}


def load(
    seed: int,
    *,
    operations: tuple[Literal["+", "-", "*"], ...] = ("*",),
    digits: Literal[1, 2, 3, 4] = 3,
    examples: Literal[0, 1, 2, 3] = 2,
) -> RowTask:
    """Returns the task with problems of this seed, each after `examples` solved ones."""
    rows = arithmetic.load(seed, operations=operations, digits=digits).rows
    tools = Tools({"calculate": calculate})
    return RowTask("calculator", rows, partial(_ask, examples), arithmetic.score, environment=tools)


def _ask(examples: int, problem: arithmetic.Problem) -> tuple[Messages, str]:
    sign, a, b = problem
    messages: list[JsonView] = []
    for x, y in EXAMPLES[:examples]:
        messages += _solve(f"{x} {sign} {y}")
    messages.append({"role": "user", "content": f"What is {a} {sign} {b}?"})
    return messages, calculate(f"{a} {sign} {b}")


def _solve(expression: str) -> Messages:
    """Returns a conversation in which the tool is called."""
    call = {"name": "calculate", "arguments": {"expression": expression}}
    result = calculate(expression)
    return [
        {"role": "user", "content": f"What is {expression}?"},
        {
            "role": "assistant",
            "content": "",
            "tool_calls": [{"type": "function", "function": call}],
        },
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
    # A Fraction, so 1/3*3 is 1 and prints as a whole number.
    value = evaluate(expression, OPERATIONS)
    return str(value) if value.denominator == 1 else str(float(value))
