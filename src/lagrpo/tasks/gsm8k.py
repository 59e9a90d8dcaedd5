r"""Task `gsm8k`: grade-school word problems, scored by the final number.

The reward is the built-in reward "number". The data is a directory with gsm8k_train.jsonl and
gsm8k_test.jsonl (columns question and answer, the answer ending in "#### 72"), or "openai/gsm8k" of
the hub; see `lagrpo.tasks.data`.
"""

from __future__ import annotations

import math
import re
from dataclasses import dataclass, replace
from decimal import Decimal
from fractions import Fraction
from typing import Any

from lagrpo.rewards.reward import UnscorableError, accept_any
from lagrpo.rewards.texts import normal_form, read_answer, write_number
from lagrpo.tasks import RowTask
from lagrpo.tasks.columns import plain, text_of
from lagrpo.tasks.data import load_rows
from lagrpo.tasks.numbers import (
    Numeral,
    agree,
    find_last_box,
    find_numerals,
    find_reference,
    find_tagged,
    first_question,
    merge_fractions,
    read_number,
    simplify,
)
from lagrpo.types import JsonView

WORDING = "{question}\n\nReason step by step. End with #### and the final number."

# What may stand between a marker and its numeral.
_GAP = r"[\s$€£₹*(\[{\\:–−-]*"
_HASHES = re.compile(rf"####{_GAP}")
_ANSWER_IS = re.compile(rf"\banswer\b[ *_]*(?:is|:|=){_GAP}", re.IGNORECASE)
_SPACED_SIGN = re.compile(r"^\s*([-–−])\s+")  # of "- 5"
_SENTENCE_END = re.compile(r"\n|[.!?](?=\s|$)")


def load(
    seed: int,
    *,
    data: str | None = None,
    train_split: str = "gsm8k_train|train",
    test_split: str = "gsm8k_test|test",
) -> RowTask:
    """Returns the task. Raises ValueError for missing or unfit data."""
    rows = load_rows(data, train_split, test_split, hub="openai/gsm8k:main", ask=_ask)
    return RowTask("gsm8k", rows, _ask, score)


def _ask(row: JsonView) -> tuple[str, str]:
    answer = plain(row["answer"])
    if isinstance(answer, float):
        answer = write_number(answer)
    answer = str(answer).rpartition("####")[2].strip()
    return WORDING.format(question=text_of(row, "question")), answer


@accept_any
def score(completion: str, answer: Any, prefix: str = "") -> float:
    r"""Returns 1.0 if the number that counts in the completion is the reference number, else 0.0.

    The thoughts of the model before </think> do not count, and neither do more questions that it
    makes up and their answers (`lagrpo.tasks.numbers.first_question`). If the completion has
    <answer> ... </answer>, only the text within the last such tags counts. The first of these that
    the remaining text has is the number:

    1. the last closed \boxed{} (the inner one of nested boxes): the first number in it;
    2. the last "####" that a numeral follows directly (except for spaces, signs and * ( [ { \ :):
       the number there;
    3. the last "answer is", "answer:" or "answer =" that a numeral follows so: the number there;
    4. else the last number.

    `lagrpo.tasks.numbers` says what a number is. An expression counts by the number after its "="
    ("3 * 20 = 60"). Integers are compared exactly. If the reference number is not an integer, "a/b"
    and \frac{a}{b} are numbers, and a decimal of at least 4 significant digits stands for the
    numbers that round to it: 0.8889, but not 0.889, is 8/9.

    `answer` is a number, or a text with exactly one (after its last "####", or within its last tags
    or box, if it has any). Raises UnscorableError for any other answer.
    """
    reference = _read_answer(answer)
    is_integer = reference.value is not None and reference.value.denominator == 1
    answer_text = first_question(read_answer(completion, prefix))
    part = _find_counting_part(find_tagged(answer_text))
    number = read_number(part.text, first=part.has_number_first, fractions=not is_integer)
    if is_integer:
        return float(number is not None and number.value == reference.value)
    return float(agree(number, reference))


@dataclass(frozen=True, slots=True)
class CountingPart:
    """The part of a completion that counts, in plain text."""

    text: str
    has_number_first: bool  # its first number counts, else its last


def _find_counting_part(text: str) -> CountingPart:
    box = find_last_box(text)
    if box is not None:
        return CountingPart(_SPACED_SIGN.sub(r"\1", simplify(box)), has_number_first=True)
    text = simplify(text)
    numeral_starts = {numeral.start for numeral in find_numerals(text)}
    for pattern in (_HASHES, _ANSWER_IS):
        for marker in reversed(list(pattern.finditer(text))):
            if marker.end() not in numeral_starts:
                continue
            # The part ends with the sentence of the numeral.
            sentence_end = _SENTENCE_END.search(text, marker.end())
            end = sentence_end.start() if sentence_end is not None else len(text)
            return CountingPart(simplify(text[marker.start() : end]), has_number_first=True)
    return CountingPart(text, has_number_first=False)


def _read_answer(answer: Any) -> Numeral:
    """Returns the reference number. Raises UnscorableError if `answer` is not one number."""
    if isinstance(answer, int) and not isinstance(answer, bool):
        return Numeral(Fraction(answer), 0, 0)
    if isinstance(answer, float) and math.isfinite(answer):
        if answer == int(answer):
            return Numeral(Fraction(int(answer)), 0, 0)
        written = Decimal(f"{answer:.15g}")  # a 16th digit may be off: 0.1 + 0.2 is 0.3
        (number,) = find_numerals(format(abs(written), "f"))
        # A short decimal, such as 0.75, counts as rounded to 15 significant digits.
        places = number.places or max(0, 14 - written.adjusted())
        return replace(number, value=Fraction(written), places=places)
    if isinstance(answer, str):
        text = simplify(find_reference(normal_form(answer)))
        numerals = merge_fractions(text, find_numerals(text))
        if len(numerals) == 1 and numerals[0].value is not None:
            return numerals[0]
    raise UnscorableError(f"the reference answer {answer!r} is not one number")
