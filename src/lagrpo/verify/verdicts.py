"""What a worker process answers: a verdict, which travels as a pair.

It is ("scored", reward) or ("unscored", reason). A call about several completions gives ("several", such verdicts in
their order), or one verdict that holds for all. An environment's turn travels as ("turn", what it says), its end as
("final", (reward, reason)). ("unloadable", reason) says that this process could not load what it is to call.
"""

from __future__ import annotations

import math
import reprlib
import traceback
from collections.abc import Callable
from typing import Any, Literal

from lagrpo.redaction import redact
from lagrpo.tasks.base import Unjudgeable

Verdict = tuple[str, Any]
What = Literal["judge", "environment"]

_LONGEST_REASON = 300
_READ = 4096  # characters of a judge's text that are searched for secrets, for a reason
_LONGEST_VALUE = 60  # characters of a value that is no reward
_LONGEST_INTEGER = 10_000  # bits: Python writes no more than 4,300 digits


def ask(call: Callable[[], Verdict], what: What = "judge") -> Verdict:
    """The verdict that the call returns, or that its exception stands for."""
    try:
        return call()
    except BaseException as error:  # noqa: BLE001 - whatever a judge raises, sys.exit too, concerns this completion only
        return refuse(error, what)


def refuse(error: BaseException, what: What = "judge") -> Verdict:
    """The verdict that an exception stands for."""
    if isinstance(error, Unjudgeable):
        return "unscored", tell(str.__str__(str(error)))
    return "unscored", f"the {what} raised {describe(error)}"


def score(value: object, what: str = "judge returned") -> Verdict:
    """Take any finite number (numpy's and torch's scalars, too), but no text that spells one."""
    try:
        reward = math.nan if isinstance(value, str | bytes | bytearray) else float(value)  # type: ignore[arg-type]
    except (TypeError, ValueError, OverflowError):
        reward = math.nan
    if math.isfinite(reward):
        return "scored", reward
    return "unscored", f"the {what} {show(value)} ({type(value).__name__}), not a finite number"


def show(value: object) -> str:
    """A value as Python writes it, shortened where that is long, once no secret can be cut in two."""
    if isinstance(value, int) and value.bit_length() > _LONGEST_INTEGER:
        return reprlib.repr(value)
    text = repr(tell(value)) if isinstance(value, str) else tell(repr(value))
    return text if len(text) <= _LONGEST_VALUE else f"{text[: _LONGEST_VALUE // 2]}...{text[-_LONGEST_VALUE // 4 :]}"


def describe(error: BaseException) -> str:
    """The exception as the last line of a traceback says it."""
    return tell(traceback.format_exception_only(error)[-1].strip())


def tell(text: str) -> str:
    """A judge's text as a part of a reason: half of a surrogate pair, which no file takes, as its number."""
    return redact(text[:_READ])[:_LONGEST_REASON].encode(errors="backslashreplace").decode()
