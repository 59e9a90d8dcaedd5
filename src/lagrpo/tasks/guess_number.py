"""Task `guess_number`: find a number in several turns, told after each guess whether it is higher or lower.

The prompt is always the same; the number is the gold. The reward is 1 where it is found within environment.max_turns
guesses, else 0. Of the numbers a fifth is for testing.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from lagrpo.tasks.base import Address, Ask, Final, Turn, Unjudgeable, option
from lagrpo.tasks.reading import find_last_numeral, find_numerals, simplify
from lagrpo.types import Prompt

WORDING = "I think of a whole number from 1 to {largest}. Guess it. Answer with just the number."


@dataclass(frozen=True, slots=True)
class Options:
    """The options of this task."""

    largest: int = option(31, "the number is from 1 to this one", least=5, most=1_000_000)


def load(options: Options, seed: int) -> tuple[dict[str, list[int]], Ask]:
    """The numbers of each split, at most 10,000 and 1,000, and how one is asked."""
    from lagrpo.rng import permutation, uniforms

    if options.largest <= 11_000:
        numbers = permutation(options.largest, seed, "guess_number").tolist()
    else:
        drawn = (uniforms(11_000, seed, "guess_number") * options.largest).astype(int).tolist()
        numbers = list(dict.fromkeys(drawn))
    test = min(1_000, len(numbers) // 5)
    question = WORDING.format(largest=options.largest)
    splits = {"train": [n + 1 for n in numbers[test:]], "test": [n + 1 for n in numbers[:test]]}
    return splits, lambda number: (question, number)


def read_guess(text: str) -> int | None:
    """The whole number that a text names last; None where it names none."""
    text = simplify(text)
    last = find_last_numeral(text, find_numerals(text))
    return int(last.value) if last is not None and last.value is not None and last.value == int(last.value) else None


def judge(text: str, gold: Any) -> float:
    """Of a completion of one turn: 1.0 where its guess is right."""
    if not isinstance(gold, int):
        raise Unjudgeable(f"the gold answer {gold!r:.80} is no integer")
    return float(read_guess(text) == gold)


class GuessNumber:
    """One game."""

    def start(self, prompt: Prompt, address: Address) -> Turn:
        self.number, self.guesses = int(prompt.gold), 0
        return Turn(tuple(prompt.messages))

    def reply(self, text: str) -> Turn | Final:
        self.guesses += 1
        guess = read_guess(text)
        if guess == self.number:
            return Final(1.0, f"found with guess {self.guesses}")
        if guess is None:
            said = "That is no number. Answer with just a number."
        else:
            said = f"My number is {'higher' if guess < self.number else 'lower'} than {guess}."
        return Turn(({"role": "user", "content": said},))
