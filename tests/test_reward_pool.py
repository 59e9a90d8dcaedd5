"""The pool of worker processes: three outcomes, order, overlap, and that an error concerns one
completion only."""

from __future__ import annotations

import contextlib
import itertools
import logging
import os
import signal
import sys
import time
from collections.abc import Iterator

import pytest
import quick_workers
import sample_rewards
from scoring import make_completion, make_group, outcomes

from lagrpo.interrupts import Interrupted, interruptible
from lagrpo.rewards import processes
from lagrpo.rewards.pool import RewardError, RewardPool, count_workers
from lagrpo.rewards.reasons import depends_on_machine
from lagrpo.rewards.reward import Reward
from lagrpo.rewards.worker import call_reward
from lagrpo.types import Group, Outcome, Prompt


@pytest.fixture(scope="module", autouse=True)
def new_interpreters() -> Iterator[None]:
    """Workers start as in runs of users."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(processes, "_start", quick_workers.start_interpreter)
        yield


@pytest.fixture(scope="module")
def pool() -> Iterator[RewardPool]:
    with RewardPool(
        sample_rewards.act, workers=2, deadline=1.0, memory=0.5, max_without_reward=1.0
    ) as shared:
        yield shared


def test_error_leaves_that_completion_unscored_and_no_other(pool):
    for text, (reward, reason) in [
        ("8", (0.0, "")),
        ("raise \ud800", (None, "the reward function raised ValueError: \\ud800")),
        ("unscorable no answer", (None, "no answer")),
        ("exit 3", (None, "the worker process ended with exit code 3")),
        ("spin", (None, "no reward within 1 s")),
        ("fill 900", (None, "the reward function raised MemoryError")),
        ("nan", (None, "the reward function returned nan, not a finite number")),
        ("nothing", (None, "the reward function returned None")),
    ]:
        (scored,) = pool.score([make_group("7", text, "8")])
        before, outcome, after = outcomes(scored)
        assert (before.reward, outcome.reward, after.reward) == (1.0, reward, 0.0)
        assert outcome.reason.startswith(reason)
        assert outcome.kind == ("unscored" if reason else "scored")


UNUSUAL_ERRORS = {
    "Ctrl-C": "raise KeyboardInterrupt",
    "cancelled": "import asyncio\nraise asyncio.CancelledError",
    "generator": "raise GeneratorExit",
    "no Exception": "class E(BaseException): pass\nraise E",
    "not to be read": "class E(BaseException):\n  def __init__(self, a, b): pass\nraise E(1, 2)",
    "text raises": "class E(Exception):\n    def __str__(self): raise KeyboardInterrupt\nraise E",
    "odd syntax error": "raise SyntaxError('x', ('file', 'a', [], {}))",
    "deep": "def f(): f()\nf()",
    "long": "raise ValueError('x' * 5_000_000)",
    "surrogate": "raise ValueError('\\ud800')",
    "group": "error = ValueError()\n"
    "for _ in range(3000): error = ExceptionGroup('', [error])\nraise error",
}


@pytest.mark.parametrize("code", UNUSUAL_ERRORS.values(), ids=UNUSUAL_ERRORS)
def test_unusual_error_leaves_that_completion_unscored(pool, code):
    (scored,) = pool.score([make_group("7", f"run {code}", "7")])
    first, unscored, last = outcomes(scored)
    assert (first.reward, unscored.kind, last.reward) == (1.0, "unscored", 1.0)
    assert "the reward function raised" in unscored.reason
    assert len(unscored.reason.encode()) < 1000


@pytest.mark.parametrize("code", UNUSUAL_ERRORS.values(), ids=UNUSUAL_ERRORS)
@pytest.mark.parametrize(
    ("function", "others"),
    [(sample_rewards.run_awaited, 1.0), (sample_rewards.run_together, None)],
    ids=["async", "TRL"],
)
def test_unusual_error_of_a_call_for_several_completions_is_an_outcome(function, others, code):
    """A call in TRL's signature has one error for all of its completions."""
    group = make_group("", code, "")
    reward = Reward(function)
    calls = reward.arguments(group.prompt, group.completions)
    list_length = 3 if function is sample_rewards.run_together else None
    with interruptible():
        scored = call_reward(function, calls, list_length, deadline=5.0)
    assert [outcome.reward for outcome in scored] == [others, None, others]
    assert "the reward function raised" in scored[1].reason


WRITE = """
for descriptor in range(3, 40):
    try:
        os.write(descriptor, %s)
    except OSError:
        pass
"""


@pytest.mark.parametrize(
    ("code", "noun"),
    [
        ("os._exit(0)", "exit code 0"),
        ("os.kill(os.getpid(), 9)", "exit code -9"),
        ("os.closerange(3, 40)", "exit code"),
        ("if os.fork() == 0:\n    os.execlp('sleep', 'sleep', '3')\nos._exit(0)", "exit code 0"),
        (WRITE % "b'noise' * 9", "answer"),
        (WRITE % "b'x'", "answer"),
        (WRITE % r"b'\0' * 8 + b'\xff' * 8", "answer"),
    ],
    ids=["exits", "is killed", "closes", "leaves a copy", "writes", "writes little", "writes size"],
)
def test_worker_that_ends_or_writes_to_its_socket_costs_one_completion(pool, code, noun):
    (scored,) = pool.score([make_group("7", f"run {code}", *["7"] * 3)])
    unscored = outcomes(scored)[1]
    assert [outcome.reward for outcome in outcomes(scored)] == [1.0, None, 1.0, 1.0, 1.0]
    assert noun in unscored.reason
    assert depends_on_machine(unscored.reason)
    assert "no reward within" not in unscored.reason


