r"""Task `math`: competition problems, judged by mathematical equality (math-verify).

Data: a directory of .jsonl files with columns problem and answer, as DeepScaleR, MATH-500 and AIME have them. The
settings `train_split` and `test_split` name files without their ending ("deepscaler_part_aime_train", "aime24_test");
their defaults mean deepscaler_part_math_train and math500_test. Or datasets of the hub; see `lagrpo.tasks.files`.

Needs math-verify: pip install 'lagrpo[math]'. Its import stands at the top, so that worker processes have it before the
first deadline runs; only this task and the reward "math" import this module.
"""

from __future__ import annotations

import dataclasses
import functools
import logging
import re
from collections.abc import Mapping
from typing import Any

import math_verify

from lagrpo.tasks.base import Ask, Unjudgeable
from lagrpo.tasks.files import DataOptions, Rows, load_rows
from lagrpo.tasks.reading import find_last_box

WORDING = "{problem}\n\nReason step by step and put the final answer in \\boxed{{}}."

_HUB = "agentica-org/DeepScaleR-Preview-Dataset"
_DEFAULTS = {"train": "deepscaler_part_math_train", "test": "math500_test"}
_THIN_SPACES = re.compile(r",\\!\s*|\{,\}|\\!")
_IMAGINARY = re.compile(r"(?<=[0-9])\s+(?=i\b)")

# The reading that drops units takes letters for units too (the t of \sin^2 t): the one that keeps all comes first.
_WITH_UNITS = math_verify.LatexExtractionConfig()
_NORMALIZATION = dataclasses.replace(_WITH_UNITS.normalization_config, units=False)
_READINGS = (dataclasses.replace(_WITH_UNITS, normalization_config=_NORMALIZATION), _WITH_UNITS)
_NUMBER = math_verify.ExprExtractionConfig()
_parse = functools.partial(math_verify.parse, fallback_mode="no_fallback", parsing_timeout=0)
logging.getLogger("math_verify").setLevel(logging.ERROR)  # it warns that its own deadlines are off


def load(options: DataOptions, seed: int) -> tuple[dict[str, Rows], Ask]:
    """The rows of each split, and how one is asked. Raises ValueError for missing or unfit data."""
    return load_rows(options, _file_names, _HUB, "problem", "answer"), _ask


def judge(text: str, gold: Any) -> float:
    r"""1.0 where the answer and the gold answer are mathematically equal, else 0.0.

    The answer is what the last closed \boxed{} holds (the inner one of nested boxes). Without one it is what
    math-verify finds in the text: a formula in LaTeX delimiters or a number, the last after the word "answer" before
    the last of all.

    Equal means spelled the same but for spaces, or equal by math-verify: in value, numbers to six decimals, in whatever
    form it can evaluate ("3^2" is 9, "0.5" is \frac{1}{2}, an equation "x = 5" is 5), units and "%" left aside; sets
    without order, intervals with their ends. So an answer that only restates the question in mathematics is equal to
    the gold answer: a known weakness of judging by value. math-verify also takes for equal any two equations without
    real solutions, any two equations between numbers, and pairs of fractions whatever stands behind them:
    tests/corpora/math_verify.jsonl has examples. Of 519 answers of MATH, DeepScaleR and AIME that are equations, lists
    or pairs, 33 were judged right with "+1" behind them, 32 of them pairs or triples of fractions.

    Expressions can take for ever to evaluate (9^{9^{9^9}}): the caller keeps the deadline. math-verify's own, which
    rest on signal.alarm, are off. Raises Unjudgeable where the gold answer cannot be parsed and is spelled otherwise.
    """
    if not isinstance(gold, str | int | float) or gold == "":
        raise Unjudgeable(f"the gold answer {gold!r} is no formula")
    right = _clean(str(gold))
    box = find_last_box(text)
    if box is not None and re.sub(r"\s", "", _clean(box)) == re.sub(r"\s", "", right):
        return 1.0
    readable = False
    for reading in _READINGS:
        parsed_gold = _parse_gold(right, reading)
        readable = readable or bool(parsed_gold)
        answer = _parse_formula(_clean(box), reading) if box is not None else _find(text, reading)
        if parsed_gold and math_verify.verify(parsed_gold, answer, timeout_seconds=None):
            return 1.0
    if not readable:
        raise Unjudgeable(f"math-verify cannot parse the gold answer {gold!r}")
    return 0.0


def _parse_formula(latex: str, reading: math_verify.LatexExtractionConfig) -> list[Any]:
    """Parse a formula that stands alone."""
    return _parse(f"\\boxed{{{latex}}}", (dataclasses.replace(reading, boxed_match_priority=0),))


def _find(text: str, reading: math_verify.LatexExtractionConfig) -> list[Any]:
    """Parse the formula or number that counts in a text without a box."""
    return _parse(_THIN_SPACES.sub("", text), (dataclasses.replace(reading, boxed_match_priority=-1), _NUMBER))


@functools.lru_cache(maxsize=4096)
def _parse_gold(gold: str, reading: math_verify.LatexExtractionConfig) -> list[Any]:
    return _parse_formula(gold, reading)


def _clean(latex: str) -> str:
    r"""Remove what math-verify stumbles over: $ around the formula, a full stop or comma after it, the thin spaces of
    10,\!000 and 10{,}000, the space of "5 i"."""
    latex = _THIN_SPACES.sub("", latex)
    return _IMAGINARY.sub("", latex.strip().strip("$").strip().rstrip(".,;: \n"))


def _file_names(split: str) -> tuple[str, ...]:
    return tuple(dict.fromkeys(f"{name}.jsonl" for name in (_DEFAULTS.get(split, split), split)))


def _ask(row: Mapping[str, Any]) -> tuple[str, str]:
    return WORDING.format(problem=row["problem"]), str(row["answer"])
