"""Texts and numbers for people."""

from __future__ import annotations

import doctest
import unicodedata

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from lagrpo import errors
from lagrpo.terminal import text


def test_the_examples_in_the_docstrings_hold():
    for module, examples in ((text, 4), (errors, 2)):
        results = doctest.testmod(module)
        assert results.attempted >= examples
        assert results.failed == 0


@given(st.text())
def test_visible_text_has_no_control_character_and_keeps_everything_else(written):
    shown = errors.visible(written)
    assert len(shown) == len(written)
    assert all(unicodedata.category(c) != "Cc" for c in shown if c not in "\n\t")
    assert all(a == b for a, b in zip(written, shown, strict=True) if unicodedata.category(a) != "Cc")


@given(st.lists(st.floats(-1e6, 1e6), min_size=1, max_size=200))
def test_a_sparkline_fits_its_width_and_rises_with_its_values(values):
    assert len(text.sparkline(values)) == min(30, len(values))
    rising = text.sparkline(sorted(values))
    assert list(rising) == sorted(rising)


def test_a_constant_has_a_flat_sparkline():
    assert text.sparkline([0.5, 0.5]) == "▁▁"


def test_numpy_numbers_are_numbers():
    assert text.formatted(np.float32(0.5), ".1%") == "50.0%"
    assert text.formatted(np.int64(7), "d") == "7"
    assert text.formatted("7", "d") == "–"
