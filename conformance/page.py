"""The page of the comparisons, and the measure of a difference."""

from __future__ import annotations

from pathlib import Path

from torch import Tensor

PAGE = Path(__file__).parent.parent / "reports" / "conformance.md"
# Values smaller than this are differences of larger terms.
LEAST = 1e-2


def relative_difference(a: Tensor, b: Tensor) -> float:
    """The greatest |a - b|, divided by the largest absolute value in both, at least LEAST."""
    largest = max(float(a.abs().max()), float(b.abs().max()), LEAST)
    return float((a.double() - b.double()).abs().max()) / largest


def write_table(text: str, begin: str, end: str) -> None:
    """Puts the text between two markers of PAGE."""
    before, _, after_begin = PAGE.read_text(encoding="utf-8").partition(begin)
    _, _, after = after_begin.partition(end)
    PAGE.write_text(f"{before}{begin}\n{text}\n{end}{after}", encoding="utf-8")
