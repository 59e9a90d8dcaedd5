"""Task `guess_number`: find a number in several turns.

After each guess the environment says "higher" or "lower". The reward is 1 if the number is found
within task.max_turns guesses. A fifth of the numbers is for testing.
"""

from __future__ import annotations

from lagrpo.rewards.texts import read_answer
from lagrpo.tasks import Key, Messages, RowTask, StepResult
from lagrpo.tasks.arithmetic import score
from lagrpo.tasks.numbers import read_last_number
from lagrpo.types import Prompt

WORDING = "I think of a whole number from 1 to {largest}. Guess it. Answer with just the number."
MAX_TEST = 1_000


def load(seed: int, *, largest: int = 31) -> RowTask:
    """Returns the task with the numbers up to `largest` in an order that the seed chooses."""
    from lagrpo.rng import permutation

    numbers = [n + 1 for n in permutation(largest, seed, "guess_number").tolist()]
    num_test = min(MAX_TEST, len(numbers) // 5)
    splits = {"train": numbers[num_test:], "test": numbers[:num_test]}
    question = WORDING.format(largest=largest)
    return RowTask(
        "guess_number", splits, lambda number: (question, number), score, environment=GuessNumber
    )


def read_guess(text: str) -> int | None:
    """Returns the whole number that a text names last; None if it names none."""
    number = read_last_number(text)
    if number is None or number.denominator != 1:
        return None
    return int(number)


class GuessNumber:
    """One game."""

    def reset(self, prompt: Prompt, key: Key) -> Messages:
        self.number = int(prompt.answer)
        self.guesses = 0
        return prompt.messages

    def step(self, text: str, prefix: str = "") -> StepResult:
        self.guesses += 1
        guess = read_guess(read_answer(text, prefix))
        if guess == self.number:
            return StepResult(reward=1.0, done=True, reason=f"found with guess {self.guesses}")
        if guess is None:
            reply = "That is no number. Answer with just a number."
        else:
            direction = "higher" if guess < self.number else "lower"
            reply = f"My number is {direction} than {guess}."
        return StepResult([{"role": "user", "content": reply}])
