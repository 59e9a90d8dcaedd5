"""Task `arithmetic`: "What is 3 + 4?", generated from the seed.

Both numbers are 0 .. 10^digits - 1. Train and test are disjoint, also if the two numbers are exchanged. A fifth of all
problems is for testing, at most 1,000, and at most 10,000 of the others are for training.
"""

from __future__ import annotations

import operator
from typing import Any, Literal

from lagrpo.rewards.reward import UnscorableError, accept_any
from lagrpo.tasks import RowTask
from lagrpo.tasks.numbers import read_last_number

WORDING = "What is {problem}? Answer with just the number."
OPERATIONS = {"+": operator.add, "-": operator.sub, "*": operator.mul}
_TRAIN, _TEST = 10_000, 1_000
_FEW = 2**17  # problems that are shuffled; of more of them as many as needed are sampled

Problem = tuple[str, int, int]


def load(
    seed: int,
    *,
    operations: tuple[Literal["+", "-", "*"], ...] = ("+",),
    digits: Literal[1, 2, 3, 4] = 1,
) -> RowTask:
    """The task with problems of this seed: of these operations, with operands of up to so many digits."""
    train, test = split(operations, digits, seed)
    return RowTask("arithmetic", {"train": train, "test": test}, _ask, score)


def _ask(problem: Problem) -> tuple[str, str]:
    sign, a, b = problem
    return WORDING.format(problem=f"{a} {sign} {b}"), str(OPERATIONS[sign](a, b))


@accept_any
def score(completion: str, answer: Any) -> float:
    """1.0 if the completion's last numeral (see `lagrpo.tasks.numbers`) names the reference number, else 0.0.

    Right for answer 7: "7", "7.0", "07", "7 apples", "3 + 4 = 7.". Wrong: "-7", "seven", "７", "3 + 4", "5 6 7",
    "6 or 7", "7, not 8". Raises UnscorableError if the answer is not an integer."""
    try:
        right = int(answer)
    except (TypeError, ValueError, OverflowError) as error:
        raise UnscorableError(f"the reference answer {answer!r:.80} is not an integer") from error
    return float(read_last_number(completion) == right)


def split(
    operations: tuple[str, ...], digits: int, seed: int
) -> tuple[list[Problem], list[Problem]]:
    """The training and the test problems, in an order that the seed chooses."""
    from lagrpo.rng import permutation

    operations, numbers = tuple(dict.fromkeys(operations)), 10**digits
    test_size = min(_TEST, len(operations) * numbers**2 // 5)
    train, test = list[Problem](), list[Problem]()
    for operation, a, b in _sample_problems(operations, numbers, seed):
        both = [(operation, a, b)] if a == b else [(operation, a, b), (operation, b, a)]
        (test if len(test) + len(both) <= test_size else train).extend(both)
    orders = [
        permutation(len(p), seed, "arithmetic", "order", name)
        for p, name in ((train, "train"), (test, "test"))
    ]
    return [train[n] for n in orders[0][:_TRAIN]], [test[n] for n in orders[1]]


def _sample_problems(operations: tuple[str, ...], numbers: int, seed: int) -> list[Problem]:
    """Distinct problems with a <= b in random order: all if they are few, else as many as needed."""
    from lagrpo.rng import permutation, uniforms

    space = len(operations) * numbers**2
    if space <= _FEW:
        codes = permutation(space, seed, "arithmetic", "problems").tolist()
    else:
        codes = dict.fromkeys(
            (uniforms(_TRAIN + _TEST, seed, "arithmetic", "problems") * space).astype(int).tolist()
        )
    problems = (
        (operations[code // numbers**2], code // numbers % numbers, code % numbers)
        for code in codes
    )
    return list(dict.fromkeys((operation, min(a, b), max(a, b)) for operation, a, b in problems))
