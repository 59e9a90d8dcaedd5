"""The completions in flight, as arrays: what the next step feeds, and rows that fill, move and
end."""

from __future__ import annotations

import numpy as np
import pytest

from lagrpo.rollout.decoding import number_tokens
from lagrpo.rollout.rows import Row, Rows
from lagrpo.types import Prompt, Request

REQUEST = Request(1, 0, Prompt(0, (), None))


def begin_rows(count: int, longest: int) -> Rows:
    """Rows of which row r has the random numbers r, r + 0.01 …"""
    rows = Rows(count, longest)
    uniform = [row + 0.01 * np.arange(longest) for row in range(count)]
    rows.begin([Row(REQUEST, None) for _ in range(count)], uniform)
    return rows


def sample(rows: Rows, tokens: dict[int, int]) -> None:
    """Appends a token to each row that `tokens` names, with the log-prob -token / 8."""
    ids = np.array(list(tokens.values()))
    rows.add_sampled(np.array(list(tokens)), ids, -ids / 8, version=0)


def test_tokens_are_numbered_row_after_row():
    rows, places = number_tokens(np.array([2, 0, 1, 3]), np.array([10, 20, 30, 0]))
    assert rows.tolist() == [0, 0, 2, 3, 3, 3]
    assert places.tolist() == [10, 11, 30, 0, 1, 2]


def test_reply_is_fed_with_the_token_before_it_next_to_rows_that_sample():
    rows = begin_rows(3, 8)
    sample(rows, {0: 5, 1: 6, 2: 7})
    rows.num_next[[1, 2]] = 0  # their turns have ended
    assert rows.indices_to_feed().tolist() == [0]
    assert rows.indices_waiting() == [1, 2]

    sample(rows, {0: 8})
    rows.add_reply(1, (20, 21))
    ids, counts = rows.next_tokens()
    assert ids.tolist() == [8, 6, 20, 21]
    assert counts.tolist() == [1, 3, 0]
    # Row 1 has three tokens, the reply's included, so its next random number is the fourth.
    assert rows.next_uniform(rows.indices_to_feed()).tolist() == pytest.approx([0.02, 1.03])

    sample(rows, {0: 9, 1: 10})
    ids, counts = rows.next_tokens()
    assert ids.tolist() == [9, 10]
    assert counts.tolist() == [1, 1, 0]
    assert rows.turn(1) == [10]
    assert rows.num_sampled.tolist() == [3, 2, 1]


def test_row_may_fill_its_arrays():
    rows = begin_rows(2, 4)
    sample(rows, {0: 5, 1: 6})
    rows.add_reply(0, (20, 21))
    sample(rows, {0: 7, 1: 8})
    row = rows.active[0]
    rows.retire([0], [(1, 0)])
    assert row.tokens.tolist() == [5, 20, 21, 7]
    assert row.is_sampled.tolist() == [True, False, False, True]
    np.testing.assert_array_equal(row.logp, [-5 / 8, np.nan, np.nan, -7 / 8])


def test_row_that_moves_continues_with_its_tokens_and_random_numbers():
    rows = begin_rows(4, 3)
    sample(rows, {0: 5, 1: 6, 2: 7, 3: 8})
    first, second, third, fourth = rows.active
    # As `plan_moves` plans it: the last row takes the place of the first.
    rows.retire([0, 2], [(3, 0)])
    assert rows.active == [fourth, second]
    assert (first.has_ended, third.has_ended) == (True, True)
    assert (first.tokens.tolist(), third.tokens.tolist()) == ([5], [7])
    assert rows.last_tokens(np.array([0, 1])).tolist() == [8, 6]
    assert rows.next_uniform(np.array([0, 1])).tolist() == pytest.approx([3.01, 1.01])

    # A new row takes the next place, without what was there before.
    new = Row(REQUEST, None)
    rows.begin([new], [np.array([0.5, 0.6, 0.7])])
    assert rows.lengths[2] == 0
    assert rows.next_uniform(np.array([2])).tolist() == [0.5]
    sample(rows, {0: 9, 1: 10, 2: 11})
    rows.retire([0, 1, 2], [])
    assert fourth.tokens.tolist() == [8, 9]
    assert second.tokens.tolist() == [6, 10]
    assert new.tokens.tolist() == [11]
    assert len(rows) == 0


def test_row_takes_no_reply_from_the_row_before_it():
    """Its place held a completion with a reply, whose tokens were not sampled."""
    rows = begin_rows(1, 4)
    sample(rows, {0: 5})
    rows.add_reply(0, (20, 21))
    rows.retire([0], [])
    new = Row(REQUEST, None)
    rows.begin([new], [np.zeros(4)])
    sample(rows, {0: 6})
    sample(rows, {0: 7})
    rows.retire([0], [])
    assert new.is_sampled.tolist() == [True, True]
    assert new.logp.tolist() == [-6 / 8, -7 / 8]
