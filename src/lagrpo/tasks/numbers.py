"""Numbers and boxes in an answer, read the same way by every task.

A *numeral* is a run of the digits 0-9, with or without

- commas between groups of three ("1,234" but not "12,34" or "0,123"), a decimal part ("7.0", ".5"), an exponent of at
  most three digits ("1e6"), leading zeros ("07");
- a sign before it: a hyphen, minus or en dash that touches the numeral (a currency sign may stand between) and nothing
  that it could subtract from ("-7", "(-7)", "-$7", but not "10-7"), after "=", ":" or "(" also with spaces; or one of
  the words "minus" and "negative";
- a unit after it, which is ignored ("7 apples", "7km", "7%"), except that a touching "k" and the words hundred,
  thousand, million, billion and trillion multiply.

A run with a digit that is none of this ("x7", "7.1.2", "0x1F", "7,8", "7²"), more than 100 characters, and a run with
a digit other than 0-9 ("７", "½") is an *unreadable* numeral without a value. Number words are not numerals.

Two numerals on one line are *joined* if only spaces, brackets, list punctuation (, ; | & or a colon without spaces), an
operator (+ - * / × ÷ ^ ±, "plus", "minus", "times", "over", "x") or the words "or", "and", "to" stand between them; or
a unit and then an operator ("3 boxes * 4"). A numeral that is joined to another is part of a list or of an unfinished
expression, and names no number: "1 2 3 4", "6 or 7", "3 + 4". Only a list of equal numbers names one: "7 (7)".
"""

from __future__ import annotations

import ast
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from fractions import Fraction
from itertools import pairwise
from typing import Any

_ODD_DIGITS = r"\d²³¹¼-¾\u2070-\u209f\u2150-\u218b\u2460-\u24ff\u2776-\u2793"
_WORD = rf"[0-9A-Za-z_{_ODD_DIGITS}]"
_TOKEN = re.compile(
    rf"(?:(?<![0-9A-Za-z.])\.(?=[0-9]))?{_WORD}+(?:(?<=[0-9])[.,](?=[0-9]){_WORD}+)*"
)
_HAS_DIGIT = re.compile(rf"[{_ODD_DIGITS}]")
_NUMERAL = re.compile(
    r"_*(?P<digits>(?:[1-9][0-9]{0,2}(?:,[0-9]{3})+|[0-9]+)(?:\.[0-9]+)?|\.[0-9]+)"
    r"(?:[eE](?P<exponent>[0-9]{1,3})(?![A-Za-z]))?(?P<unit>[A-Za-z_]*)"
)
LONGEST = 200  # characters of an expression
SIGNIFICANT = 4  # digits that a decimal must have to stand for the numbers that round to it

_CURRENCY = r"(?:\\?[$]|[€£¥₹])?"
_NEGATIVE = re.compile(
    rf"(?:(?<![0-9A-Za-z)\]}}%–−-])[-–−]{_CURRENCY}|[$€£][-–−]|[=:(][ ]{{0,3}}[-–−][ ]{{0,3}}{_CURRENCY}"
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
    r"^[ \t>*#]*(?:question|q|problem|exercise|instruction|human|user)\b[ \t]*(?P<number>[0-9]*)[ \t*]*:",
    re.IGNORECASE | re.MULTILINE,
)
_FINAL_ANSWER = re.compile(r"####[\s*(\[{:–−-]*[$€£₹\\]*[.0-9A-Za-z]*[0-9}]|</answer>")
_STATED_ANSWER = re.compile(r"\banswer\b[ *_]*(?:is|:|=)[\s*(\[{:–−-]*[$€£₹\\.0-9]", re.IGNORECASE)
_NUMBER_ALONE = re.compile(r"\s*[$€£₹–−-]*[0-9][0-9.,]*[ *.%]*\s*")


@dataclass(frozen=True, slots=True)
class Numeral:
    """A numeral at text[start:end]; `value` is None for an unreadable one. `places` counts the digits after the decimal
    point of a plain decimal with at least SIGNIFICANT digits; else 0."""

    value: Fraction | None
    start: int
    end: int
    places: int = 0


