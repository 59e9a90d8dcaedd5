"""Judges completions, or takes the turns of environments, in a worker process: one call at a time.

This imports neither torch nor transformers, so a worker starts in about a tenth of a second and takes little memory
(besides what the judge's own module imports). Judging runs beside sampling and learning, which wait for all their
threads, so a worker gives way to them and computes with one thread. Whatever a call does to its process, the next one
finds the process as it was.
"""

from __future__ import annotations

import json
import math
import os
import pickle
import signal
import sys
import threading
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from multiprocessing import resource_tracker
from typing import Any

from lagrpo.tasks.base import Environment, Final, Turn
from lagrpo.tasks.rewards import Answer
from lagrpo.verify.asking import ask_reward
from lagrpo.verify.surroundings import Surroundings
from lagrpo.verify.verdicts import Verdict, What, ask, describe, score, show, tell
from lagrpo.workers import Process, die_with_parent, limit_cpu_time

SPOILED = 100  # exit code: the process cannot be made as it was before the judge's call
POLITENESS = 5  # niceness: of a core that both want, the policy gets three quarters and the judge one
_SPARE_SECONDS = 5
_SILENT = "ignore:resource_tracker:UserWarning"  # for the tracker, which gets our warning options
_SEGMENTS = "/dev/shm"  # where Linux lists them; elsewhere every segment counts as our own

_called: Any = None  # a judge, several rewards, or what makes environments
_problem = ""
_deadline = math.inf
_process = 0


class JudgeProcess(Process):
    """A worker process, which never ends itself: not with exit code 0 either, which a pool takes for a proper end."""

    @property
    def exitcode(self) -> int | None:
        code = super().exitcode
        return 1 if code == 0 else code


def start(called: bytes, deadline: float, file_size: int) -> None:
    """Prepare this process: give way to the policy, limit every file that it writes to `file_size` bytes, load what it
    is to call, end with the parent, leave nothing behind. SIGTERM keeps its default effect, because a handler in Python
    would wait for a judge that hangs in C code."""
    global _called, _problem, _deadline, _process
    _process = os.getpid()
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # it is blocked; starting a resource tracker unblocks it
    track_alone()
    _give_way()
    _limit_files(file_size)
    threading.Thread(target=die_with_parent, daemon=True).start()
    _deadline = deadline
    try:
        _called = pickle.loads(called)
    except BaseException as error:  # noqa: BLE001 - importing a user's module can raise anything
        _problem = describe(error)


def warm_up() -> None:
    """Do nothing: scheduling this makes the pool start its processes."""


def give_verdict(payload: bytes) -> Verdict:
    """The verdict on a pickled (text, gold)."""
    return _call("judge", _deadline, lambda text, gold: score(_called(text, gold)), payload)


def give_verdicts(seconds: float, payload: bytes) -> Verdict:
    """The verdicts of one of several rewards on a pickled (number of the reward, answers), where a call has so many
    seconds: one for each answer, or one for all."""

    def judge(number: int, answers: Sequence[Answer]) -> Verdict:
        return ask_reward(_called.of[number], answers, seconds)

    return _call("judge", seconds, judge, payload)


def take_turn(payload: bytes) -> Verdict:
    """What an environment says. The pickled payload is (its pickled state, the prompt, the address, what the policy
    said). Without a state a new one starts first, and without a text it does no more. Returns the turn's messages, its
    reward, and the next state; or the end."""
    return _call("environment", _deadline, _take_turn, payload)


def _take_turn(state: bytes | None, prompt: Any, address: Any, text: str | None) -> Verdict:
    environment: Environment = _called() if state is None else pickle.loads(state)
    if state is None:
        opening: Any = environment.start(replace(prompt, messages=prompt.asked or prompt.messages, asked=()), address)
        if not isinstance(opening, Turn):
            raise TypeError(f"start returned {show(opening)} ({type(opening).__name__}), not a Turn")
        if text is None:
            return "turn", _said(opening, environment)
        if _plain(opening.messages) != _plain(prompt.messages):
            raise ValueError(
                "start gave this completion other messages than its group: they may depend on the prompt alone"
            )
    said: Any = environment.reply(str(text))
    if isinstance(said, Turn):
        return "turn", _said(said, environment)
    if not isinstance(said, Final):
        raise TypeError(f"reply returned {show(said)} ({type(said).__name__}), neither a Turn nor a Final")
    kind, reward = score(said.reward, "environment's reward is")
    return (kind, reward) if kind == "unscored" else ("final", (reward, tell(str(said.reason))))


