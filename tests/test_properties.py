"""Whatever is handed in is taken, with what follows from it, or refused as documented. `make fuzz` draws more."""

from __future__ import annotations

import hypothesis
import pytest
from hostile import TARGETS, UNHURRIED

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
