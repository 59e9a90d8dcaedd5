r"""Task `math`: competition problems, scored by mathematical equality (math-verify).

The data is a directory of .jsonl files with columns problem and answer, as DeepScaleR, MATH-500 and
AIME have them, or datasets of the hub; see `lagrpo.tasks.data`. The task needs math-verify. It is
imported at the top, so that worker processes have it before the first deadline begins.
"""

from __future__ import annotations

import dataclasses
import functools
import logging
import re
from decimal import Decimal
from math import isfinite
from typing import Any

try:
    import math_verify
except ImportError as error:
    raise ImportError("math needs the package math-verify: pip install 'lagrpo[math]'") from error

from lagrpo.rewards.reward import UnscorableError, accept_any
from lagrpo.rewards.texts import normal_form, read_answer, write_number
from lagrpo.tasks import RowTask
from lagrpo.tasks.columns import plain, text_of
from lagrpo.tasks.data import load_rows
from lagrpo.tasks.numbers import find_last_box, find_reference, find_tagged, first_question
from lagrpo.types import JsonView

WORDING = "{problem}\n\nReason step by step and put the final answer in \\boxed{{}}."

_HUB = "agentica-org/DeepScaleR-Preview-Dataset"
_THIN_SPACES = re.compile(r",\\!\s*|\{,\}|\\!")
# A formula's delimiter, or two words in a row: the text is not a formula alone.
_PROSE = re.compile(r"\$|\\[(\[]|(?<![\\{A-Za-z])[A-Za-z]{2,} +[A-Za-z]{2,}")
_SCIENTIFIC = re.compile(r"[-+]?[0-9]+(?:\.[0-9]+)?[eE][-+]?[0-9]{1,3}")
_IMAGINARY = re.compile(r"(?<=[0-9])\s+(?=i\b)")

# The reading that drops units also takes letters for units (the t of \sin^2 t). So the reading that
# keeps all comes first.
_WITH_UNITS = math_verify.LatexExtractionConfig()
_NORMALIZATION = dataclasses.replace(_WITH_UNITS.normalization_config, units=False)
_READINGS = (dataclasses.replace(_WITH_UNITS, normalization_config=_NORMALIZATION), _WITH_UNITS)
_NUMBER = math_verify.ExprExtractionConfig()
_parse = functools.partial(math_verify.parse, fallback_mode="no_fallback", parsing_timeout=0)
# math-verify warns that its own deadlines are off.
logging.getLogger("math_verify").setLevel(logging.ERROR)


def load(
    seed: int,
    *,
    data: str | None = None,
    train_split: str = "deepscaler_part_math_train|train",
    test_split: str = "math500_test|test",
) -> RowTask:
    """Returns the task. Raises ValueError for missing or unfit data."""
    rows = load_rows(data, train_split, test_split, hub=_HUB, ask=_ask, seed=seed)
    return RowTask("math", rows, _ask, score)


def _ask(row: JsonView) -> tuple[str, Any]:
    return WORDING.format(problem=text_of(row, "problem")), plain(row["answer"])


@accept_any
def score(completion: str, answer: Any, prefix: str = "") -> float:
    r"""Returns 1.0 if the completion's answer equals the reference answer mathematically, else 0.0.

    The thoughts of the model before </think> do not count, and neither do more questions that it
    makes up and their answers (`lagrpo.tasks.numbers.first_question`). If the completion has
    <answer> ... </answer>, only the text within the last such tags counts. The answer is the first
    of these that the text has:

    1. the content of the last closed \boxed{} (the inner one of nested boxes);
    2. a formula that fills the tags;
    3. the formula in LaTeX delimiters, or the number, that math-verify finds: the last one after
       the word "answer", else the last of all.

    Equal means spelled the same except for spaces, or equal by math-verify: in value, numbers to
    six decimals, in any form that it can evaluate ("3^2" is 9), units and "%" left aside; sets
    without order, intervals with their ends. Unless the reference answer is an equation, an
    equation counts by its last side: "x = 5", "2 + 3 = 5" and "5 = 5" are 5. The equation itself is
    not checked, because many write "10/3 = 3.33". tests/corpora/math_verify.jsonl has known
    weaknesses.

    The reference answer is the part after its last "####", within its last tags or box, if it has
    any. The caller keeps the deadline: math-verify's own deadlines are off. Raises UnscorableError
    if the reference answer cannot be parsed.
    """
    reference = ""
    if isinstance(answer, float) and isfinite(answer):
        reference = write_number(answer)
    elif isinstance(answer, str | int) and not isinstance(answer, bool):
        reference = _clean(find_reference(normal_form(str(answer))))
    if not reference:
        raise UnscorableError(f"the reference answer {answer!r} is not a formula")
    text = first_question(read_answer(completion, prefix))
    tagged = find_tagged(text)
    formula = find_last_box(tagged)
    if formula is None and tagged != text:
        formula = tagged
    if formula is not None and _without_spaces(_clean(formula)) == _without_spaces(reference):
        return 1.0
    if formula is tagged and _PROSE.search(tagged):
        formula = None
    is_readable = False
    for reading in _READINGS:
        parsed_reference = _parse_formula(reference, reading)
        is_readable = is_readable or bool(parsed_reference)
        if formula is not None:
            parsed_answer = _parse_formula(_clean(formula), reading)
        else:
            parsed_answer = _parse_text(tagged, reading)
        if parsed_reference and math_verify.verify(
            parsed_reference, parsed_answer, timeout_seconds=None
        ):
            return 1.0
    if not is_readable:
        raise UnscorableError(f"math-verify cannot parse the reference answer {answer!r}")
    return 0.0


def _parse_text(text: str, reading: math_verify.LatexExtractionConfig) -> list[Any]:
    """Parses the formula or number that counts in a text."""
    reading_without_boxes = dataclasses.replace(reading, boxed_match_priority=-1)
    return _parse(_THIN_SPACES.sub("", text), (reading_without_boxes, _NUMBER))


@functools.lru_cache(maxsize=4096)
def _parse_formula(latex: str, reading: math_verify.LatexExtractionConfig) -> list[Any]:
    """Parses a formula that stands alone."""
    return _parse(f"\\boxed{{{latex}}}", (dataclasses.replace(reading, boxed_match_priority=0),))


def _clean(latex: str) -> str:
    r"""Returns a formula without what confuses math-verify.

    That is $ around the formula, a full stop or comma after it, the thin spaces of 10,\!000 and
    10{,}000, the space of "5 i", and the e of 1e-05, which is not Euler's number.
    """
    latex = _THIN_SPACES.sub("", latex)
    latex = latex.strip().strip("$").strip().rstrip(".,;: \n")
    if _SCIENTIFIC.fullmatch(latex):
        return f"{Decimal(latex):f}"
    return _IMAGINARY.sub("", latex)


def _without_spaces(text: str) -> str:
    return re.sub(r"\s", "", text)
