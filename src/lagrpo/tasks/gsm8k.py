r"""Task `gsm8k`: grade-school word problems, judged by the final number.

Data: a directory with gsm8k_train.jsonl and gsm8k_test.jsonl (columns question and answer, the answer ending in
"#### 72"), or "openai/gsm8k" of the hub; see `lagrpo.tasks.files`.

The judge is the built-in reward "number".
"""

from __future__ import annotations

import math
import re
from collections.abc import Mapping
from dataclasses import replace
from decimal import Decimal
from fractions import Fraction
from typing import Any

from lagrpo.tasks.base import Ask, Unjudgeable
from lagrpo.tasks.files import DataOptions, Rows, load_rows
from lagrpo.tasks.reading import (
    Numeral,
    agree,
    are_joined,
    find_first_numeral,
    find_last_box,
    find_last_numeral,
    find_numerals,
    merge_fractions,
    simplify,
)

WORDING = "{question}\n\nReason step by step. End with #### and the final number."

_HUB = "openai/gsm8k:main"
_GAP = r"[\s$€£₹*(\[{\\:–−-]*"
_HASHES = re.compile(rf"####{_GAP}")
_ANSWER_IS = re.compile(rf"\banswer\b[ *_]*(?:is|:|=){_GAP}", re.IGNORECASE)
_RATIO = re.compile(r"(?<![\w:.,])([0-9]{1,9})(?: ?: ?| to )([0-9]{1,9})(?![\w:]|[.,][0-9]| ?:)")
_SENTENCE_END = re.compile(r"\n|[.!?](?=\s|$)")


def load(options: DataOptions, seed: int) -> tuple[dict[str, Rows], Ask]:
    """The rows of each split, and how one is asked. Raises ValueError for missing or unfit data."""
    rows = load_rows(options, lambda split: (f"gsm8k_{split}.jsonl", f"{split}.jsonl"), _HUB, "question", "answer")
    return rows, _ask


def judge(text: str, gold: Any) -> float:
    r"""1.0 where the number that counts in the answer equals the gold number, else 0.0.

    The first of these that the answer has is the number that counts:

    1. the last closed \boxed{} (the inner one of nested boxes): the first number in it;
    2. the last "####" that a numeral follows directly (except for spaces, signs and * ( [ { \ :): the number there;
    3. the last "answer is", "answer:" or "answer =" that a numeral follows so: the number there;
    4. else the last number of the answer.

    The head of `lagrpo.tasks.reading` defines numbers: $ and other units, "%", commas, LaTeX and a full
    stop play no part, an expression counts by what stands after its "=" ("3 * 20 = 60"), and a numeral in a list or in
    an expression without "=" names no number. Only where the gold number is no integer, "a/b" and \frac{a}{b} are read
    as a number. No number: 0.0.

    Integers are compared exactly. Where the gold number is no integer, a decimal of at least 4 significant digits
    stands for the numbers that round to it, in the answer as in `gold`: 0.888889 and 0.8889, but not 0.889, are
    0.8888888889 and 8/9.

    `gold` is a number, or a text that holds exactly one (of which only what follows the last "####" is looked at, if
    it has one), or a ratio "3:4". A ratio counts where the number would, as "3:4" or "3 to 4", with these very terms;
    one with a minus sign, or in a list or an expression ("2 * 3:4"), is none. Of a float the first 15 digits count.
    Unjudgeable is raised for any other gold, number words and ratios of three among them (the reward "exact" compares
    words).
    """
    if ratio := _read_ratio(gold):
        return float(_find_ratio(text) == ratio)
    right = _read_gold(gold)
    if right.value is not None and right.value.denominator == 1:
        found = _find(text, fractions=False)
        return float(found is not None and found.value == right.value)
    return float(agree(_find(text, fractions=True), right))


def _find(text: str, fractions: bool) -> Numeral | None:
    """The number that counts in an answer by the rule of `judge`; None without one."""
    part, first = _find_counting_part(text)
    found = find_numerals(part)
    if fractions:
        found = merge_fractions(part, found)
    return find_first_numeral(part, found) if first else find_last_numeral(part, found)


def _find_ratio(text: str) -> tuple[int, int] | None:
    """The ratio that counts in an answer: its first term is the first numeral of the part that counts, and no other
    ratio is there, or its second term is the last. None where a term has a minus sign, or is joined to a further
    numeral."""
    part, first = _find_counting_part(text)
    found, ratios = find_numerals(part), list(_RATIO.finditer(part))
    if not ratios or (first and len(ratios) > 1):
        return None
    terms = ratios[-1]
    at = next(n for n, numeral in enumerate(found) if numeral.start == terms.start(1))
    if at != (0 if first else len(found) - 2):
        return None
    beside = [*([(at - 1, at)] if at else []), *([(at + 1, at + 2)] if at + 2 < len(found) else [])]
    if any(are_joined(part, found[left], found[right]) for left, right in beside):
        return None
    signed = any(numeral.value is None or numeral.value < 0 for numeral in found[at : at + 2])
    return None if signed else (int(terms[1]), int(terms[2]))


def _find_counting_part(text: str) -> tuple[str, bool]:
    """The part of an answer that counts, in plain text, and whether its first number does (else its last)."""
    box = find_last_box(text)
    if box is not None:
        return simplify(box), True
    text = simplify(text)
    starts = {numeral.start for numeral in find_numerals(text)}
    for pattern in (_HASHES, _ANSWER_IS):
        for marker in reversed(list(pattern.finditer(text))):
            if marker.end() in starts:
                return simplify(_cut_sentence(text, marker.start(), marker.end())), True
    return text, False


def _read_gold(gold: Any) -> Numeral:
    """The gold number. Raises Unjudgeable where `gold` is not one number."""
    if isinstance(gold, int) and not isinstance(gold, bool):
        return Numeral(Fraction(gold), 0, 0)
    if isinstance(gold, float) and math.isfinite(gold):
        if gold == int(gold):
            return Numeral(Fraction(int(gold)), 0, 0)
        written = Decimal(f"{gold:.15g}")  # a 16th digit may be off: 0.1 + 0.2 is 0.3
        (number,) = find_numerals(format(abs(written), "f"))
        return replace(number, value=Fraction(written), places=number.places or max(0, 14 - written.adjusted()))
    if isinstance(gold, str):
        text = simplify(gold.rpartition("####")[2])
        found = merge_fractions(text, find_numerals(text))
        if len(found) == 1 and found[0].value is not None:
            return found[0]
    raise Unjudgeable(f"the gold answer {gold!r} is not one number")


def _read_ratio(gold: Any) -> tuple[int, int] | None:
    found = _RATIO.fullmatch(gold.rpartition("####")[2].strip()) if isinstance(gold, str) else None
    return (int(found[1]), int(found[2])) if found and ":" in found[0] else None


def _cut_sentence(text: str, start: int, numeral: int) -> str:
    """From a marker at `start` to the end of the sentence that the numeral after it stands in."""
    end = _SENTENCE_END.search(text, numeral)
    return text[start : end.start() if end else None]


def _ask(row: Mapping[str, Any]) -> tuple[str, str]:
    return WORDING.format(question=row["question"]), str(row["answer"]).rpartition("####")[2].strip()
