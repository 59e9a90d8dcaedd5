"""The processes that other tests run their ranks in: what they say where a rank fails."""

from __future__ import annotations

import os
import threading
from collections.abc import Iterator
from typing import Any

import pytest
from ranks import Ranks, RanksError


def place(group: Any, *given: int) -> tuple[int, ...]:
    return group.rank(), group.size(), *given


def fail_on_last(group: Any, how: str) -> None:
    if group.rank() == group.size() - 1:
        if how == "raises":
            raise KeyError("a reason")
        if how == "dies":
            os._exit(7)
        threading.Event().wait()
    if how == "raises":
        group.barrier().wait()


@pytest.fixture(scope="module")
def two(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Ranks]:
    pair = Ranks(tmp_path_factory.mktemp("two"), 2)
    yield pair
    pair.close()


def test_a_function_runs_on_the_ranks_of_a_group_of_the_size_that_is_asked_for(two):
    assert two.run(place, 5) == [(0, 2, 5), (1, 2, 5)]
    assert two.run(place, size=1) == [(0, 1)]


@pytest.mark.parametrize(
    ("how", "deadline", "said"),
    [
        ("raises", 60.0, r"(?s)rank 0: .*rank 1: Traceback.*fail_on_last.*KeyError: 'a reason'"),
        ("dies", 60.0, r"(?s)rank 0: returned.*rank 1: ended with exit code 7"),
        ("hangs", 2.0, r"(?s)rank 0: returned.*rank 1: still running.*fail_on_last"),
    ],
)
def test_what_a_rank_fails_of_is_said_and_the_next_request_finds_others(two, how, deadline, said):
    with pytest.raises(RanksError, match=said):
        two.run(fail_on_last, how, deadline=deadline)
    assert two.run(place) == [(0, 2), (1, 2)]
