r"""Task `countdown`: reach a target from some numbers, generated from the seed.

The numbers are sampled from 1 to 99. The target, 10 to 999 and none of the numbers, is the value of some expression in
all of them. Train (10,000 problems) and test (500) are disjoint: a digest of the problem says which split it is in.
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
from lagrpo.tasks import RowTask
from lagrpo.tasks.numbers import evaluate, find_tagged

WORDING = (
    "Write an expression that equals {target}. Use only the numbers {numbers}, each of them at most once, with + - * / "
    "and parentheses. Answer with just the expression."
)
_SIZES = {"train": 10_000, "test": 500}
_LARGEST, _TARGETS = 99, range(10, 1000)
_SPELLINGS = {
    "×": "*",
    "·": "*",
    "÷": "/",
    "−": "-",
    "–": "-",
    r"\times": "*",
    r"\cdot": "*",
    r"\div": "/",
}
_SIZE = re.compile(r"\\(?:left|right)(?![a-z])")
_DELIMITER = re.compile(r"\\[()\[\]]")
_STRETCH = re.compile(r"[-+*/() 0-9]+")
_OPERATION = re.compile(r"[0-9)] *[-+*/]+ *[-+( ]*[0-9]")
_OPERATIONS = {
    ast.Add: operator.add,
    ast.Sub: operator.sub,
    ast.Mult: operator.mul,
    ast.Div: operator.truediv,
}


def load(seed: int, *, numbers: Literal[3, 4, 5, 6] = 4) -> RowTask:
    """The task with problems of this seed and so many given numbers, each made when it is asked."""
    rows = {split: [(split, index) for index in range(size)] for split, size in _SIZES.items()}
    return RowTask("countdown", rows, partial(_ask, numbers, seed), score)


def _ask(count: int, seed: int, row: tuple[str, int]) -> tuple[str, dict[str, Any]]:
    problem = make_problem(count, seed, *row)
    return WORDING.format(
        target=problem["target"], numbers=", ".join(map(str, problem["numbers"]))
    ), problem


def score(completion: str, answer: Any) -> float:
    """1.0 if the completion's expression equals the target and uses each given number at most once, else 0.0. `answer`
    is {"numbers": [...], "target": ...}. The expression, of at most 200 characters, has + - * / (also a sign, as in
    -3 + 10) and given numbers. Raises UnscorableError if `answer` is not of its form."""
    numbers, target = (
        (answer.get("numbers"), answer.get("target"))
        if isinstance(answer, Mapping)
        else (None, None)
    )
    if not isinstance(numbers, Sequence) or not all(
        type(number) is int for number in (*numbers, target)
    ):
        raise UnscorableError(
            f"the reference answer {answer!r} is not like {{'numbers': [3, 5, 7], 'target': 20}}"
        )
    expression = find_expression(completion)
    try:
        if expression is None or evaluate(expression, _OPERATIONS) != target:
            return 0.0
    except (ValueError, ZeroDivisionError):
        return 0.0
    return float(Counter(map(int, re.findall("[0-9]+", expression))) <= Counter(numbers))


def find_expression(text: str) -> str | None:
    """The expression in a completion (within its last <answer> ... </answer>, if any): the last stretch of digits,
    + - * / ( ), × · ÷, LaTeX's times, cdot and div, and spaces that has an operation between two numbers.

    >>> find_expression("First 7 - 3 = 4, so (7 − 3) × 5 = 20.")
    '(7 - 3) * 5'
    """
    text = _DELIMITER.sub(" ; ", _SIZE.sub("", find_tagged(text)))
    for spelling, sign in _SPELLINGS.items():
        text = text.replace(spelling, sign)
    stretches = [found.strip() for found in _STRETCH.findall(text) if _OPERATION.search(found)]
    if not stretches:
        return None
    bold = stretches[-1].startswith("**") and stretches[-1].endswith("**")
    return stretches[-1][2:-2] if bold else stretches[-1]


def make_problem(count: int, seed: int, split: str, index: int) -> dict[str, Any]:
    """A problem of a split: the first attempt that belongs to it. One problem in twenty is for testing."""
    attempt = -1
    while True:
        attempt += 1
        numbers, target = _combine_numbers(count, seed, split, index, attempt)
        digest = hashlib.blake2b(repr((sorted(numbers), target)).encode(), digest_size=8).digest()
        is_test = int.from_bytes(digest, "little") % 20 == 0
        if target in _TARGETS and target not in numbers and is_test == (split == "test"):
            return {"numbers": numbers, "target": target}


def _combine_numbers(count: int, *key: int | str) -> tuple[list[int], int]:
    """Random numbers and a target: until one is left, two are combined by an operation with a positive integer."""
    from lagrpo.rng import uniforms

    random = iter(uniforms(4 * count, "countdown", *key).tolist())
    numbers = [1 + int(next(random) * _LARGEST) for _ in range(count)]
    left = list(numbers)
    while len(left) > 1:
        b, a = sorted(left.pop(int(next(random) * len(left))) for _ in range(2))
        results = [a + b, a * b, *([a - b] if a != b else []), *([] if a % b else [a // b])]
        left.append(results[int(next(random) * len(results))])
    return numbers, left[0]