def find_last_box(text: str) -> str | None:
    r"""The content of the last closed \boxed{} (or \fbox{}), the inner one of nested boxes; None without one.

    >>> find_last_box(r"\boxed{1}, no: \boxed{\frac{1}{2}} or \boxed{3")
    '\\frac{1}{2}'
    """
    open_braces: list[tuple[bool, int]] = []
    best: tuple[int, str] | None = None
    for brace in _BRACE.finditer(text):
        if brace.group() != "}":
            open_braces.append((brace.group() != "{", brace.end()))
        elif open_braces:
            boxed, start = open_braces.pop()
            if boxed and (best is None or start > best[0]):
                best = (start, text[start : brace.start()])
    return best[1] if best else None


def find_tagged(text: str) -> str:
    """The text within the last <answer> ... </answer>; the whole text without one."""
    closed = "".join(text.rpartition("</answer>")[:2])  # what is never closed would be read again
    return [text, *re.findall("<answer>(.*?)</answer>", closed, re.DOTALL)][-1]


def first_question(text: str) -> str:
    r"""The part of a completion that answers the question it was asked: without further questions that a model makes up
    after its answer. A line begins one that starts with "Question:", "Q:", "Problem:", "User:" and the like (also with
    a number: "Problem 2:"), and before which the completion has

    - a \boxed{}, "#### 18", or </answer>,
    - or, if the line has no number, "the answer is 18" or nothing but a number.

    The text before the first </think> neither answers nor asks.

    >>> first_question("#### 18\n\nQuestion: Tom has 9 apples.\n#### 9")
    '#### 18\n\n'
    """
    start = text.find("</think>") + 1
    for question in _NEW_QUESTION.finditer(text, start):
        before = text[start : question.start()]
        if find_last_box(before) is not None or _FINAL_ANSWER.search(before):
            return text[: question.start()]
        has_answer = _STATED_ANSWER.search(before) or _NUMBER_ALONE.fullmatch(before)
        if has_answer and not question["number"]:
            return text[: question.start()]
    return text


def find_reference(answer: str) -> str:
    """The part of a reference answer that counts: after the last "####", within the last <answer> tags, and within the
    last box, as far as the answer has them.

    >>> find_reference("2 + 3 = 5\\n#### 5")
    '5'
    """
    part = find_tagged(answer.rpartition("####")[2])
    box = find_last_box(part)
    return (part if box is None else box).strip()


def simplify(text: str) -> str:
    r"""Make LaTeX's spelling of numbers plain: \frac{a}{b} as a/b, \$ and \% without the backslash, no
    thin spaces or {,} within numbers, \times as *, \text{...} as its content, roots as the word "root"."""
    text = text.replace("\\!", "").replace("{,}", ",").replace("\\$", "$").replace("\\%", "%")
    text = re.sub(r"(?<=[0-9])\\,(?=[0-9]{3})", "", text).replace("\\,", " ").replace("\\ ", " ")
    text = re.sub(r"\\(?:times|cdot)(?![A-Za-z])", " * ", text)
    text = re.sub(r"\\div(?![A-Za-z])", " / ", text)
    text = _ROOT.sub(" root ", text)
    text = _FRACTION.sub(lambda found: f" {found[1] or found[3]}/{found[2] or found[4]} ", text)
    return _WRAPPER.sub(" ", text)


def find_numerals(text: str) -> list[Numeral]:
    """The numerals of a text in order, with the unreadable ones."""
    return [
        _read(text, token) for token in _TOKEN.finditer(text) if _HAS_DIGIT.search(token.group())
    ]


def _read(text: str, token: re.Match[str]) -> Numeral:
    written, start, end = token.group(), token.start(), token.end()
    parts = _NUMERAL.fullmatch(written) if len(written) <= 100 else None
    if parts is None:
        return Numeral(None, start, end)
    word = _SCALE_WORD.match(text, end)
    touching = "k" if parts["unit"].lower() == "k" else ""
    scale = _SCALES.get(word[1].lower() if word else touching, 0)
    digits = parts["digits"].replace(",", "")
    value = Fraction(digits) * 10 ** (int(parts["exponent"] or 0) + scale)
    decimals = digits.partition(".")[2]
    counted = (
        not scale
        and not parts["exponent"]
        and len(digits.replace(".", "").lstrip("0")) >= SIGNIFICANT
    )
    negative = _NEGATIVE.search(text[max(0, start - 20) : start])
    return Numeral(-value if negative else value, start, end, len(decimals) if counted else 0)


