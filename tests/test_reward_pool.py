"""The pool of worker processes: three outcomes, order, overlap, and that an error concerns one
completion only."""

from __future__ import annotations

import logging
import os
import sys
import time
from collections.abc import Iterator

import pytest
import sample_rewards
from scoring import make_completion, make_group, outcomes

from lagrpo.rewards.pool import RewardError, RewardPool
from lagrpo.types import Group, Outcome, Prompt


@pytest.fixture(scope="module")
def pool() -> Iterator[RewardPool]:
    with RewardPool(
        sample_rewards.act, workers=2, deadline=1.0, memory=0.5, max_without_reward=1.0
    ) as shared:
        yield shared


def test_error_leaves_that_completion_unscored_and_no_other(pool):
    for text, outcome in [
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
        assert [(o.reward, o.reason) for o in outcomes(scored)] == [(1.0, ""), outcome, (0.0, "")]
        assert outcomes(scored)[1].kind == ("unscored" if outcome[1] else "scored")


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
            RewardError, match=r"3 of 4 completions(.|\n)*2 x unscored: .*ValueError: bad\n  1 x"
        ):
            next(iterator)
        with pytest.raises(RewardError, match="of 64 completions have no reward"):
            list(strict.score(sampled()))
    # 64 completions are 8 groups; some more are sampled until the first have been scored.
    assert len(seen) < 200
