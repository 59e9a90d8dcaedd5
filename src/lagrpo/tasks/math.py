r"""Task `math`: competition problems, judged by mathematical equality (math-verify).

Data: a directory of .jsonl files with columns problem and answer, as DeepScaleR, MATH-500 and AIME have them. The
settings `train_split` and `test_split` name files without their ending ("deepscaler_part_aime_train", "aime24_test");
their defaults mean deepscaler_part_math_train and math500_test. Or datasets of the hub; see `lagrpo.tasks.files`.

Needs math-verify: pip install 'lagrpo[math]'.
"""

from __future__ import annotations

import functools
import importlib.util
import logging
import re
from collections.abc import Mapping
from typing import Any

from lagrpo.tasks.base import RowTask, TaskSettings, Unjudgeable
from lagrpo.tasks.reading import last_box

WORDING = "{problem}\n\nReason step by step and put the final answer in \\boxed{{}}."

_HUB = "agentica-org/DeepScaleR-Preview-Dataset"
_DEFAULTS = {"train": "deepscaler_part_math_train", "test": "math500_test"}
_IMAGINARY = re.compile(r"(?<=[0-9])\s+(?=i\b)")


def load(settings: TaskSettings, seed: int) -> RowTask:
    """The task for these settings. Raises ValueError where the data is missing or not as it should be, ImportError
    without math-verify."""
    from lagrpo.tasks import load_judge
    from lagrpo.tasks.files import task_rows

    if settings.reward is None:
        require_math_verify()
    rows = task_rows(settings, _file_names, _HUB, "problem", "answer")
    return RowTask("math", rows, _ask, load_judge(settings.reward, judge), settings.system_prompt)


def judge(text: str, gold: Any) -> float:
    r"""1.0 where the answer and the gold answer are mathematically equal, else 0.0.

    The answer is what the last closed \boxed{} holds (the inner one of nested boxes). Without one it is what
    math-verify finds in the text: a formula in LaTeX delimiters or a number, the last after the word "answer" before
    the last of all.

    Equal means spelled the same but for spaces, or equal by math-verify: in value, numbers to six decimals, in whatever
    form it can evaluate ("3^2" is 9, "0.5" is \frac{1}{2}, an equation "x = 5" is 5), units and "%" left aside; sets
    without order, intervals with their ends. So an answer that only restates the question in mathematics is equal to
    the gold answer: a known weakness of judging by value.

    Expressions can take for ever to evaluate (9^{9^{9^9}}): the caller keeps the deadline. math-verify's own, which
    rest on signal.alarm, are off. Raises Unjudgeable where the gold answer cannot be parsed and is spelled otherwise.
    """
    right = _clean(gold) if isinstance(gold, str) else str(gold)
    box = last_box(text)
    if box is not None and re.sub(r"\s", "", _clean(box)) == re.sub(r"\s", "", right):
        return 1.0
    library = _library()
    parsed_gold = _parse_gold(right)
    if not parsed_gold:
        raise Unjudgeable(f"math-verify cannot parse the gold answer {gold!r}")
    parsed = library.parse_formula(_clean(box)) if box is not None else library.find(text)
    return float(library.equal(parsed_gold, parsed))


@functools.cache
def _library() -> _MathVerify:
    return _MathVerify()


@functools.lru_cache(maxsize=4096)
def _parse_gold(gold: str) -> list[Any]:
    return _library().parse_formula(gold)


class _MathVerify:
    """math-verify with our settings: imported when the first answer is judged, its deadlines off."""

    def __init__(self) -> None:
        import math_verify

        logging.getLogger("math_verify").setLevel(logging.ERROR)  # it warns that its deadlines are off
        self._verify = math_verify.verify
        self._parse = functools.partial(math_verify.parse, fallback_mode="no_fallback", parsing_timeout=0)
        self._formula = (math_verify.LatexExtractionConfig(boxed_match_priority=0),)
        self._text = (math_verify.LatexExtractionConfig(boxed_match_priority=-1), math_verify.ExprExtractionConfig())

    def parse_formula(self, latex: str) -> list[Any]:
        return self._parse(f"\\boxed{{{latex}}}", extraction_config=self._formula)

    def find(self, text: str) -> list[Any]:
        return self._parse(text, extraction_config=self._text)

    def equal(self, gold: list[Any], answer: list[Any]) -> bool:
        return self._verify(gold, answer, timeout_seconds=None)


def _clean(latex: str) -> str:
    r"""The formula without what math-verify stumbles over: $ around it, a full stop or comma after it, the thin spaces
    of 10,\!000 and 10{,}000, the space of "5 i"."""
    latex = latex.replace(",\\!", "").replace("{,}", "").replace("\\!", "")
    return _IMAGINARY.sub("", latex.strip().strip("$").strip().rstrip(".,;: \n"))


def _file_names(split: str) -> tuple[str, ...]:
    return tuple(dict.fromkeys(f"{name}.jsonl" for name in (_DEFAULTS.get(split, split), split)))


def _ask(row: Mapping[str, Any]) -> tuple[str, str]:
    return WORDING.format(problem=row["problem"]), str(row["answer"])


def require_math_verify() -> None:
    """Raises ImportError, saying what to install, where math-verify is not there."""
    if importlib.util.find_spec("math_verify") is None:
        raise ImportError("judging mathematics needs math-verify: pip install 'lagrpo[math]'")
