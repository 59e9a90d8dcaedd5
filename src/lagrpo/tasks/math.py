r"""Task `math`: competition problems, scored by mathematical equality (math-verify).

Data: a directory of .jsonl files with columns problem and answer, as DeepScaleR, MATH-500 and AIME have them, or
datasets of the hub; see `lagrpo.tasks.data`. Needs math-verify, which is imported at the top, so that worker processes
have it before the first deadline begins.
"""

from __future__ import annotations

import dataclasses
import functools
import logging
import re
from collections.abc import Mapping
from typing import Any

try:
    import math_verify
except ImportError as error:
    raise ImportError("math needs the package math-verify: pip install 'lagrpo[math]'") from error

from lagrpo.rewards.reward import UnscorableError, accept_any
from lagrpo.tasks import RowTask
from lagrpo.tasks.data import load_rows, plain, text_of
from lagrpo.tasks.numbers import find_last_box, find_reference, find_tagged, first_question

WORDING = "{problem}\n\nReason step by step and put the final answer in \\boxed{{}}."

_HUB = "agentica-org/DeepScaleR-Preview-Dataset"
_THIN_SPACES = re.compile(r",\\!\s*|\{,\}|\\!")
_PROSE = re.compile(r"\$|\\[(\[]|(?<![\\{A-Za-z])[A-Za-z]{2,} +[A-Za-z]{2,}")  # not a formula alone
_IMAGINARY = re.compile(r"(?<=[0-9])\s+(?=i\b)")

# The reading that drops units takes letters for units too (the t of \sin^2 t): the one that keeps all comes first.
_WITH_UNITS = math_verify.LatexExtractionConfig()
_NORMALIZATION = dataclasses.replace(_WITH_UNITS.normalization_config, units=False)
_READINGS = (dataclasses.replace(_WITH_UNITS, normalization_config=_NORMALIZATION), _WITH_UNITS)
_NUMBER = math_verify.ExprExtractionConfig()
_parse = functools.partial(math_verify.parse, fallback_mode="no_fallback", parsing_timeout=0)
logging.getLogger("math_verify").setLevel(logging.ERROR)  # it warns that its own deadlines are off


def load(
    seed: int,
    *,
    data: str | None = None,
    train_split: str = "deepscaler_part_math_train|train",
    test_split: str = "math500_test|test",
) -> RowTask:
    """The task. Raises ValueError for missing or unfit data."""
    rows = load_rows(data, train_split, test_split, hub=_HUB, ask=_ask)
    return RowTask("math", rows, _ask, score)


def _ask(row: Mapping[str, Any]) -> tuple[str, Any]:
    return WORDING.format(problem=text_of(row, "problem")), plain(row["answer"])


@accept_any
def score(completion: str, answer: Any) -> float:
    r"""1.0 if the completion's answer and the reference answer are mathematically equal, else 0.0.

    What the completion says to further questions that it makes up is left out (`lagrpo.tasks.numbers.first_question`).
    If it has <answer> ... </answer>, only the text within the last such tags counts. The answer is the content of the
    last closed \boxed{} (the inner one of nested boxes), else a formula that fills the tags, else what math-verify
    finds in the text: a formula in LaTeX delimiters or a number, the last after the word "answer" before the last of
    all.

    Equal means spelled the same except for spaces, or equal by math-verify: in value, numbers to six decimals, in any
    form that it can evaluate ("3^2" is 9), units and "%" left aside; sets without order, intervals with their ends. If
    the reference answer is no equation, an equation counts by its last side: "x = 5", "2 + 3 = 5" and "5 = 5" are 5.
    Whether it holds is not checked, because many write "10/3 = 3.33". tests/corpora/math_verify.jsonl has known
    weaknesses.

    The reference answer is what stands after its last "####", within its last tags or box, if it has any. The caller
    keeps the deadline: math-verify's own are off. Raises UnscorableError if the reference answer cannot be parsed."""
    right = ""
    if isinstance(answer, str | int | float):
        right = _clean(find_reference(str(answer)))
    if not right:
        raise UnscorableError(f"the reference answer {answer!r} is not a formula")
    text = first_question(completion)
    tagged = find_tagged(text)
    formula = find_last_box(tagged)
    if formula is None and tagged != text:
        formula = tagged
    if formula is not None and re.sub(r"\s", "", _clean(formula)) == re.sub(r"\s", "", right):
        return 1.0
    if formula is tagged and _PROSE.search(tagged):
        formula = None
    is_readable = False
    for reading in _READINGS:
        parsed = _parse_formula(right, reading)
        is_readable = is_readable or bool(parsed)
        if formula is not None:
            found = _parse_formula(_clean(formula), reading)
        else:  # the formula or number that counts in the text
            free = dataclasses.replace(reading, boxed_match_priority=-1)
            found = _parse(_THIN_SPACES.sub("", tagged), (free, _NUMBER))
        if parsed and math_verify.verify(parsed, found, timeout_seconds=None):
            return 1.0
    if not is_readable:
        raise UnscorableError(f"math-verify cannot parse the reference answer {answer!r}")
    return 0.0


@functools.lru_cache(maxsize=4096)
def _parse_formula(latex: str, reading: math_verify.LatexExtractionConfig) -> list[Any]:
    """Parse a formula that stands alone."""
    return _parse(f"\\boxed{{{latex}}}", (dataclasses.replace(reading, boxed_match_priority=0),))


def _clean(latex: str) -> str:
    r"""Remove what confuses math-verify: $ around the formula, a full stop or comma after it, the thin spaces of
    10,\!000 and 10{,}000, the space of "5 i"."""
    latex = _THIN_SPACES.sub("", latex)
    return _IMAGINARY.sub("", latex.strip().strip("$").strip().rstrip(".,;: \n"))