def _said(turn: Turn, environment: Environment) -> tuple[tuple[dict[str, Any], ...], float, bytes]:
    """What leaves this process: plain values, as the parent unpickles them."""
    kind, reward = score(turn.reward, "reward is")
    if kind == "unscored":
        raise ValueError(reward)
    return _plain(turn.messages), reward, pickle.dumps(environment)


def _plain(messages: Sequence[Any]) -> tuple[dict[str, Any], ...]:
    """Messages as JSON has them. Raises TypeError or ValueError for what cannot be one."""
    listed: list[Any] = [messages] if isinstance(messages, str) else list(messages)
    if not all(isinstance(message, Mapping) for message in listed):
        raise TypeError(f"its messages are {show(messages)}; a turn has a tuple: ({{'role': …, 'content': …}},)")
    plain = json.loads(json.dumps([dict(message) for message in listed]))
    if not plain or not all(isinstance(message.get("role"), str) for message in plain):
        raise ValueError(f"its messages are {tell(str(plain))}: it needs at least one, and each a role")
    return tuple(plain)


def _call(what: What, seconds: float, call: Callable[..., Verdict], payload: bytes) -> Verdict:
    """What `call` returns for the pickled arguments, whatever it does to this process."""
    if _called is None:
        return "unloadable", _problem
    limit_cpu_time((seconds + _SPARE_SECONDS) * (os.cpu_count() or 1))
    before = Surroundings.read()
    try:
        return ask(lambda: call(*pickle.loads(payload)), what)
    except BaseException as error:  # noqa: BLE001 - an exception whose own text raises one
        return "unscored", f"the {what} raised {type(error).__name__}"
    finally:
        if os.getpid() != _process:  # the judge has forked, and this is the copy
            os._exit(0)
        try:
            before.put_back()
        except (OSError, ValueError):
            os._exit(SPOILED)


def _limit_files(size: int) -> None:
    """Limit each file that this process writes; a core file has no use at all."""
    if sys.platform != "win32":
        import resource

        for limit, most in ((resource.RLIMIT_FSIZE, size), (resource.RLIMIT_CORE, 0)):
            hard = resource.getrlimit(limit)[1]
            resource.setrlimit(limit, (most if hard == resource.RLIM_INFINITY else min(most, hard), hard))


def _give_way() -> None:
    """Take a lower priority, and one thread for what the judge loads (or has loaded as part of the main script). An
    even lower priority would leave a judge too little of a core to meet its deadline."""
    if sys.platform != "win32":
        os.nice(POLITENESS)
    os.environ["OMP_NUM_THREADS"] = "1"
    if (torch := sys.modules.get("torch")) is not None:
        torch.set_num_threads(1)


class OwnTracker(resource_tracker.ResourceTracker):
    """Removes what a judge leaves behind: shared memory and semaphores that outlive their process. Python has one
    tracker for a program and its children, which does so when the program ends, with a warning. A worker gets its own,
    which does so silently as soon as the worker has ended, killed or not.

    Python also registers shared memory that a process only opens (always, before 3.13); segments older than this
    tracker belong to other processes and stay."""

    def __init__(self) -> None:
        super().__init__()
        self._others = frozenset(os.listdir(_SEGMENTS)) if os.path.isdir(_SEGMENTS) else frozenset[str]()
        self._tracked: set[tuple[str, str]] = set()

    def register(self, name: str, rtype: str) -> None:
        if rtype != "shared_memory" or name.lstrip("/") not in self._others:
            self._tracked.add((name, rtype))
            super().register(name, rtype)

    def unregister(self, name: str, rtype: str) -> None:
        if (name, rtype) in self._tracked:
            self._tracked.remove((name, rtype))
            super().unregister(name, rtype)


def track_alone() -> None:
    """Give this process its own tracker, which starts when it is first needed."""
    sys.warnoptions.append(_SILENT)
    own = OwnTracker()
    resource_tracker._resource_tracker = own
    for name in ("ensure_running", "register", "unregister", "getfd"):
        setattr(resource_tracker, name, getattr(own, name))
