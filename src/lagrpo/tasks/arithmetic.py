"""Task `arithmetic`: "What is 3 + 4?", generated from the seed.

Both numbers are 0 .. 10^digits - 1. As words: "What is three plus four?". Subtraction goes below zero.

Train and test are disjoint, also if the two numbers are exchanged: 3 + 4 and 4 + 3 are in the same split. A fifth of
all problems is for testing, at most 1,000, and at most 10,000 of the others are for training: of the 100 single-digit
additions 80 and 20.
"""

from __future__ import annotations

import operator
from dataclasses import dataclass
from typing import Any, Literal

from lagrpo.rewards.reward import UnscorableError
from lagrpo.tasks.base import Ask, option
from lagrpo.tasks.numbers import read_last_number

WORDING = "What is {problem}? Answer with just the number."
OPERATIONS = {"+": ("plus", operator.add), "-": ("minus", operator.sub), "*": ("times", operator.mul)}
_TRAIN, _TEST = 10_000, 1_000
_FEW = 2**17

Problem = tuple[str, int, int]


@dataclass(frozen=True, slots=True)
class Options:
    """The options of this task."""

    operations: tuple[Literal["+", "-", "*"], ...] = option(("+",), "operations to sample from")
    digits: int = option(1, "operands have up to this many digits", least=1, most=4)
    words: bool = option(False, "operands as words")


def load(options: Options, seed: int) -> tuple[dict[str, list[Problem]], Ask]:
    """The problems of each split, and how one is asked."""

    def ask(problem: Problem) -> tuple[str, str]:
        sign, a, b = problem
        word, compute = OPERATIONS[sign]
        shown = f"{spell(a)} {word} {spell(b)}" if options.words else f"{a} {sign} {b}"
        return WORDING.format(problem=shown), str(compute(a, b))

    train, test = split(tuple(dict.fromkeys(options.operations)) or ("+",), options.digits, seed)
    return {"train": train, "test": test}, ask


def score(completion: str, answer: Any) -> float:
    """1.0 if the completion's last numeral (see `lagrpo.tasks.numbers`) names the reference number, else 0.0.

    Right for answer 7: "7", "7.0", "07", "7 apples", "3 + 4 = 7.". Wrong: "-7", "seven", "７", "3 + 4", "5 6 7",
    "6 or 7", "7, not 8". Raises UnscorableError if the answer is not an integer."""
    try:
        right = int(answer)
    except (TypeError, ValueError, OverflowError) as error:
        raise UnscorableError(f"the reference answer {answer!r:.80} is not an integer") from error
    return float(read_last_number(completion) == right)


def split(operations: tuple[str, ...], digits: int, seed: int) -> tuple[list[Problem], list[Problem]]:
    """The training and the test problems, in an order that the seed chooses."""
    from lagrpo.rng import permutation

    numbers = 10**digits
    test_size = min(_TEST, len(operations) * numbers**2 // 5)
    train, test = list[Problem](), list[Problem]()
    for operation, a, b in _sample_problems(operations, numbers, seed):
        both = [(operation, a, b)] if a == b else [(operation, a, b), (operation, b, a)]
        (test if len(test) + len(both) <= test_size else train).extend(both)
    orders = [permutation(len(p), seed, "arithmetic", "order", name) for p, name in ((train, "train"), (test, "test"))]
    return [train[n] for n in orders[0][:_TRAIN]], [test[n] for n in orders[1]]


def _sample_problems(operations: tuple[str, ...], numbers: int, seed: int) -> list[Problem]:
    """Distinct problems with a <= b in random order: all of them if they are few, else as many as needed."""
    from lagrpo.rng import permutation, uniforms

    space = len(operations) * numbers**2
    if space <= _FEW:
        codes = permutation(space, seed, "arithmetic", "problems").tolist()
    else:
        codes = dict.fromkeys((uniforms(_TRAIN + _TEST, seed, "arithmetic", "problems") * space).astype(int).tolist())
    problems = ((operations[code // numbers**2], code // numbers % numbers, code % numbers) for code in codes)
    return list(dict.fromkeys((operation, min(a, b), max(a, b)) for operation, a, b in problems))


_ONES = [
    "zero", "one", "two", "three", "four", "five", "six", "seven", "eight", "nine", "ten", "eleven", "twelve",
    "thirteen", "fourteen", "fifteen", "sixteen", "seventeen", "eighteen", "nineteen",
]  # fmt: skip
_TENS = ["twenty", "thirty", "forty", "fifty", "sixty", "seventy", "eighty", "ninety"]


def spell(number: int) -> str:
    """A number from 0 to 9,999 in words.

    >>> spell(7), spell(40), spell(9317)
    ('seven', 'forty', 'nine thousand three hundred seventeen')
    """
    if number < 20:
        return _ONES[number]
    if number < 100:
        return _TENS[number // 10 - 2] + (f"-{_ONES[number % 10]}" if number % 10 else "")
    size, name = (100, "hundred") if number < 1000 else (1000, "thousand")
    return f"{_ONES[number // size]} {name}" + (f" {spell(number % size)}" if number % size else "")
