r"""Task `countdown`: reach a target from some numbers, generated from the seed.

The numbers are sampled from 1 to 99. The target, 10 to 999 and none of the numbers, is the value of
some expression in all of them. Train (10,000 problems) and test (500) are disjoint: a digest of the
problem says which split it is in.
"""

from __future__ import annotations

import ast
import hashlib
import operator
import re
from collections import Counter
from collections.abc import Mapping, Sequence
from functools import partial
from typing import Any, Literal

from lagrpo.rewards.reward import UnscorableError
from lagrpo.rewards.texts import parse_literal, read_answer
from lagrpo.tasks import RowTask
from lagrpo.tasks.numbers import evaluate, find_tagged
from lagrpo.types import JsonObject

WORDING = (
    "Write an expression that equals {target}. Use only the numbers {numbers}, each of them at "
    "most once, with + - * / and parentheses. Answer with just the expression."
)
_SIZES = {"train": 10_000, "test": 500}
_LARGEST = 99
_TARGETS = range(10, 1000)
_ONE_TEST_PROBLEM_IN = 20
_SPELLINGS = {
    "×": "*",
    "·": "*",
    "÷": "/",
    "–": "-",
    r"\times": "*",
    r"\cdot": "*",
    r"\div": "/",
}
_BRACKET_SIZE = re.compile(r"\\(?:left|right)(?![a-z])")
_FORMULA_DELIMITER = re.compile(r"\\[()\[\]]")
_BULLET = re.compile(r"^[^\S\n]*[-*+]\s+", re.MULTILINE)  # of a list in Markdown
_STRETCH = re.compile(r"[-+*/() 0-9]+")  # characters that an expression may have
# Two numbers with an operation between them.
_OPERATION = re.compile(r"[0-9)] *[-+*/]+ *[-+( ]*[0-9]")
_OPERATIONS = {
    ast.Add: operator.add,
    ast.Sub: operator.sub,
    ast.Mult: operator.mul,
    ast.Div: operator.truediv,
}


def load(seed: int, *, numbers: Literal[3, 4, 5, 6] = 4) -> RowTask:
    """Returns the task with problems of this seed, each with `numbers` numbers.

    A problem is made when it is read.
    """
    rows = {split: [(split, index) for index in range(size)] for split, size in _SIZES.items()}
    return RowTask("countdown", rows, partial(_ask, numbers, seed), score)


def _ask(count: int, seed: int, row: tuple[str, int]) -> tuple[str, JsonObject]:
    split, index = row
    problem = make_problem(count, seed, split, index)
    number_list = ", ".join(str(number) for number in problem["numbers"])
    return WORDING.format(target=problem["target"], numbers=number_list), problem


def score(completion: str, answer: Any, prefix: str = "") -> float:
    """Returns 1.0 if the completion's expression solves the problem, else 0.0.

    The expression must equal the target and use each given number at most once. It has at most 200
    characters: + - * / (also a sign, as in -3 + 10), parentheses and given numbers. What the model
    thinks before </think> does not count. `answer` is {"numbers": [...], "target": ...}. Raises
    UnscorableError if `answer` is not of its form.
    """
    if isinstance(answer, str):  # a cell of CSV
        answer = parse_literal(answer)
    numbers = None
    target = None
    if isinstance(answer, Mapping):
        numbers = answer.get("numbers")
        target = answer.get("target")
    if not isinstance(numbers, Sequence) or not all(
        type(number) is int for number in (*numbers, target)
    ):
        raise UnscorableError(
            f"the reference answer {answer!r} is not like {{'numbers': [3, 5, 7], 'target': 20}}"
        )
    expression = find_expression(read_answer(completion, prefix))
    try:
        if expression is None or evaluate(expression, _OPERATIONS) != target:
            return 0.0
    except (ValueError, ZeroDivisionError):
        return 0.0
    used_numbers = Counter(int(digits) for digits in re.findall("[0-9]+", expression))
    return float(used_numbers <= Counter(numbers))


def find_expression(text: str) -> str | None:
    """Returns the expression in a completion, within its last <answer> ... </answer> if it has any.

    It is the last stretch of digits, + - * / ( ), × · ÷, LaTeX's times, cdot and div, and spaces
    that has an operation between two numbers. Returns None if the text has no expression.

    >>> find_expression("First 7 - 3 = 4, so (7 - 3) × 5 = 20.")
    '(7 - 3) * 5'
    """
    text = _BRACKET_SIZE.sub("", find_tagged(text))
    text = _FORMULA_DELIMITER.sub(" ; ", text)
    text = _BULLET.sub("", text)
    for spelling, sign in _SPELLINGS.items():
        text = text.replace(spelling, sign)
    expressions = [
        stretch.strip() for stretch in _STRETCH.findall(text) if _OPERATION.search(stretch)
    ]
    if not expressions:
        return None
    # Markdown's bold, and a bracket that opens a remark, stand around the expression.
    return expressions[-1].strip("* ").rstrip("( ")


def make_problem(count: int, seed: int, split: str, index: int) -> JsonObject:
    """Returns a problem of a split with `count` numbers.

    It is the first attempt that belongs to the split. One problem in twenty is for testing.
    """
    attempt = 0
    while True:
        numbers, target = _combine_numbers(count, seed, split, index, attempt)
        is_test = _digest(numbers, target) % _ONE_TEST_PROBLEM_IN == 0
        if target in _TARGETS and target not in numbers and is_test == (split == "test"):
            return {"numbers": numbers, "target": target}
        attempt += 1


def _digest(numbers: Sequence[int], target: int) -> int:
    """Returns a number that is the same for the same problem, in whatever order its numbers are."""
    text = repr((sorted(numbers), target))
    return int.from_bytes(hashlib.blake2b(text.encode(), digest_size=8).digest(), "little")


def _combine_numbers(count: int, *key: int | str) -> tuple[list[int], int]:
    """Returns random numbers and a target that an expression in all of them reaches.

    Two numbers are combined by a random operation with a positive integer as its result, until one
    number is left: the target.
    """
    from lagrpo.rng import uniforms

    # Enough: count numbers, and three draws for each of count - 1 combinations.
    randoms = iter(uniforms(4 * count, "countdown", *key).tolist())
    numbers = [1 + int(next(randoms) * _LARGEST) for _ in range(count)]
    remaining = list(numbers)
    while len(remaining) > 1:
        first = remaining.pop(int(next(randoms) * len(remaining)))
        second = remaining.pop(int(next(randoms) * len(remaining)))
        smaller, larger = sorted((first, second))
        results = [larger + smaller, larger * smaller]
        if larger != smaller:
            results.append(larger - smaller)
        if larger % smaller == 0:
            results.append(larger // smaller)
        remaining.append(results[int(next(randoms) * len(results))])
    return numbers, remaining[0]
