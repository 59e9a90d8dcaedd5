"""Task `guess_number`: find a number in several turns; after each guess the environment says "higher" or "lower".

The reward is 1 if the number is found within task.max_turns guesses. A fifth of the numbers is for testing.
"""

from __future__ import annotations

from lagrpo.tasks import Key, Messages, RowTask, StepResult
from lagrpo.tasks.arithmetic import score
from lagrpo.tasks.numbers import read_last_number
from lagrpo.types import Prompt

WORDING = "I think of a whole number from 1 to {largest}. Guess it. Answer with just the number."


def load(seed: int, *, largest: int = 31) -> RowTask:
    """The task with the numbers up to `largest` in an order that the seed chooses."""
    from lagrpo.rng import permutation

    numbers = [n + 1 for n in permutation(largest, seed, "guess_number").tolist()]
    test = min(1_000, len(numbers) // 5)
    splits, question = (
        {"train": numbers[test:], "test": numbers[:test]},
        WORDING.format(largest=largest),
    )
    return RowTask(
        "guess_number", splits, lambda number: (question, number), score, environment=GuessNumber
    )


def read_guess(text: str) -> int | None:
    """The whole number that a text names last; None if it names none."""
    number = read_last_number(text)
    return int(number) if number is not None and number.denominator == 1 else None


class GuessNumber:
    """One game."""

    def reset(self, prompt: Prompt, key: Key) -> Messages:
        self.number, self.guesses = int(prompt.answer), 0
        return prompt.messages

    def step(self, text: str) -> StepResult:
        self.guesses += 1
        guess = read_guess(text)
        if guess == self.number:
            return StepResult(reward=1.0, done=True, reason=f"found with guess {self.guesses}")
        if guess is None:
            said = "That is no number. Answer with just a number."
        else:
            said = f"My number is {'higher' if guess < self.number else 'lower'} than {guess}."
        return StepResult([{"role": "user", "content": said}])
