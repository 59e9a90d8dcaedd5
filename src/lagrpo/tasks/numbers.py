"""Numbers and boxes in an answer, read the same way by every task.

A *numeral* is a run of the digits 0-9, with or without

- commas between groups of three ("1,234" but not "12,34" or "0,123"), a decimal part ("7.0", ".5"),
  an exponent of at most three digits ("1e6", "1e-05"), leading zeros ("07");
- a sign before it: a hyphen, minus or en dash that touches the numeral (a currency sign may stand
  between) and nothing that it could subtract from ("-7", "(-7)", "-$7", but not "10-7"), after "=",
  ":" or "(" also with spaces; or one of the words "minus" and "negative";
- a unit after it, which is ignored ("7 apples", "7km", "7%"), except that a touching "k" and the
  words hundred, thousand, million, billion and trillion multiply.

These are *unreadable* numerals, without a value: a run with a digit that is none of this ("x7",
"7.1.2", "0x1F", "7,8", "7²"), a run of more than 100 characters, and a run with a digit other than
0-9 ("½"). Number words are not numerals. Texts are in the normal form of `lagrpo.rewards.texts`,
which has the digits of other scripts as 0-9.

Two numerals on one line are *joined* if only spaces, brackets, list punctuation (, ; | & or a colon
without spaces), an operator (+ - * / × ÷ ^ ±, "plus", "minus", "times", "over", "x") or the words
"or", "and", "to" stand between them; or a unit and then an operator ("3 boxes * 4"). A numeral that
is joined to another is part of a list or of an unfinished expression, and names no number:
"1 2 3 4", "6 or 7", "3 + 4". Only a list of equal numbers names one: "7 (7)".
"""

from __future__ import annotations

import ast
import re
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from fractions import Fraction
from itertools import pairwise
from typing import Any

_ODD_DIGITS = r"\d²³¹¼-¾\u2070-\u209f\u2150-\u218b\u2460-\u24ff\u2776-\u2793"
_WORD = rf"[0-9A-Za-z_{_ODD_DIGITS}]"
_TOKEN = re.compile(
    rf"(?:(?<![0-9A-Za-z.])\.(?=[0-9]))?{_WORD}+(?:(?<=[0-9])[.,](?=[0-9]){_WORD}+)*"
    r"(?:(?<=[0-9][eE])[-+][0-9]{1,3}(?![0-9A-Za-z_]))?"
)
_HAS_DIGIT = re.compile(rf"[{_ODD_DIGITS}]")
_NUMERAL = re.compile(
    r"_*(?P<digits>(?:[1-9][0-9]{0,2}(?:,[0-9]{3})+|[0-9]+)(?:\.[0-9]+)?|\.[0-9]+)"
    r"(?:[eE](?P<exponent>[-+]?[0-9]{1,3})(?![A-Za-z]))?(?P<unit>[A-Za-z_]*)"
)

MAX_NUMERAL_LENGTH = 100
MAX_EXPRESSION_LENGTH = 200
MIN_SIGNIFICANT_DIGITS = 4
"""Digits that a decimal must have to stand for the numbers that round to it."""

MAX_SIGN_DISTANCE = 20
"""Characters before a numeral in which its sign is searched for."""

_CURRENCY = r"(?:\\?[$]|[€£¥₹])?"
_NEGATIVE = re.compile(
    rf"(?:(?<![0-9A-Za-z)\]}}%–−-])[-–−]{_CURRENCY}|[$€£][-–−]"
    rf"|[=:(][ ]{{0,3}}[-–−][ ]{{0,3}}{_CURRENCY}"
    rf"|\b(?:minus|negative)[ ]{_CURRENCY})$",
    re.IGNORECASE,
)
_SCALES = {"k": 3, "hundred": 2, "thousand": 3, "million": 6, "billion": 9, "trillion": 12}
_SCALE_WORD = re.compile(r"[ ]?(hundred|thousand|million|billion|trillion)\b", re.IGNORECASE)

_OPERATOR = re.compile(r"[-+*/×·÷⁄^±–−]|\b(?:plus|minus|times|over|x|divided by)\b", re.IGNORECASE)
_UNIT_OPERATOR = re.compile(
    r"[ \t]*[A-Za-z%°]{1,20}[ \t]*(?:[-+*/×·÷−–]|\b(?:plus|minus|times|x)\b)[ \t($€£]*",
    re.IGNORECASE,
)
_LIST = re.compile(r"(?:[ \t,;|&(){}\[\]$€£]|\b(?:or|and|to)\b)*", re.IGNORECASE)