def test_process_that_a_completion_forks_answers_no_call(pool):
    (scored,) = pool.score([make_group("run os.fork()", *["7"] * 4)])
    assert scored.rewards == (1.0,) * 5


@pytest.mark.parametrize(
    ("text", "reason"),
    [("hang", "no reward within 1 s"), ("sleep 0.1", "")],
    ids=["hung call", "healthy call"],
)
@pytest.mark.parametrize("step", [-1e9, 1e9], ids=["back", "ahead"])
def test_deadline_holds_while_the_clock_is_changed(pool, monkeypatch, text, reason, step):
    clock = itertools.count(time.time(), step)
    monkeypatch.setattr(time, "time", lambda: next(clock))
    (scored,) = pool.score([make_group(text)])
    assert outcomes(scored)[0].reason == reason


@pytest.mark.parametrize(
    ("error", "handler"),
    [
        (Interrupted(signal.SIGINT), interruptible()),
        (KeyboardInterrupt(), contextlib.nullcontext()),
    ],
    ids=["with our handler", "with Python's handler"],
)
def test_ctrl_c_during_a_reward_of_this_process_ends_the_run(error, handler):
    def interrupted(completion: str) -> float:
        raise error

    with RewardPool(interrupted) as pool, handler, pytest.raises(type(error)):
        list(pool.score([make_group("7")]))


def test_completions_after_hung_and_dead_workers_are_scored(pool):
    # More bad calls than workers: workers that were replaced meet them, too.
    (scored,) = pool.score([make_group(*["hang", "exit 1", "segfault"] * 2, *["7"] * 50)])
    assert [outcome.reward for outcome in outcomes(scored)] == [None] * 6 + [1.0] * 50


def test_groups_come_back_in_order_and_failed_completions_keep_their_outcome(pool):
    failed = make_completion("", outcome=Outcome.failed("the server died"))
    mixed = Group(Prompt(1, (), "7"), (failed, make_completion("7")))
    scored = list(
        pool.score(iter([make_group("sleep 0.2", "7"), mixed, make_group("8"), make_group()]))
    )
    assert [g.rewards for g in scored] == [(1.0, 1.0), (1.0,), (0.0,), ()]
    assert scored[1].completions[0] is failed


def test_function_that_workers_cannot_import_runs_here_and_is_named(caplog):
    seen: list[int] = []

    def closure(completion: str, answer: object) -> float:
        seen.append(os.getpid())
        return float(completion == answer)

    with caplog.at_level(logging.WARNING), RewardPool(closure) as pool:
        (scored,) = pool.score([make_group("7", "8")])
    assert (scored.rewards, seen) == ((1.0, 0.0), [os.getpid()] * 2)
    assert "reward closure runs in the training process" in caplog.text


def test_workers_import_neither_the_main_script_nor_anything_heavy(tmp_path, monkeypatch):
    script = tmp_path / "script.py"
    script.write_text("import torch\n", encoding="utf-8")
    monkeypatch.setattr(sys.modules["__main__"], "__file__", str(script), raising=False)
    monkeypatch.setattr(sys.modules["__main__"], "__spec__", None, raising=False)
    with RewardPool(sample_rewards.act) as pool:
        assert [group.rewards for group in pool.score([make_group("modules")])] == [(0.0,)]


def test_workers_run_no_file_of_the_current_directory(tmp_path, monkeypatch):
    for module in ("socket", "token", "pickle", "json"):
        code = f"open({str(tmp_path / 'executed')!r}, 'w')\nraise ImportError"
        (tmp_path / f"{module}.py").write_text(code, encoding="utf-8")
    monkeypatch.chdir(tmp_path)
    with RewardPool(sample_rewards.act, workers=1) as pool:
        assert [group.rewards for group in pool.score([make_group("7")])] == [(1.0,)]
    assert not (tmp_path / "executed").exists()


def test_too_many_without_a_reward_stop_the_run():
    """After every group, or once 64 completions have an outcome."""
    seen = []

    def sampled() -> Iterator[Group]:
        for key in range(1000):
            seen.append(key)
            time.sleep(0.01)
            yield make_group(*["raise bad"] * 8, key=key)

    with RewardPool(sample_rewards.act, max_without_reward=0.5) as strict:
        assert (
            len(list(strict.score([make_group("7", "raise bad"), make_group("8", "raise bad")])))
            == 2
        )
        iterator = strict.score(
            [make_group("7", "raise bad", "raise worse"), make_group("raise bad")]
        )
        assert [next(iterator).rewards, next(iterator).rewards] == [(1.0,), ()]
        with pytest.raises(
            RewardError, match=r"3 of 4 completions(.|\n)*2 x unscored: .*ValueError: bad.*\n  1 x"
        ):
            next(iterator)
        with pytest.raises(RewardError, match="no reward"):
            list(strict.score(sampled()))
    # 64 completions are 8 groups; more are sampled until the first have been scored.
    assert len(seen) < 1000


@pytest.mark.parametrize(
    ("cores", "ranks", "scoring_ranks", "expected"),
    [
        pytest.param(2, 1, 1, 1, id="two cores"),
        pytest.param(16, 1, 1, 4, id="one process"),
        pytest.param(96, 1, 1, 8, id="one process, many cores"),
        pytest.param(96, 8, 8, 3, id="eight ranks that score"),
        pytest.param(96, 8, 1, 24, id="rank 0 scores for eight"),
        pytest.param(16, 8, 8, 1, id="fewer cores than ranks need"),
    ],
)
def test_ranks_of_a_host_share_its_cores_for_workers(
    monkeypatch, cores, ranks, scoring_ranks, expected
):
    monkeypatch.setattr("lagrpo.rewards.pool.usable_cores", lambda: cores)
    assert count_workers(ranks, scoring_ranks) == expected
