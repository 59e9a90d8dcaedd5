"""The threads of this process: what sets their number, what it holds for, and who hears of it."""

from __future__ import annotations

import ctypes
import functools
import os
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch

from lagrpo.backends.cpu import library
from lagrpo.runs.environment import collect_environment
from lagrpo.threads import cores, team
from lagrpo.threads.readings import Reading


@pytest.fixture(autouse=True)
def _threads_as_they_were() -> Iterator[None]:
    before = torch.get_num_threads()
    yield
    team.release()
    torch.set_num_threads(before)


@pytest.fixture
def two_threads(monkeypatch) -> None:
    """PyTorch has two, and nobody decided that."""
    for name in team.DECIDED:
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setattr(cores, "read_quota", lambda: None)
    monkeypatch.setattr(cores, "count_cores", lambda: 2)
    torch.set_num_threads(2)


def crowded_then_free() -> Callable[[], Reading]:
    """Readings half a second apart: ten seconds in which a thread waits all the time, then an idle machine."""
    state = {"clock": 0.0, "waited": 0.0, "free": 0.0}

    def reading() -> Reading:
        state["clock"] += 0.5
        state["waited" if state["clock"] < 10 else "free"] += 0.5
        return Reading(state["clock"], state["clock"], {1: state["waited"]}, state["free"])

    return reading


def looks(team: team.Team, count: int) -> list[int]:
    numbers = []
    for _ in range(count):
        team.look()
        numbers.append(team.threads)
    return numbers


def test_a_change_is_put_into_effect_and_logged_once_in_each_direction(caplog):
    effects: list[int] = []
    caplog.set_level("INFO")
    two = team.Team(2, adapt=True, reading=crowded_then_free(), number=effects.append)
    looks(two, 100)
    assert effects == [1, 2]
    assert [line.partition(":")[0] for line in caplog.messages] == [
        "other programs keep cores busy",
        "cores are free again",
    ]
    assert "model.threads fixes the number" in caplog.messages[0]
    assert "`threads` in metrics.jsonl" in caplog.messages[1]
    two._last = two._noted = None
    two._read = crowded_then_free()
    looks(two, 100)
    assert effects == [1, 2, 1, 2]
    assert len(caplog.messages) == 2


def test_an_explicit_number_is_not_adapted():
    effects: list[int] = []
    fixed = team.Team(2, adapt=False, reading=crowded_then_free(), number=effects.append)
    assert set(looks(fixed, 100)) == {2}
    assert effects == []


def test_a_system_that_says_nothing_is_said_so_and_nothing_changes():
    effects: list[int] = []
    blind = team.Team(2, adapt=True, reading=lambda: None, number=effects.append)
    assert set(looks(blind, 100)) == {2}
    assert effects == []
    assert blind.metrics() == {"threads": 2, "seconds_waiting": None}
    assert "does not report" in blind.describe()


def test_the_metrics_of_a_batch_are_the_fewest_threads_and_what_they_waited():
    two = team.Team(2, adapt=True, reading=crowded_then_free(), number=lambda n: None)
    looks(two, 5)
    assert two.metrics() == {"threads": 1, "seconds_waiting": 3.0}  # five looks and this one
    looks(two, 40)
    assert two.threads == 2
    assert two.metrics()["threads"] == 1
    assert two.metrics() == {"threads": 2, "seconds_waiting": 0.0}


@pytest.mark.usefixtures("two_threads")
def test_the_setting_fixes_the_number_and_the_default_adapts():
    team.start(1)
    assert torch.get_num_threads() == 1
    assert team.describe() == "1"
    assert team._team is not None
    assert not team._team.adapts
    team.start(None)
    assert torch.get_num_threads() == 2  # PyTorch's own again, not what was left of the run before
    assert team._team.adapts
    team.start(None, "cuda")
    assert not team._team.adapts


@pytest.mark.usefixtures("two_threads")
def test_a_run_records_the_threads_it_may_use_not_those_that_a_busy_machine_left(monkeypatch):
    monkeypatch.setattr(team, "Team", functools.partial(team.Team, reading=crowded_then_free()))
    team.start(None)
    assert team._team is not None
    looks(team._team, 5)
    assert torch.get_num_threads() == 1
    assert collect_environment()["threads"] == 2


@pytest.mark.usefixtures("two_threads")
def test_the_default_counts_the_quota_unless_the_user_decided(monkeypatch):
    monkeypatch.setattr(cores, "read_quota", lambda: 0.7)
    assert team.choose_threads(2) == 1
    monkeypatch.setenv("OMP_NUM_THREADS", "2")
    assert team.choose_threads(2) == 2
    monkeypatch.setenv("OMP_NUM_THREADS", "")
    assert team.choose_threads(2) == 1
    team.start(2)
    assert torch.get_num_threads() == 2


@pytest.mark.usefixtures("two_threads")
def test_what_was_lowered_is_given_back_at_the_end_unless_somebody_else_set_it():
    team.start(1)
    team.release()
    assert torch.get_num_threads() == 2
    team.start(1)
    torch.set_num_threads(3)
    team.release()
    assert torch.get_num_threads() == 3


@pytest.mark.usefixtures("two_threads")
def test_looking_is_cheap_between_the_windows_and_adapts_after_them(monkeypatch, caplog):
    now, readings = [0.0], []
    reading = crowded_then_free()
    monkeypatch.setattr(team, "_due", 0.0)
    monkeypatch.setattr("time.monotonic", lambda: now[0])
    monkeypatch.setattr(team, "_team", team.Team(2, adapt=True, reading=lambda: readings.append(1) or reading()))
    caplog.set_level("INFO")
    for _ in range(200):
        now[0] += 0.01
        team.look()
    assert len(readings) in (5, 6)  # one to begin with, and one every half second of two
    assert torch.get_num_threads() == 1
    assert len(caplog.messages) == 1


def openmp_threads() -> int:
    """Of the calling thread's next parallel region, as OpenMP itself says."""
    library = next(Path(torch.__file__).parent.glob("lib/libgomp*.so*"), None)
    if library is None:
        pytest.skip("PyTorch's OpenMP here is not GNU's")
    return ctypes.CDLL(str(library)).omp_get_max_threads()


def test_one_number_holds_for_pytorch_and_for_the_kernels():
    """They load the same OpenMP (kernels/build.py), whose number PyTorch sets for the calling thread."""
    for threads in (2, 1, 3):
        torch.set_num_threads(threads)
        assert openmp_threads() == threads
    if library.why_not() is not None:
        pytest.skip("there is no C compiler")
    ours = {line.split()[-1] for line in Path("/proc/self/maps").read_text().splitlines() if "libgomp" in line}
    assert sum(Path(torch.__file__).resolve().parent in Path(os.path.realpath(path)).parents for path in ours) == 1
    assert all("torch" in path or "site-packages" in path for path in ours)