_FRACTION = re.compile(
    r"\\[dt]?frac\s*\{\s*([0-9]{1,40})\s*\}\s*\{\s*([0-9]{1,40})\s*\}|\\[dt]?frac\s*([0-9])([0-9])"
)
_WRAPPER = re.compile(
    r"\\(?:text|textbf|textit|mathrm|mathbf|mbox|left|right|displaystyle)(?![A-Za-z])\s*"
)
_ROOT = re.compile(r"\\sqrt\s*(?:\[[^\[\]]*\])?\s*(?:\{[^{}]*\}|[0-9])")
_BRACE = re.compile(r"\\(?:boxed|fbox)\s*\{|(?<!\\)[{}]")

_NEW_QUESTION = re.compile(
    r"^[ \t>*#]*(?:question|q|problem|exercise|instruction|human|user)\b"
    r"[ \t]*(?P<number>[0-9]*)[ \t*]*:",
    re.IGNORECASE | re.MULTILINE,
)
_FINAL_ANSWER = re.compile(r"####[\s*(\[{:–−-]*[$€£₹\\]*[.0-9A-Za-z]*[0-9}]|</answer>")
_STATED_ANSWER = re.compile(r"\banswer\b[ *_]*(?:is|:|=)[\s*(\[{:–−-]*[$€£₹\\.0-9]", re.IGNORECASE)
_NUMBER_ALONE = re.compile(r"\s*+[$€£₹–−-]*+[0-9][0-9.,]*+[ *.%]*+\s*+")  # never backtracks


@dataclass(frozen=True, slots=True)
class Numeral:
    """A numeral at text[start:end]."""

    value: Fraction | None  # None: unreadable
    start: int
    end: int
    # Digits after the decimal point of a plain decimal with MIN_SIGNIFICANT_DIGITS; else 0.
    places: int = 0


def find_last_box(text: str) -> str | None:
    r"""Returns the content of the last closed \boxed{} (or \fbox{}); None without one.

    Of nested boxes, it is the inner one.

    >>> find_last_box(r"\boxed{1}, no: \boxed{\frac{1}{2}} or \boxed{3")
    '\\frac{1}{2}'
    """
    start, end = max(_find_boxes(text), default=(0, -1))
    return text[start:end] if end >= 0 else None


def _find_boxes(text: str, start: int = 0) -> Iterator[tuple[int, int]]:
    """Yields where the content of each closed box starts and ends, from `start` on, by its end."""
    open_braces: list[tuple[bool, int]] = []  # of each: is it a box, and where its content starts
    for brace in _BRACE.finditer(text, start):
        if brace.group() != "}":
            is_box = brace.group() != "{"
            open_braces.append((is_box, brace.end()))
        elif open_braces:
            is_box, content_start = open_braces.pop()
            if is_box:
                yield content_start, brace.start()


def find_tagged(text: str) -> str:
    """Returns the text within the last <answer> ... </answer>; the whole text without one."""
    # Without the text after the last </answer>, in which every <answer> would be searched for its
    # end in vain.
    before_end, end_tag, _ = text.rpartition("</answer>")
    contents = re.findall("<answer>(.*?)</answer>", before_end + end_tag, re.DOTALL)
    return contents[-1] if contents else text


def first_question(text: str) -> str:
    r"""Returns the part of a completion that answers the question it was asked.

    Further questions that a model makes up after its answer are left out. Such a question begins
    with a line that starts with "Question:", "Q:", "Problem:", "User:" and the like (also with a
    number: "Problem 2:"), if the completion has before it

    - a \boxed{}, "#### 18", or </answer>,
    - or, if the line has no number, "the answer is 18" or nothing but a number.

    The text before the first </think> neither answers nor asks.

    >>> first_question("#### 18\n\nQuestion: Tom has 9 apples.\n#### 9")
    '#### 18\n\n'
    """
    start = text.find("</think>") + 1
    first_box_end = min((end for _, end in _find_boxes(text, start)), default=len(text) + 1)
    states_answer = False
    # An answer may begin before a question and end in it: "####\nQ1: no\nQ2:". So it is searched
    # for from the question before the last one on, which keeps the time linear.
    searched_from = start
    last_question = start
    for question in _NEW_QUESTION.finditer(text, start):
        end = question.start()
        if first_box_end <= end or _FINAL_ANSWER.search(text, searched_from, end):
            return text[:end]
        if not states_answer:
            states_answer = _STATED_ANSWER.search(text, searched_from, end) is not None
        # Before a later question there is not a number alone.
        is_first = last_question == start
        is_number_alone = is_first and _NUMBER_ALONE.fullmatch(text, start, end)
        if (states_answer or is_number_alone) and not question["number"]:
            return text[:end]
        searched_from = last_question
        last_question = end
    return text


