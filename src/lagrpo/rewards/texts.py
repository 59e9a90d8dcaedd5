"""Texts as they are compared: without thinking, and in one normal form.

Reference answers and completions have the same normal form, so none of them is wrong because of
the way in which its characters are typed.
"""

from __future__ import annotations

import ast
import json
import re
import unicodedata
from contextlib import suppress
from decimal import Decimal
from typing import Any

from lagrpo.types import THOUGHT_BEGIN, THOUGHT_END

_DIGIT_GROUPS = re.compile(r"(?<![\d.,])\d{1,3}(?:[\u00a0\u2007\u2009\u202f]\d{3})+(?!\d)")
_GROUP_SPACES = re.compile(r"[\u00a0\u2007\u2009\u202f]")
_LINE_END = re.compile(r"\r\n?")
_OTHER_DIGIT = re.compile(r"[^\D0-9]")
_SPELLINGS = str.maketrans(
    {
        **{wide: wide - 0xFEE0 for wide in range(0xFF01, 0xFF5F)},  # ！ to ～
        **dict.fromkeys(range(0x2000, 0x200B), " "),
        **dict.fromkeys("\u00a0\u202f\u205f\u3000", " "),
        **dict.fromkeys("−﹣‐‑", "-"),
        **dict.fromkeys("‘’", "'"),
        **dict.fromkeys("“”", '"'),
        "٫": ".",
        "٬": ",",
        "\ufeff": "",  # the mark at the beginning of some files
    }
)


ANSWER_FIELDS = ("answer", "answers", "ground_truth", "target", "value")
"""Fields that hold the answer in an object."""

_TEXT = r"""(?:'(?:[^'\\]|\\.)*'|"(?:[^"\\]|\\.)*")"""
_LISTED = re.compile(r"[\s\[{(]*['\"]")
_NUMPY_ARRAY = re.compile(rf"\s*\[{_TEXT}(?:\s+{_TEXT})*\]\s*", re.DOTALL)


def find_accepted(text: str) -> list[Any]:
    """Returns the accepted answers that a text lists; nothing for any other text.

    Cells of CSV hold lists of texts as JSON, Python or NumPy prints them, or an object with one of
    ANSWER_FIELDS. A list with anything but texts, such as [1, 2], may be an answer itself.

    >>> find_accepted("['Paris', 'paris']"), find_accepted("['a' 'b']"), find_accepted("[1, 2]")
    (['Paris', 'paris'], ['a', 'b'], [])
    """
    if not text.lstrip().startswith(("[", "{", "(")) or not _LISTED.match(text):
        return []
    if _NUMPY_ARRAY.fullmatch(text):
        return [ast.literal_eval(entry) for entry in re.findall(_TEXT, text, re.DOTALL)]
    value = parse_literal(text)
    if not isinstance(value, dict):
        return _flatten(value)
    field = next((name for name in ANSWER_FIELDS if name in value), None)
    if field is None or value[field] is None:
        return []
    return value[field] if isinstance(value[field], list) else [value[field]]


def parse_literal(text: str) -> Any:
    """Returns the value of JSON, or of a literal of Python; the text itself if it is neither."""
    for parse in (json.loads, ast.literal_eval):
        with suppress(ValueError, SyntaxError, RecursionError, MemoryError):
            return parse(text)
    return text


def _flatten(value: Any) -> list[str]:
    """Returns the texts of nested lists; nothing if there is anything else, or only a text."""
    if not isinstance(value, list | tuple | set):
        return []
    texts: list[str] = []
    for entry in value:
        entries = [entry] if isinstance(entry, str) else _flatten(entry)
        if not entries:
            return []
        texts += entries
    return texts


def text_after_thinking(text: str, prefix: str = "") -> str:
    """Returns a turn without the thinking that it begins with; empty if the thinking has no end.

    prefix: the beginning of the turn that the prompt has. Many chat templates begin the thinking
        there, so a turn may have its end alone, and a turn that was cut has not even that.
    """
    end = THOUGHT_END.search(text)
    if end is not None:
        return text[end.end() :]
    last_part_of_prefix = THOUGHT_END.split(prefix)[-1]
    is_opened = THOUGHT_BEGIN.match(text.lstrip()) or THOUGHT_BEGIN.search(last_part_of_prefix)
    return "" if is_opened else text


def normal_form(text: str) -> str:
    r"""Returns a text in the form in which answers are compared.

    Letters with accents are one character (NFC), a line ends with \n, digits of all scripts are
    0-9, wide characters are ASCII, and spaces, hyphens, minus signs and quotation marks are those
    of a keyboard. Thin and no-break spaces between groups of three digits disappear. Everything
    else stays: ² is not 2, and a dash is not a minus.

    >>> normal_form("－１8\u202f000 ²")
    '-18000 ²'
    """
    if text.isascii():
        return _LINE_END.sub("\n", text)
    text = _LINE_END.sub("\n", unicodedata.normalize("NFC", text))
    text = _DIGIT_GROUPS.sub(lambda number: _GROUP_SPACES.sub("", number[0]), text)
    text = _OTHER_DIGIT.sub(lambda digit: str(unicodedata.decimal(digit[0])), text)
    return text.translate(_SPELLINGS)


def write_number(number: float) -> str:
    """Returns the fewest digits that give the number, without an exponent.

    >>> write_number(1e-05), write_number(5.0)
    ('0.00001', '5.0')
    """
    return f"{Decimal(repr(float(number))):f}"


def read_answer(completion: str, prefix: str = "") -> str:
    """Returns what a completion says after its thinking, in normal form.

    prefix: the beginning of the completion that the prompt has.
    """
    return normal_form(text_after_thinking(completion, prefix))
