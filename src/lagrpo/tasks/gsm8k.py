r"""Task `gsm8k`: grade-school word problems, judged by the final number.

Data: a directory with gsm8k_train.jsonl and gsm8k_test.jsonl (columns question and answer, the answer ending in
"#### 72"), or "openai/gsm8k" of the hub; see `lagrpo.tasks.files`.

The judge is the built-in reward "number".
"""

from __future__ import annotations

import math
import re
from collections.abc import Mapping
from fractions import Fraction
from typing import Any

from lagrpo.tasks.base import RowTask, TaskSettings, Unjudgeable
from lagrpo.tasks.reading import first_number, last_box, last_number, numerals, plain, with_fractions

WORDING = "{question}\n\nReason step by step. End with #### and the final number."

_HUB = "openai/gsm8k:main"
_GAP = r"[\s$€£₹*(\[{\\:–−-]*"
_HASHES = re.compile(rf"####{_GAP}")
_ANSWER_IS = re.compile(rf"\banswer\b[ *_]*(?:is|:|=){_GAP}", re.IGNORECASE)
_SENTENCE_END = re.compile(r"\n|[.!?](?=\s|$)")


def load(settings: TaskSettings, seed: int) -> RowTask:
    """The task for these settings. Raises ValueError where the data is missing or not as it should be."""
    from lagrpo.tasks import load_judge
    from lagrpo.tasks.files import task_rows

    rows = task_rows(settings, lambda split: (f"gsm8k_{split}.jsonl", f"{split}.jsonl"), _HUB, "question", "answer")
    return RowTask("gsm8k", rows, _ask, load_judge(settings.reward, judge), settings.system_prompt)


def judge(text: str, gold: Any) -> float:
    r"""1.0 where the number that counts in the answer equals the gold number, else 0.0.

    Which number counts: that of the first of these that is there,

    1. the last closed \boxed{} (the inner one of nested boxes): the first number in it;
    2. the last "####" that a numeral follows directly (but for spaces, signs and * ( [ { \ :): the number there;
    3. the last "answer is", "answer:" or "answer =" that a numeral follows so: the number there;
    4. else the last number of the answer.

    What a number is, is stated at the head of `lagrpo.tasks.reading`: $ and other units, "%", commas, LaTeX and a full
    stop play no part, an expression counts by what stands after its "=" ("3 * 20 = 60"), and a numeral in a list or in
    an expression without "=" names no number. Only where the gold number is no integer, "a/b" and \frac{a}{b} are read
    as a number. No number: 0.0. Values are compared exactly.

    `gold` is a number, or a text that holds exactly one (of which only what follows the last "####" is looked at, if
    it has one); Unjudgeable is raised for any other.
    """
    right = read_gold(gold)
    return float(find_number(text, fractions=right.denominator != 1) == right)


def find_number(text: str, fractions: bool = False) -> Fraction | None:
    """The number that counts in an answer, by the rule of `judge`; None without one."""
    box = last_box(text)
    if box is not None:
        return _read(first_number, box, fractions)
    text = plain(text)
    starts = {numeral.start for numeral in numerals(text)}
    for pattern in (_HASHES, _ANSWER_IS):
        for marker in reversed(list(pattern.finditer(text))):
            if marker.end() in starts:
                return _read(first_number, _sentence(text, marker.start(), marker.end()), fractions)
    return _read(last_number, text, fractions)


def read_gold(gold: Any) -> Fraction:
    """The gold number. Raises Unjudgeable where `gold` is not one number."""
    if isinstance(gold, int | float) and not isinstance(gold, bool) and math.isfinite(gold):
        return Fraction(str(gold))
    if isinstance(gold, str):
        text = plain(gold.rpartition("####")[2])
        found = with_fractions(text, numerals(text))
        if len(found) == 1 and found[0].value is not None:
            return found[0].value
    raise Unjudgeable(f"the gold answer {gold!r} is not one number")


def _read(which: Any, text: str, fractions: bool) -> Fraction | None:
    text = plain(text)
    found = numerals(text)
    return which(text, with_fractions(text, found) if fractions else found)


def _sentence(text: str, start: int, numeral: int) -> str:
    """From a marker at `start` to the end of the sentence that the numeral after it stands in."""
    end = _SENTENCE_END.search(text, numeral)
    return text[start : end.start() if end else None]


def _ask(row: Mapping[str, Any]) -> tuple[str, str]:
    return WORDING.format(question=row["question"]), str(row["answer"]).rpartition("####")[2].strip()
