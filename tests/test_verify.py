"""The verifier: three outcomes, order, overlap, and that what goes wrong with one completion concerns no other."""

from __future__ import annotations

import os
import signal
import sys
import time
from collections import Counter
from collections.abc import Iterator

import pytest
import torch
import verify_judges

from lagrpo.types import Completion, Group, Outcome, Prompt
from lagrpo.verify import Verifier, VerifierError, worker
from lagrpo.verify.verifier import Tally, describe_excess

EMPTY = torch.empty(0)
WAITING = 60.0
"""Seconds: many times what anything here takes."""


def group(*texts: str, key: int = 0, gold: object = "7") -> Group:
    return Group(Prompt(key, (), gold), tuple(Completion(EMPTY, EMPTY, EMPTY, True, text) for text in texts))


def outcomes(judged: Group) -> list[tuple[str, float | None, str]]:
    return [(o.kind, o.reward, o.reason) for c in judged.completions if (o := c.outcome) is not None]


@pytest.fixture(scope="module")
def verifier() -> Iterator[Verifier]:
    with Verifier(verify_judges.by_name, workers=2, deadline=1.0, max_without_reward=1.0) as shared:
        yield shared


@pytest.mark.parametrize(
    ("text", "reward"),
    [("7", 1.0), ("8", 0.0), ("float32", 0.25), ("bool_", 1.0), ("true", 1.0), ("int", -3.0), ("sleep 0.3", 1.0)],
)
def test_any_finite_number_is_a_reward(verifier, text, reward):
    (judged,) = verifier.judge([group(text)])
    assert outcomes(judged) == [("scored", reward, "")]


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        ("raise bad luck", "the judge raised ValueError: bad luck"),
        ("quit now", "the judge raised SystemExit: now"),
        ("unjudgeable no gold answer", "no gold answer"),
        ("exit 3", "the worker process ended itself with exit code 3 while it judged"),
        ("exit 0", "the worker process ended itself with exit code 0 while it judged"),
        ("segfault", "the worker process was ended by SIGSEGV while it judged"),
        ("hang", "no verdict within 1 s"),
        ("spin", "no verdict within 1 s"),
        ("nan", "the judge returned nan (float), not a finite number"),
        ("inf", "the judge returned -inf (float), not a finite number"),
        ("text", "the judge returned '1.0' (str), not a finite number"),
        ("nothing", "the judge returned None (NoneType), not a finite number"),
        ("complex", "the judge returned 1j (complex), not a finite number"),
        ("array", "the judge returned array([1., 1.]) (ndarray), not a finite number"),
    ],
)
def test_whatever_goes_wrong_rejects_that_completion_alone(verifier, text, reason):
    (judged,) = verifier.judge([group("7", text, "8", "7")])
    assert outcomes(judged) == [
        ("scored", 1.0, ""),
        ("unscored", None, reason),
        ("scored", 0.0, ""),
        ("scored", 1.0, ""),
    ]


def test_completions_behind_hung_and_dead_workers_are_all_judged(verifier):
    texts = ["hang", "exit 1", "spin", "segfault", "exit 0"] * 2 + ["7"] * 50
    (judged,) = verifier.judge([group(*texts)])
    assert [completion.reward for completion in judged.completions] == [None] * 10 + [1.0] * 50


def test_a_hung_worker_does_not_hold_up_the_others(tmp_path):
    """The first group comes back, and the third is judged, while the second waits for the third."""
    door = tmp_path / "door"
    with Verifier(verify_judges.by_name, workers=2, deadline=WAITING) as patient:
        judged = patient.judge([group("7"), group(f"wait {door}"), group(*["7"] * 200, f"open {door}")])
        assert next(judged).rewards == (1.0,)
        assert [g.rewards for g in judged] == [(1.0,), (1.0,) * 201]


def test_groups_come_back_in_order_and_otherwise_unchanged(verifier):
    groups = [group(f"sleep {0.1 if key % 3 == 0 else 0}", "7", str(key), key=key, gold=str(key)) for key in range(12)]
    judged = list(verifier.judge(iter(groups)))
    assert [g.prompt for g in judged] == [g.prompt for g in groups]
    assert [[c.text for c in g.completions] for g in judged] == [[c.text for c in g.completions] for g in groups]
    assert [g.rewards for g in judged] == [(1.0, float(key == 7), 1.0) for key in range(12)]


def test_judging_overlaps_with_what_yields_the_groups(verifier, tmp_path):
    """Each group is yielded only when the one before has been judged, the last one when the first has come back."""
    came_back: list[Group] = []

    def sampled() -> Iterator[Group]:
        for number in range(3):
            yield group(f"open {tmp_path / str(number)}")
            assert verify_judges.wait_for(tmp_path / str(number), WAITING)
        end = time.monotonic() + WAITING
        while not came_back and time.monotonic() < end:
            time.sleep(0.01)
            yield group()
        assert came_back

    for judged in verifier.judge(sampled()):
        came_back.append(judged)
    assert [g.rewards for g in came_back[:3]] == [(1.0,)] * 3


def test_completions_that_failed_pass_through_untouched(verifier):
    failed = Completion(EMPTY, EMPTY, EMPTY, False, "", Outcome.failed("the server died"))
    given = Group(Prompt(0, (), "7"), (failed, *group("7").completions))
    (judged,) = verifier.judge([given])
    assert judged.completions[0] is failed
    assert judged.rewards == (1.0,)


def test_no_groups_and_empty_groups(verifier):
    assert list(verifier.judge([])) == []
    assert list(verifier.judge([group()])) == [group()]


