"""What runs in a worker process: judging one completion at a time.

Nothing here imports torch or transformers, so that a worker starts in about a tenth of a second and takes little memory
(beyond what the judge's own module imports). Judging goes on beside sampling and learning, which wait for every one of
their threads: a worker gives way to them, and computes with one thread. A verdict travels as a pair: ("scored",
reward), ("unscored", reason), or ("unloadable", reason) where this process could not load the judge.
"""

from __future__ import annotations

import math
import os
import pickle
import reprlib
import signal
import sys
import threading
import traceback

from lagrpo.tasks.base import Judge, Unjudgeable
from lagrpo.verify.leaks import track_alone
from lagrpo.workers import die_with_parent, limit_cpu_time

Verdict = tuple[str, float | str]

POLITENESS = 5  # niceness: of a core that both want, the policy gets three quarters and the judge one
_SPARE_SECONDS = 5
_LONGEST_REASON = 300

_judge: Judge | None = None
_problem = ""
_deadline = math.inf


def start(judge: bytes, deadline: float) -> None:
    """Prepare this process: give way to the policy; load the judge; die when told to even while the judge hangs in C
    code, which a signal handler in Python would wait for; die with the parent; leave nothing behind."""
    global _judge, _problem, _deadline
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # it is blocked; starting a resource tracker unblocks it
    track_alone()
    _give_way()
    threading.Thread(target=die_with_parent, daemon=True).start()
    _deadline = deadline
    try:
        _judge = pickle.loads(judge)
    except BaseException as error:  # noqa: BLE001 - importing a user's module can raise anything
        _problem = _describe(error)


def warm_up() -> None:
    """Does nothing: asking for it makes the pool start its processes."""


def verdict(payload: bytes) -> Verdict:
    """The verdict on a pickled (text, gold)."""
    if _judge is None:
        return "unloadable", _problem
    limit_cpu_time((_deadline + _SPARE_SECONDS) * (os.cpu_count() or 1))
    try:
        text, gold = pickle.loads(payload)
        return _score(_judge(text, gold))
    except Unjudgeable as error:
        return "unscored", str(error)[:_LONGEST_REASON]
    except BaseException as error:  # noqa: BLE001 - whatever a judge raises, sys.exit too, concerns this completion only
        return "unscored", f"the judge raised {_describe(error)}"


def _score(value: object) -> Verdict:
    """Any finite number will do (numpy's and torch's scalars too), text that spells one will not."""
    try:
        reward = math.nan if isinstance(value, str | bytes | bytearray) else float(value)  # type: ignore[arg-type]
    except (TypeError, ValueError, OverflowError):
        reward = math.nan
    if math.isfinite(reward):
        return "scored", reward
    return "unscored", f"the judge returned {reprlib.repr(value)} ({type(value).__name__}), not a finite number"


def _describe(error: BaseException) -> str:
    return traceback.format_exception_only(error)[-1].strip()[:_LONGEST_REASON]


def _give_way() -> None:
    """A lower priority, and one thread in what the judge will load, or has loaded where it is part of the main script.
    Not lower still: a deadline is one of the clock, and a judge that gets too little of a core would miss it."""
    if sys.platform != "win32":
        os.nice(POLITENESS)
    os.environ["OMP_NUM_THREADS"] = "1"
    if (torch := sys.modules.get("torch")) is not None:
        torch.set_num_threads(1)