def find_reference(answer: str) -> str:
    """Returns the part of a reference answer that counts.

    It is the part after the last "####", within the last <answer> tags, and within the last box, as
    far as the answer has them.

    >>> find_reference("2 + 3 = 5\\n#### 5")
    '5'
    """
    part = find_tagged(answer.rpartition("####")[2])
    box = find_last_box(part)
    if box is not None:
        part = box
    return part.strip()


def simplify(text: str) -> str:
    r"""Returns a text with LaTeX's spelling of numbers made plain.

    \frac{a}{b} becomes a/b; \$ and \% lose the backslash; numbers lose thin spaces and {,}; \times
    becomes *; \text{...} becomes its content; a root becomes the word "root".
    """
    text = text.replace("\\!", "").replace("{,}", ",")
    text = text.replace("\\$", "$").replace("\\%", "%")
    text = re.sub(r"(?<=[0-9])\\,(?=[0-9]{3})", "", text)
    text = text.replace("\\,", " ").replace("\\ ", " ")
    text = re.sub(r"\\(?:times|cdot)(?![A-Za-z])", " * ", text)
    text = re.sub(r"\\div(?![A-Za-z])", " / ", text)
    text = _ROOT.sub(" root ", text)
    text = _FRACTION.sub(_plain_fraction, text)
    return _WRAPPER.sub(" ", text)


def _plain_fraction(match: re.Match[str]) -> str:
    r"""Returns \frac{a}{b} (groups 1 and 2) or \frac12 (groups 3 and 4) as a/b between spaces.

    A sign stays next to the number.
    """
    follows_sign = match.string[: match.start()].endswith(("-", "−", "–"))
    space = "" if follows_sign else " "
    return f"{space}{match[1] or match[3]}/{match[2] or match[4]} "


def find_numerals(text: str) -> list[Numeral]:
    """Returns the numerals of a text in order, with the unreadable ones."""
    return [
        _read_numeral(text, token)
        for token in _TOKEN.finditer(text)
        if _HAS_DIGIT.search(token.group())
    ]


def _read_numeral(text: str, token: re.Match[str]) -> Numeral:
    """Returns the numeral that a token of the text is."""
    start = token.start()
    end = token.end()
    parts = None
    if end - start <= MAX_NUMERAL_LENGTH:
        parts = _NUMERAL.fullmatch(token.group())
    if parts is None:
        return Numeral(None, start, end)

    digits = parts["digits"].replace(",", "")
    scale = _find_scale(text, end, parts["unit"])  # a power of ten
    exponent = int(parts["exponent"] or 0)
    value = Fraction(digits) * Fraction(10) ** (exponent + scale)
    if _NEGATIVE.search(text[max(0, start - MAX_SIGN_DISTANCE) : start]):
        value = -value

    places = 0
    is_plain = not scale and not parts["exponent"]
    num_significant = len(digits.replace(".", "").lstrip("0"))
    if is_plain and num_significant >= MIN_SIGNIFICANT_DIGITS:
        _, _, decimals = digits.partition(".")
        places = len(decimals)
    return Numeral(value, start, end, places)


def _find_scale(text: str, end: int, unit: str) -> int:
    """Returns the power of ten of the word after a numeral, else of a touching "k", else 0."""
    word = _SCALE_WORD.match(text, end)
    if word is not None:
        return _SCALES[word[1].lower()]
    return _SCALES["k"] if unit.lower() == "k" else 0


def merge_fractions(text: str, numerals: list[Numeral]) -> list[Numeral]:
    """Reads every "a/b" (b not 0) as one numeral of that value.

    Of "a/b/c", only the first two numbers are read so.
    """
    merged: list[Numeral] = []
    is_quotient = False  # the last of them, which is not divided again
    for numeral in numerals:
        quotient = None
        if merged and not is_quotient:
            quotient = _divide(text, merged[-1], numeral)
        is_quotient = quotient is not None
        if quotient is not None:
            merged[-1] = quotient
        else:
            merged.append(numeral)
    return merged