def test_an_idle_worker_that_is_killed_is_replaced(verifier):
    for _ in range(2):
        (judged,) = verifier.judge([group("pid")])
        os.kill(int(judged.rewards[0]), signal.SIGKILL)
        time.sleep(0.3)
        (judged,) = verifier.judge([group(*["7"] * 10)])
        assert judged.rewards == (1.0,) * 10


def test_an_abandoned_iteration_leaves_the_verifier_usable(verifier):
    iterator = verifier.judge([group("7"), group("sleep 0.3"), group("7")])
    next(iterator)
    iterator.close()
    assert [judged.rewards for judged in verifier.judge([group("8")])] == [(0.0,)]


def test_worker_processes_import_nothing_heavy(verifier):
    (judged,) = verifier.judge([group("modules")])
    assert judged.rewards == (0.0,)


@pytest.mark.skipif(sys.platform == "win32", reason="POSIX priorities")
def test_worker_processes_give_way_to_the_policy(verifier):
    (judged,) = verifier.judge([group("niceness", "threads")])
    assert judged.rewards == (os.getpriority(os.PRIO_PROCESS, 0) + worker.POLITENESS, 1.0)


def test_text_of_any_kind_reaches_the_judge(verifier):
    for text in ("", "\x00", "\ud800 lone surrogate", "😀" * 1000, "x" * 1_000_000):
        (judged,) = verifier.judge([group(text, gold=text)])
        assert judged.rewards == (1.0,)


def test_a_judge_can_be_an_object():
    with Verifier(verify_judges.Judge(0.5), workers=1) as objective:
        assert [judged.rewards for judged in objective.judge([group("7", "8")])] == [(0.5, 0.0)]


def test_a_judge_that_cannot_be_sent_is_refused():
    with pytest.raises(TypeError, match=r"cannot be sent to worker processes.*top level of a module"):
        Verifier(lambda text, gold: 1.0)

    def nested(text: str, gold: object) -> float:
        return 1.0

    with pytest.raises(TypeError, match="cannot be sent to worker processes"):
        Verifier(nested)


def test_a_judge_that_the_workers_cannot_load_stops_the_run(tmp_path, monkeypatch):
    module = tmp_path / "vanishing_judge.py"
    module.write_text("def judge(text, gold):\n    return 1.0\n")
    monkeypatch.syspath_prepend(str(tmp_path))
    import vanishing_judge  # type: ignore[import-not-found]

    module.unlink()
    with (
        Verifier(vanishing_judge.judge, workers=1) as broken,
        pytest.raises(VerifierError, match="cannot load the judge: ModuleNotFoundError: No module named 'vanishing"),
    ):
        list(broken.judge([group("7")]))


def test_more_rejections_than_allowed_stop_the_run_after_every_group_was_yielded():
    with Verifier(verify_judges.by_name, workers=1, max_without_reward=0.5) as strict:
        assert len(list(strict.judge([group("7", "raise bad"), group("8", "raise bad")]))) == 2
        iterator = strict.judge([group("7", "raise bad", "raise worse"), group("raise bad", gold="12")])
        assert next(iterator).rewards == (1.0,)
        assert next(iterator).rewards == ()
        with pytest.raises(VerifierError) as stopped:
            next(iterator)
    message = str(stopped.value)
    assert "3 of 4 completions have no reward, which is more than the allowed share of 0.5" in message
    assert "2 x unscored: the judge raised ValueError: bad" in message
    assert message.index("2 x unscored") < message.index("1 x unscored: the judge raised ValueError: worse")
    assert "'raise bad', judged against '7'" in message


def test_a_judge_that_rejects_everything_stops_the_run_before_the_batch_is_over():
    seen = []

    def sampled() -> Iterator[Group]:
        for key in range(1000):
            seen.append(key)
            time.sleep(0.01)
            yield group(*["raise bad"] * 8, key=key)

    with Verifier(verify_judges.by_name, workers=1, max_without_reward=0.5) as strict:
        with pytest.raises(VerifierError, match="of 64 completions have no reward"):
            list(strict.judge(sampled()))
        assert len(seen) < 100


@pytest.mark.parametrize(
    ("completions", "unscored", "share", "stops"),
    [
        (8, 2, 0.25, False),
        (8, 3, 0.25, True),
        (8, 0, 0.0, False),
        (8, 1, 0.0, True),
        (8, 8, 1.0, False),
        (0, 0, 0.0, False),
    ],
)
def test_when_too_many_have_no_reward(completions, unscored, share, stops):
    tally = Tally(completions, Counter({"unscored: x": unscored}) if unscored else Counter())
    assert (describe_excess(tally, share) is not None) == stops


def test_failed_completions_count_as_without_a_reward():
    tally = Tally()
    failed = Completion(EMPTY, EMPTY, EMPTY, False, "", Outcome.failed("the server died"))
    tally.add(Group(Prompt(0, (), "7"), (failed, failed)))
    message = describe_excess(tally, 0.5)
    assert message is not None
    assert "2 x failed: the server died" in message


def test_a_closed_verifier_says_so_and_closing_again_is_harmless():
    closed = Verifier(verify_judges.quick, workers=1)
    closed.close()
    closed.close()
    with pytest.raises(VerifierError, match="closed"):
        list(closed.judge([group("7")]))


def test_closing_does_not_wait_for_what_hangs():
    """What hangs would hang for longer than the time limit of a test."""
    busy = Verifier(verify_judges.by_name, workers=2, deadline=1e6)
    iterator = busy.judge(iter([group("7"), group("hang", "spin")]))
    next(iterator)
    time.sleep(0.3)  # both workers have begun
    busy.close()


def test_a_thousand_completions(verifier):
    judged = list(verifier.judge([group(*["7"] * 20) for _ in range(50)]))
    assert [g.rewards for g in judged] == [(1.0,) * 20] * 50
