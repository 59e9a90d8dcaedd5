"""Task `arithmetic`: "What is 3 + 4?", generated from the seed.

Both numbers are 0 .. 10^digits - 1. Train and test are disjoint, even if the two numbers are
exchanged. A fifth of all problems is for testing, at most 1,000, and at most 10,000 of the others
are for training.
"""

from __future__ import annotations

import operator
from typing import Any, Literal

from lagrpo.rewards.reward import UnscorableError, accept_any
from lagrpo.rewards.texts import normal_form, read_answer
from lagrpo.tasks import RowTask
from lagrpo.tasks.numbers import read_last_number

WORDING = "What is {problem}? Answer with just the number."
OPERATIONS = {"+": operator.add, "-": operator.sub, "*": operator.mul}
_MAX_TRAIN = 10_000
_MAX_TEST = 1_000
_MAX_SHUFFLED = 2**17  # more problems than this are not shuffled but sampled

Problem = tuple[str, int, int]
"""The sign of the operation, and its two operands."""


def load(
    seed: int,
    *,
    operations: tuple[Literal["+", "-", "*"], ...] = ("+",),
    digits: Literal[1, 2, 3, 4] = 1,
    split_seed: int | None = None,
) -> RowTask:
    """Returns the task with problems of this seed. Operands have up to `digits` digits.

    With `split_seed`, runs of all seeds have the same training and test problems.
    """
    train, test = split(operations, digits, seed if split_seed is None else split_seed)
    return RowTask("arithmetic", {"train": train, "test": test}, _ask, score)


def _ask(problem: Problem) -> tuple[str, str]:
    sign, a, b = problem
    return WORDING.format(problem=f"{a} {sign} {b}"), str(OPERATIONS[sign](a, b))


@accept_any
def score(completion: str, answer: Any, prefix: str = "") -> float:
    """Returns 1.0 if the completion's last numeral names the reference number, else 0.0.

    What the model thinks before </think> does not count.
    `lagrpo.tasks.numbers` says what a numeral is. For the answer 7, these are right: "7", "7.0",
    "07", "７", "7 apples", "3 + 4 = 7.". These are wrong: "-7", "seven", "3 + 4", "5 6 7",
    "6 or 7", "7, not 8". Raises UnscorableError if the answer is not an integer.
    """
    return float(read_last_number(read_answer(completion, prefix)) == _read_integer(answer))


def _read_integer(answer: Any) -> int:
    """Returns the reference number. Raises UnscorableError if `answer` is not an integer."""
    if isinstance(answer, str):
        answer = normal_form(answer)
    try:
        number = int(answer)
    except (TypeError, ValueError, OverflowError) as error:
        raise UnscorableError(f"the reference answer {answer!r:.80} is not an integer") from error
    if isinstance(answer, bool) or (isinstance(answer, float) and answer != number):
        raise UnscorableError(f"the reference answer {answer!r} is not an integer")
    return number


def split(
    operations: tuple[str, ...], digits: int, seed: int
) -> tuple[list[Problem], list[Problem]]:
    """Returns the training and the test problems, in an order that the seed chooses."""
    from lagrpo.rng import permutation

    operations = tuple(dict.fromkeys(operations))  # each once
    num_operands = 10**digits
    max_test = min(_MAX_TEST, len(operations) * num_operands**2 // 5)
    train: list[Problem] = []
    test: list[Problem] = []
    for operation, a, b in _sample_problems(operations, num_operands, seed):
        # Both orders of the operands go into the same split.
        problems = [(operation, a, b)]
        if a != b:
            problems.append((operation, b, a))
        if len(test) + len(problems) <= max_test:
            test += problems
        else:
            train += problems
    train_order = permutation(len(train), seed, "arithmetic", "order", "train")
    test_order = permutation(len(test), seed, "arithmetic", "order", "test")
    train_problems = [train[index] for index in train_order[:_MAX_TRAIN]]
    test_problems = [test[index] for index in test_order]
    return train_problems, test_problems


def _sample_problems(operations: tuple[str, ...], num_operands: int, seed: int) -> list[Problem]:
    """Returns distinct problems with a <= b in random order.

    These are all problems if they are few, else the number that the splits need.
    """
    from lagrpo.rng import permutation, uniforms

    # A problem's code is (operation * num_operands + a) * num_operands + b.
    num_codes = len(operations) * num_operands**2
    if num_codes <= _MAX_SHUFFLED:
        codes = permutation(num_codes, seed, "arithmetic", "problems").tolist()
    else:
        randoms = uniforms(_MAX_TRAIN + _MAX_TEST, seed, "arithmetic", "problems")
        codes = (randoms * num_codes).astype(int).tolist()
    problems: dict[Problem, None] = {}  # a dict keeps the order, and each problem once
    for code in codes:
        operation = operations[code // num_operands**2]
        a = code // num_operands % num_operands
        b = code % num_operands
        problems[(operation, min(a, b), max(a, b))] = None
    return list(problems)
