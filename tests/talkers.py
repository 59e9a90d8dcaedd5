"""Environments for tests, in a module of their own: worker processes import it."""

from __future__ import annotations

import os
import threading
import time
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import sample_task

from lagrpo.rng import uniforms
from lagrpo.tasks import Key, Make, Messages, RowTask, StepResult
from lagrpo.types import Prompt

if TYPE_CHECKING:
    from lagrpo.settings.sections import TaskSettings


class Counting:
    """Says how many turns there were and a random number of its key; ends after the third turn."""

    last = 3

    def reset(self, prompt: Prompt, key: Key) -> Messages:
        self.seen, self.key = 0, key
        return prompt.messages

    def step(self, text: str) -> StepResult:
        self.seen += 1
        number = int(uniforms(self.seen, *self.key)[-1] * 100)
        if self.seen == self.last:
            return StepResult(
                reward=(len(text) % 5) / 5, done=True, reason=f"after {self.seen} turns"
            )
        return StepResult(
            [{"role": "user", "content": f"{self.seen}/{number}"}], reward=0.1 * self.seen
        )


class Prefixed(Counting):
    """Replies with the beginning of the policy's turn."""

    def step(self, text: str, prefix: str = "") -> StepResult:
        result = super().step(text)
        return result if result.done else StepResult([{"role": "user", "content": prefix or "-"}])


class Endless(Counting):
    last = 10**6


@dataclass
class Saying(Counting):
    """Always says the same."""

    reply: str = "x" * 30

    def step(self, text: str) -> StepResult:
        return StepResult([{"role": "user", "content": self.reply}])


class Wordy(Counting):
    """Raises, interrupts, hangs, exits or gives a bad reward, as the policy's turn says."""

    def step(self, text: str) -> StepResult:
        if text == "raise":
            raise RuntimeError("broken")
        if text == "interrupt":
            raise KeyboardInterrupt
        if text == "hang":
            time.sleep(60)
        if text == "exit":
            os._exit(3)
        if text == "open":
            self.lock = threading.Lock()
        return StepResult(reward=float("nan")) if text == "nan" else super().step(text)


class Parts(Counting):
    """Replies in parts, as MCP servers do."""

    def step(self, text: str) -> StepResult:
        parts = [{"type": "text", "text": "5"}, {"type": "text", "text": "!"}]
        return StepResult([{"role": "tool", "content": parts, "name": None}])


class Broken(Counting):
    def reset(self, prompt: Prompt, key: Key) -> Messages:
        raise RuntimeError("no game today")


def same(completion: str, answer: str) -> float:
    return float(completion == answer)


def load(settings: TaskSettings, seed: int) -> RowTask:
    """The prompts of sample_task with the environment of this name in task.options, Counting by
    default."""
    make = globals()[settings.options.get("make", "Counting")]
    return RowTask(
        "talking", sample_task.load().rows, lambda row: (row, row), same, environment=make
    )


def add(x: int, y: int) -> int:
    """Add two numbers.

    Args:
        x: The first.
        y: The second.
    """
    return x + y


def divide(x: float, y: float) -> float:
    """Divide.

    Args:
        x: The dividend.
        y: The divisor.
    """
    return x / y


def undescribed(x):
    return x


def broken(x: int) -> int:
    """Fail."""
    raise OSError("the network is down")


@dataclass
class Here:
    """Replaces worker processes: environments in this process, whose replies come `late` looks
    later."""

    make: Make
    late: int = 0
    jobs: list[Job] = field(default_factory=list)

    def submit(self, call: object, *arguments: Any, deadline: float) -> Job:
        from lagrpo.tasks.environments import run_turn

        self.jobs.append(Job(run_turn(self.make, *arguments), self.late))
        return self.jobs[-1]

    def result(self, job: Job) -> object:
        return job.reply


@dataclass
class Job:
    reply: object
    looks: int
    cancelled: bool = False

    @property
    def future(self) -> Job:
        return self

    def done(self) -> bool:
        self.looks -= 1
        return self.looks < 0

    def cancel(self) -> None:
        self.cancelled = True


class Countdown:
    """In the style of Gymnasium: counts down from 3 or 4 by its seed, and pays half for each step
    that says so."""

    def reset(self, seed: int | None = None) -> tuple[str, dict[str, object]]:
        self.left = 3 + (seed or 0) % 2
        return f"{self.left} to go", {}

    def step(self, text: str) -> tuple[str, float, bool, bool, dict[str, object]]:
        self.left -= 1
        return (
            "step",
            0.5 * ("go" in text),
            self.left == 0,
            text == "stop",
            {"suffix": f"{self.left} to go"},
        )
