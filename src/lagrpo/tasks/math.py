r"""Task `math`: competition problems, judged by mathematical equality (math-verify).

Data: a directory of .jsonl files with columns problem and answer, as DeepScaleR, MATH-500 and AIME have them. The
settings `train_split` and `test_split` name files without their ending ("deepscaler_part_aime_train", "aime24_test");
their defaults mean deepscaler_part_math_train and math500_test. Or datasets of the hub; see `lagrpo.tasks.files`.

Needs math-verify: pip install 'lagrpo[math]'.
"""

from __future__ import annotations

import dataclasses
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


def require_math_verify() -> None:
    """Raises ImportError, saying what to install, where math-verify is not there."""
    if importlib.util.find_spec("math_verify") is None:
        raise ImportError("judging mathematics needs math-verify: pip install 'lagrpo[math]'")


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
    readable = False
    for reading in library.readings:
        parsed_gold = _parse_gold(right, reading)
        readable = readable or bool(parsed_gold)
        answer = library.formula(_clean(box), reading) if box is not None else library.find(text, reading)
        if parsed_gold and library.equal(parsed_gold, answer):
            return 1.0
    if not readable:
        raise Unjudgeable(f"math-verify cannot parse the gold answer {gold!r}")
    return 0.0


@functools.cache
def _library() -> _MathVerify:
    return _MathVerify()


@functools.lru_cache(maxsize=4096)
def _parse_gold(gold: str, reading: Any) -> list[Any]:
    return _library().formula(gold, reading)


class _MathVerify:
    """math-verify with our settings, imported when the first answer is judged. Its deadlines are off. Its reading that
    drops units takes letters for units too (the t of \\sin^2 t), so the reading that keeps everything comes first."""

    def __init__(self) -> None:
        import math_verify

        logging.getLogger("math_verify").setLevel(logging.ERROR)  # it warns that its deadlines are off
        self._verify = functools.partial(math_verify.verify, timeout_seconds=None)
        self._parse = functools.partial(math_verify.parse, fallback_mode="no_fallback", parsing_timeout=0)
        self._number = math_verify.ExprExtractionConfig()
        latex = math_verify.LatexExtractionConfig()
        literal = dataclasses.replace(latex.normalization_config, units=False)
        self.readings = (dataclasses.replace(latex, normalization_config=literal), latex)

    def formula(self, latex: str, reading: Any) -> list[Any]:
        """A formula that stands alone."""
        return self._parse(f"\\boxed{{{latex}}}", (dataclasses.replace(reading, boxed_match_priority=0),))

    def find(self, text: str, reading: Any) -> list[Any]:
        """The formula or number that counts in a text without a box."""
        return self._parse(text, (dataclasses.replace(reading, boxed_match_priority=-1), self._number))

    def equal(self, gold: list[Any], answer: list[Any]) -> bool:
        return self._verify(gold, answer)


def _clean(latex: str) -> str:
    r"""The formula without what math-verify stumbles over: $ around it, a full stop or comma after it, the thin spaces
    of 10,\!000 and 10{,}000, the space of "5 i"."""
    latex = latex.replace(",\\!", "").replace("{,}", "").replace("\\!", "")
    return _IMAGINARY.sub("", latex.strip().strip("$").strip().rstrip(".,;: \n"))


def _file_names(split: str) -> tuple[str, ...]:
    return tuple(dict.fromkeys(f"{name}.jsonl" for name in (_DEFAULTS.get(split, split), split)))


def _ask(row: Mapping[str, Any]) -> tuple[str, str]:
    return WORDING.format(problem=row["problem"]), str(row["answer"])
