"""Reward functions for tests, in a light module: worker processes import it."""

from __future__ import annotations

import asyncio
import ctypes
import math
import os
import sys
import time
from typing import Any

from lagrpo.rewards.reward import OURS, PASSED, UnscorableError


def act(completion: str, answer: object) -> object:
    """Does what the completion says; scores any other text by equality."""
    action, _, argument = completion.partition(" ")
    actions = {
        "raise": lambda: fail(ValueError(argument)),
        "unscorable": lambda: fail(UnscorableError(argument)),
        "exit": lambda: os._exit(int(argument)),
        "segfault": lambda: ctypes.string_at(0),
        "sleep": lambda: (time.sleep(float(argument)), 1.0)[1],
        "hang": lambda: time.sleep(1e6),
        "spin": lambda: 7 ** (7**9),  # one instruction of the interpreter: no signal handler runs
        "fill": lambda: float(len(bytearray(int(argument) << 20))),
        "nan": lambda: math.nan,
        "nothing": lambda: None,
        "run": lambda: run(argument),
        "modules": lambda: sum(
            module in sys.modules for module in ("torch", "transformers", "datasets", "sympy")
        ),
    }
    return actions[action]() if action in actions else float(completion == answer)


def fail(error: Exception) -> None:
    raise error


def run(code: str) -> float:
    """Executes code that a policy has written."""
    exec(code, {"os": os})
    return 1.0


async def run_awaited(completion: str) -> float:
    return run(completion)


def run_together(completions: list[str], **columns: object) -> list[float]:
    return [run(completion) for completion in completions]


def constant(completion: str, answer: object) -> float:
    return 0.5


def correct(completion: str, answer: str) -> float:
    return float(answer in completion)


def short(prompts: list[object], completions: list[str], **columns: object) -> list[float]:
    return [1.0 / (1 + len(completion)) for completion in completions]


def letters(completion: str, answer: object) -> float:
    return sum(c.islower() for c in completion) / 8


def ranked(completions: list[str | list[dict[str, str]]], **columns: object) -> list[float]:
    """Rank of each text in its group by length, which no text determines alone."""
    texts = [c if isinstance(c, str) else c[0]["content"] for c in completions]
    order = sorted(len(text) for text in texts)
    return [order.index(len(text)) / len(texts) for text in texts]


def by_level(
    prompts: list[object], completions: list[str], level: list[int], answer: list[object]
) -> list[float | None]:
    """In TRL's signature, with a column of the data; easy prompts are not its concern."""
    return [
        None if n < 2 else float(c == a) for n, c, a in zip(level, completions, answer, strict=True)
    ]


def one_short(prompts: list[object], completions: list[object]) -> list[float]:
    return [0.0] * (len(completions) - 1)


def compute_score(
    data_source: str, solution_str: str, ground_truth: object, extra_info: Any = None
) -> dict[str, float]:
    """In verl's signature."""
    return {"score": float(solution_str == ground_truth) + extra_info["level"], "other": 1.0}


async def awaited(completion: str, answer: object) -> float:
    """Waits as many tenths of a second as the text says, without holding up the others."""
    if completion == "fail":
        raise ConnectionError("refused")
    await asyncio.sleep(float(completion) / 10)
    return 1.0


async def awaited_together(
    prompts: list[object], completions: list[str], answer: list[object]
) -> list[float]:
    await asyncio.sleep(0.01)
    return [float(text == a) for text, a in zip(completions, answer, strict=True)]


made: list[str] = []
"""The classes below of which an object was made."""


class Program:
    """Acts when it is made, and cannot be called, as subprocess.Popen."""

    def __init__(self) -> None:
        made.append(type(self).__name__)


class Called(Program):
    def __call__(self, *args: object) -> float:
        return 1.0


class Renamed(Program):
    def __call__(self, text: str, expected: object) -> float:
        return 1.0


class Scaled:
    def __init__(self, scale: float) -> None:
        self.scale = scale

    def __call__(self, completion: str, answer: object) -> float:
        return self.scale * len(completion)


class Derived(Scaled):
    pass


def _weigh(completion: str, answer: str, w: float = 0.0) -> float:
    return w


def mood(completion: str, answer: str, *, scale: float = 1.0) -> float:
    return -scale


# With environments


def never(completion: str, answer: str) -> float:
    raise AssertionError("the environment gives this reward")


def is_five(completion: str, answer: str) -> float:
    return float(completion == "5")


class Everything:
    """In our signature, with every argument by keyword only: 1 if all are right."""

    def __call__(self, *, completion, answer, prompt=None, row=None, finished=None, num_tokens=0):
        values = (completion, answer, prompt, row, finished, num_tokens)
        return float(values == ("5", "5", [{"role": "user", "content": "?"}], {"n": 2}, True, 3))

    async def wait(self, completion: str, **arguments: object) -> float:
        return float(set(arguments) == set(PASSED[OURS]) - {"completion"})


def with_verl(data_source: str, solution_str: str, ground_truth: str, extra_info: Any) -> float:
    return float((solution_str, ground_truth, extra_info) == ("5", "5", {"n": 2}))


def with_trl(prompts: list[Any], completions: list[Any], n: list[int], **columns: Any) -> Any:
    assert n == [2] * len(completions)
    return [float(messages[0]["content"] == "5") for messages in completions]
