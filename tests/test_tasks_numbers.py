"""Numerals and boxes: the grammar at the head of lagrpo.tasks.numbers, and properties that hold of any text."""

from __future__ import annotations

from fractions import Fraction
from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from lagrpo.tasks.numbers import (
    Numeral,
    find_first_numeral,
    find_last_box,
    find_last_numeral,
    find_numerals,
    merge_fractions,
    simplify,
)


def read_last_number(text: str, found: list[Numeral]) -> Fraction | None:
    last = find_last_numeral(text, found)
    return last.value if last else None


def read_first_number(text: str, found: list[Numeral]) -> Fraction | None:
    numeral = find_first_numeral(text, found)
    return numeral.value if numeral else None


def values(text: str) -> list[Fraction | None]:
    return [numeral.value for numeral in find_numerals(text)]


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("7 and 12", [7, 12]),
        ("1,234,567.50", [Fraction("1234567.5")]),
        ("0,123", [None]),
        ("12,34", [None]),
        (".5 0.5 5.", [Fraction(1, 2), Fraction(1, 2), 5]),
        ("-7 (-7) -$7 $-7 10-7 10 - 7", [-7, -7, -7, -7, 10, 7, 10, 7]),
        ("= - 7", [-7]),
        (":\n- 7", [7]),
        ("minus 7, negative 8", [-7, -8]),
        ("7km 7k 7 thousand 7 million", [7, 7000, 7000, 7_000_000]),
        ("1e6 1e1000 1e", [10**6, None, 1]),
        ("x7 7x7 0x1F 1_000 7.1.2 v1.5", [None] * 6),
        ("7² 7½ ７ ٧ ②", [None] * 5),
        ("9" * 100 + " " + "9" * 101, [10**100 - 1, None]),
        ("is...7", [7]),
        ("_7_ __8__", [7, 8]),
        ("no number, seven", []),
    ],
)
def test_numerals(text, expected):
    assert values(text) == expected


def test_numerals_say_where_they_are():
    text = "from $1,200 to x7"
    assert [text[numeral.start : numeral.end] for numeral in find_numerals(text)] == ["1,200", "x7"]


@pytest.mark.parametrize(
    ("text", "last", "first"),
    [
        ("3 + 4 = 7", 7, 7),
        ("7 = 3 + 4", None, 7),
        ("6 or 7", None, None),
        ("7 or 7", 7, 7),
        ("6\n7", 7, 6),
        ("2 * 3 * 10 = 60 dollars", 60, 60),
        ("7, because 3 + 4 = 8", 8, 7),
        ("3:30", None, None),
        ("Step 1: 7", 7, 1),
        ("", None, None),
    ],
)
def test_which_number_a_text_names(text, last, first):
    found = find_numerals(text)
    assert read_last_number(text, found) == last
    assert read_first_number(text, found) == first


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("3/4", [Fraction(3, 4)]),
        ("3 / 4", [Fraction(3, 4)]),
        ("3/0", [3, 0]),
        ("1/2/3", [Fraction(1, 2), 3]),
        ("3 4", [3, 4]),
    ],
)
def test_fractions_are_merged(text, expected):
    assert [numeral.value for numeral in merge_fractions(text, find_numerals(text))] == expected


@pytest.mark.parametrize(
    ("latex", "expected"),
    [
        (r"\frac{3}{4}", "3/4"),
        (r"\dfrac12", "1/2"),
        (r"\$1{,}080", "$1,080"),
        (r"10\,000\%", "10000%"),
        (r"3 \times 4 \cdot 5 \div 6", "3 * 4 * 5 / 6"),
        (r"\sqrt{16}", "root"),
        (r"\sqrt[3]{8}", "root"),
        (r"7 \text{ km}", "7 { km}"),
    ],
)
def test_plain_spells_latex_out(latex, expected):
    assert " ".join(simplify(latex).split()) == expected


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        (r"\boxed{1} \boxed{2}", "2"),
        (r"\boxed{\frac{1}{2}}", r"\frac{1}{2}"),
        (r"\boxed{\boxed{3}}", "3"),
        (r"\boxed{4} \boxed{5", "4"),
        (r"\boxed{\{1, 2\}}", r"\{1, 2\}"),
        (r"\fbox{6}", "6"),
        (r"\boxed {7}", "7"),
        (r"\boxed{}", ""),
        ("}}{{", None),
        ("boxed{8}", None),
        ("", None),
    ],
)
def test_last_box(text, expected):
    assert find_last_box(text) == expected


@given(st.text(alphabet="{}\\boxed 7", max_size=60))
def test_a_box_that_is_appended_is_the_last(text):
    assert find_last_box(text + r" \boxed{42}") == "42"


@given(st.text(max_size=80))
def test_any_text_can_be_read(text):
    found = find_numerals(simplify(text))
    read_last_number(text, found)
    read_first_number(text, found)
    assert all(0 <= a.start < a.end <= b.start for a, b in pairwise(found))


@given(st.integers(-(10**12), 10**12), st.sampled_from(["", "The answer is ", "3 + 4 = ", "**", "$", "("]))
def test_an_integer_is_read_however_it_is_grouped(number, before):
    for written in (str(number), f"{number:,}", f"{number}.0", f"{number} apples."):
        text = before + written
        assert read_last_number(text, find_numerals(text)) == number


@given(
    st.lists(st.integers(0, 99), min_size=2, max_size=6, unique=True), st.sampled_from([" ", ", ", " or ", "/", " + "])
)
def test_a_list_or_an_expression_names_no_number(listed, joint):
    text = joint.join(map(str, listed))
    assert read_last_number(text, find_numerals(text)) is None
    assert read_first_number(text, find_numerals(text)) is None


@pytest.mark.parametrize(
    "junk", ["7 ", "{", r"\boxed{", "7,", "- ", "answer is ", r"\frac", r"\sqrt{", " or", "7.", "=-"]
)
def test_long_junk_is_read_in_linear_time(junk):
    """A hundred thousand characters: a reader that is quadratic takes minutes."""
    text = junk * (100_000 // len(junk))
    found = find_numerals(simplify(text))
    read_last_number(text, found)
    find_last_box(text)
