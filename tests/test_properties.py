"""Whatever is handed in is taken, with what follows from it, or refused as documented. `make fuzz` draws more."""

from __future__ import annotations

import hypothesis
import pytest
from hostile import TARGETS, UNHURRIED
from hypothesis import strategies as st

from lagrpo.rollout.schedule import Schedule, lags, largest_lag

FEW = hypothesis.settings(max_examples=40, derandomize=True, database=None, suppress_health_check=UNHURRIED)


@pytest.mark.parametrize("name", TARGETS)
def test_inputs_are_taken_or_refused(name):
    seen = set()

    @FEW
    @hypothesis.given(TARGETS[name].inputs)
    def check(value):
        seen.add(TARGETS[name](value))

    check()
    assert True in seen


@hypothesis.given(
    st.sampled_from(["every", "lagged", "budget"]),
    st.integers(0, 9),
    st.integers(1, 3),
    st.integers(1, 20),
    st.integers(1, 3),
)
def test_the_largest_lag_is_that_of_the_batches(kind, v, stages, batches, i):
    """Of a run of any length it is known at once: a dry run of a million batches does not count them."""
    schedule = Schedule(kind, v if kind == "lagged" else v + 1, 1.0 if kind == "budget" else None)
    assert largest_lag(schedule, stages, batches, i) == max(lags(schedule, stages, batches, i))
    assert largest_lag(Schedule("every", 10), 3, 10**12 + 7, 2) == 32
