"""From made-up readings to a number of threads: who comes, who goes, and what is none of our business."""

from __future__ import annotations

from itertools import pairwise

import pytest

from lagrpo.threads.readings import Window
from lagrpo.threads.team import CROWDED, IN_A_ROW, LONGEST_PAUSE, PAUSE, Adaptation


class Machine:
    """`cores` on which our threads spin and `others` compute without a break; every program gets the same share."""

    def __init__(self, cores: int, threads: int, others: float = 0, knows: bool = True) -> None:
        self.cores, self.others, self.knows = cores, others, knows
        self.adaptation = Adaptation(threads)

    def window(self) -> Window:
        threads = self.adaptation.threads
        wanted = threads + self.others
        share = min(1.0, self.cores / wanted)
        free = self.cores - share * wanted
        return Window(0.5, 0.5 * share * threads, 0.5 * (1 - share) * threads, 0.5 * free if self.knows else None)

    def run(self, seconds: float) -> list[int]:
        """The number of threads after each window."""
        return [self.adaptation.look(self.window()) for _ in range(round(2 * seconds))]


@pytest.mark.parametrize(
    ("cores", "others", "threads"),
    [(2, 1, 1), (4, 1, 3), (4, 2, 2), (16, 1, 15), (16, 4, 12), (64, 3, 61), (2, 8, 1), (4, 9, 1)],
)
def test_others_arrive_and_each_core_has_one_thread_within_two_windows(cores, others, threads):
    machine = Machine(cores, cores)
    assert set(machine.run(10)) == {cores}
    machine.others = others
    assert machine.run(1) == [cores, threads]
    assert set(machine.run(4)) == {threads}


def test_others_leave_and_all_threads_are_back_after_a_pause():
    machine = Machine(4, 4, others=2)
    machine.run(20)
    machine.others = 0
    assert machine.run(2)[-1] == 4


def test_a_change_is_not_taken_back_at_once():
    machine = Machine(2, 2, others=1)
    machine.run(1)
    machine.others = 0
    changes = machine.run(PAUSE + 1)
    assert changes.index(2) == 2 * PAUSE - 1  # the window in which the pause is over


def test_one_crowded_window_is_none():
    """Somebody compiled a file."""
    machine = Machine(2, 2)
    for _ in range(20):
        machine.others = 1
        assert machine.run(0.5) == [2]
        machine.others = 0
        assert machine.run(0.5) == [2]


def test_one_core_stays_one_thread():
    for others in (0, 1, 5):
        assert set(Machine(1, 1, others).run(60)) == {1}


def test_the_last_thread_stays():
    assert min(Machine(2, 2, others=50).run(60)) == 1


def test_steal_is_not_waiting():
    """A hypervisor took half of both cores: our threads have their cores, and what they did in that time is less."""
    adaptation = Adaptation(2)
    for _ in range(50):
        assert adaptation.look(Window(0.5, used=0.5, waited=0.01, free=0.5)) == 2


def test_what_a_thread_waits_for_in_passing_changes_nothing():
    adaptation = Adaptation(8)
    for _ in range(50):
        assert adaptation.look(Window(0.5, used=4.0, waited=0.5 * CROWDED - 0.001, free=0.0)) == 8


def test_while_the_others_stay_no_thread_is_added():
    """The CPUs have no room for it, and say so."""
    assert set(Machine(2, 2, others=1).run(600)[1:]) == {1}


def test_waiting_for_something_else_is_not_room():
    """A server generates with all cores but one; our one thread waits for it, and does not compute."""
    adaptation = Adaptation(4)
    for _ in range(IN_A_ROW):
        adaptation.look(Window(0.5, used=0.6, waited=1.4, free=0.0))
    assert adaptation.threads == 1
    for _ in range(100):
        assert adaptation.look(Window(0.5, used=0.0, waited=0.0, free=0.5)) == 1


def test_where_nothing_is_known_of_the_cpus_threads_are_tried_ever_more_rarely():
    tried = Machine(2, 2, others=1, knows=False).run(600)
    starts = [window for window in range(1, len(tried)) if tried[window] > tried[window - 1]]
    pauses = [(b - a) / 2 for a, b in pairwise(starts)]
    assert pauses == sorted(pauses)
    assert pauses[-1] == pytest.approx(LONGEST_PAUSE, abs=2)
    assert tried.count(2) < 0.02 * len(tried)


def test_room_that_is_none_is_tried_ever_more_rarely():
    """The CPUs look free, but a quota that nobody told us of does not let us use them."""
    adaptation, tried = Adaptation(2), []
    for _ in range(1200):
        two = adaptation.threads == 2
        window = Window(0.5, used=0.5, waited=0.5 if two else 0.0, free=0.5)
        tried.append(adaptation.look(window))
    assert tried.count(2) < 0.02 * len(tried)


def test_after_a_long_rest_the_next_ones_leave_is_noticed_soon():
    machine = Machine(2, 2, others=1, knows=False)
    machine.run(60)
    machine.others = 0
    assert machine.run(LONGEST_PAUSE + 1)[-1] == 2
    assert set(machine.run(60)) == {2}
    machine.others = 1
    machine.run(1)
    machine.others = 0
    assert machine.run(PAUSE + 1)[-1] == 2