def _divide(text: str, left: Numeral, right: Numeral) -> Numeral | None:
    """Returns the numeral "left/right", or None if the text has no such fraction."""
    if left.value is None or not right.value:
        return None
    if text[left.end : right.start].strip() not in ("/", "⁄"):
        return None
    return Numeral(left.value / right.value, left.start, right.end)


def are_joined(text: str, left: Numeral, right: Numeral) -> bool:
    """True if two numerals, one after the other, are of one list or expression."""
    between = text[left.end : right.start]
    if _UNIT_OPERATOR.fullmatch(between):
        return True
    if _LIST.fullmatch(_OPERATOR.sub(" ", between)) is None and between != ":":
        return False
    return bool(_OPERATOR.search(between)) or left.value is None or left.value != right.value


def read_number(text: str, *, first: bool = False, fractions: bool = False) -> Numeral | None:
    """Returns the numeral that names the last number of a text in plain spelling, or the `first`.

    With `fractions`, a/b is one number. Returns None for a text without numerals, and for a numeral
    that is joined to its neighbor. If an expression with "=" comes first, the first number is the
    one after its "=".
    """
    numerals = find_numerals(text)
    if fractions:
        numerals = merge_fractions(text, numerals)
    if not numerals:
        return None
    joined = [are_joined(text, left, right) for left, right in pairwise(numerals)]
    if not first:
        is_last_joined = bool(joined) and joined[-1]
        return None if is_last_joined else numerals[-1]
    in_expression = False
    for (left, right), is_joined in zip(pairwise(numerals), joined, strict=True):
        between = text[left.end : right.start]
        if is_joined and not _OPERATOR.search(between):
            return None  # a list
        is_result = in_expression and between.count("=") == 1
        if not is_joined and not is_result:
            return None if in_expression else left
        in_expression = is_joined
    return None if in_expression else numerals[-1]


def read_last_number(text: str) -> Fraction | None:
    """Returns the value of the last numeral of an answer, which may be LaTeX.

    Returns None if the answer names no number.
    """
    last = read_number(simplify(text))
    return last.value if last is not None else None


def agree(one: Numeral | None, other: Numeral | None) -> bool:
    """True if two numerals name one number.

    Their values are equal, or one is the other rounded to its decimal places: off by at most half a
    unit of its last place.

    >>> read = lambda text: find_numerals(text)[0]
    >>> long = read("0.8888888889")
    >>> [agree(read(text), long) for text in ("0.888889", "0.8889", "0.889", "0.8888")]
    [True, True, False, False]
    """
    if one is None or other is None or one.value is None or other.value is None:
        return False
    difference = abs(one.value - other.value)
    if difference == 0:
        return True
    return any(
        numeral.places > 0 and 2 * difference * 10**numeral.places <= 1 for numeral in (one, other)
    )


def evaluate(expression: str, operations: Mapping[type, Callable[..., Any]]) -> Fraction:
    """Returns the exact value of an expression of at most 200 characters.

    It may have signs, and the `operations`, which are given by their classes of `ast`. Raises
    ValueError for anything else, and ZeroDivisionError.
    """

    def compute(node: ast.AST) -> Fraction:
        if isinstance(node, ast.Constant) and type(node.value) in (int, float):
            return Fraction(str(node.value))
        if isinstance(node, ast.UnaryOp) and isinstance(node.op, ast.USub | ast.UAdd):
            operand = compute(node.operand)
            is_negated = isinstance(node.op, ast.USub)
            return -operand if is_negated else operand
        if isinstance(node, ast.BinOp) and type(node.op) in operations:
            operation = operations[type(node.op)]
            return Fraction(operation(compute(node.left), compute(node.right)))
        raise ValueError(f"{expression!r} is not an arithmetic expression")

    if len(expression) > MAX_EXPRESSION_LENGTH:
        raise ValueError(f"the expression has more than {MAX_EXPRESSION_LENGTH} characters")
    try:
        return compute(ast.parse(expression.strip(), mode="eval").body)
    except SyntaxError as error:
        raise ValueError(f"{expression!r} is not an arithmetic expression") from error