def merge_fractions(text: str, found: list[Numeral]) -> list[Numeral]:
    """Read every "a/b" (b not 0) as one numeral of that value; of "a/b/c" only the first two numbers."""
    merged: list[Numeral] = []
    for numeral in found:
        left = merged[-1] if merged and merged[-1] in found else None
        readable = left is not None and left.value is not None and numeral.value
        if left and readable and text[left.end : numeral.start].strip() in ("/", "⁄"):
            merged[-1] = Numeral(left.value / numeral.value, left.start, numeral.end)  # type: ignore[operator]
        else:
            merged.append(numeral)
    return merged


def are_joined(text: str, left: Numeral, right: Numeral) -> bool:
    """Whether two numerals, one after the other, are of one list or expression."""
    between = text[left.end : right.start]
    if _UNIT_OPERATOR.fullmatch(between):
        return True
    if _LIST.fullmatch(_OPERATOR.sub(" ", between)) is None and between != ":":
        return False
    return bool(_OPERATOR.search(between)) or left.value is None or left.value != right.value


def read_number(text: str, first: bool = False, fractions: bool = False) -> Numeral | None:
    """The numeral that names the last (or the first) number of a text in plain spelling, in which a/b may be one: None
    without one, and if it is joined to its neighbor. If an expression with "=" comes first, the first number is the one
    after its "="."""
    found = merge_fractions(text, find_numerals(text)) if fractions else find_numerals(text)
    joined = [are_joined(text, left, right) for left, right in pairwise(found)]
    if not first:
        return found[-1] if found and not any(joined[-1:]) else None
    in_expression = False
    for (left, right), is_joined in zip(pairwise(found), joined, strict=True):
        between = text[left.end : right.start]
        if is_joined and not _OPERATOR.search(between):
            return None
        if not is_joined and not (in_expression and between.count("=") == 1):
            return None if in_expression else left
        in_expression = is_joined
    return found[-1] if found and not in_expression else None


def read_last_number(text: str) -> Fraction | None:
    """The value of the last numeral of an answer, which may be LaTeX; None if it names no number."""
    last = read_number(simplify(text))
    return last.value if last is not None else None


def agree(one: Numeral | None, other: Numeral | None) -> bool:
    """Whether two numerals name one number: equal values, or one is the other rounded to its decimal places (off by at
    most half a unit of its last place).

    >>> read = lambda text: find_numerals(text)[0]
    >>> [agree(read(text), read("0.8888888889")) for text in ("0.888889", "0.8889", "0.889", "0.8888")]
    [True, True, False, False]
    """
    if one is None or other is None or one.value is None or other.value is None:
        return False
    gap = abs(one.value - other.value)
    return gap == 0 or any(n.places and 2 * gap * 10**n.places <= 1 for n in (one, other))


def evaluate(expression: str, operations: Mapping[type, Callable[..., Any]]) -> Fraction:
    """The exact value of an expression of at most 200 characters, with these operations by the classes of `ast`, and
    signs. Raises ValueError for anything else, ZeroDivisionError."""

    def compute(node: ast.AST) -> Fraction:
        if isinstance(node, ast.Constant) and type(node.value) in (int, float):
            return Fraction(str(node.value))
        if isinstance(node, ast.UnaryOp) and isinstance(node.op, ast.USub | ast.UAdd):
            operand = compute(node.operand)
            return -operand if isinstance(node.op, ast.USub) else operand
        if isinstance(node, ast.BinOp) and type(node.op) in operations:
            return Fraction(operations[type(node.op)](compute(node.left), compute(node.right)))
        raise ValueError(f"{expression!r} is not an arithmetic expression")

    if len(expression) > LONGEST:
        raise ValueError(f"the expression has more than {LONGEST} characters")
    try:
        return compute(ast.parse(expression.strip(), mode="eval").body)
    except SyntaxError as error:
        raise ValueError(f"{expression!r} is not an arithmetic expression") from error
