"""Which completions a page holds, where a run has more than fit in: whole groups, evenly over the batches.

A batch's prompts are in random order, so its first groups are a random sample of it. Where the share of a batch would
be less than LEAST completions, fewer batches are taken, evenly spaced, the first and the last among them.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import NamedTuple

LEAST = 32  # completions of a batch
TOKENS = 4_000_000  # of all completions of a page


class Size(NamedTuple):
    """How much a batch, or a run, has on disk."""

    completions: int
    tokens: int


def share(wanted: Sequence[int], most: int) -> list[int]:
    """How much each gets of `most`: what it wants, or an even share of what the smaller ones leave.

    >>> share([10, 500, 900], 610)
    [10, 300, 300]
    """
    given, left = [0] * len(wanted), most
    order = sorted(range(len(wanted)), key=wanted.__getitem__)
    for place, index in enumerate(order):
        given[index] = min(wanted[index], left // (len(wanted) - place))
        left -= given[index]
    return given


def within_tokens(size: Size, most: int) -> int:
    """At most `most` completions, and no more than have TOKENS tokens at their mean length."""
    return most if size.tokens <= TOKENS else min(most, TOKENS * size.completions // size.tokens)


def choose(sizes: Mapping[int, Size], most: int, G: int = 1) -> dict[int, int]:
    """By batch, how many completions to take of it, `most` in all; batches that are left out are missing.

    >>> choose({b: Size(64, 640) for b in range(1, 101)}, 128, 8)
    {1: 32, 34: 32, 67: 32, 100: 32}
    """
    batches = [batch for batch, size in sizes.items() if size.completions]
    if not batches or most < 1:
        return {}
    total = sum(sizes[batch].completions for batch in batches)
    least = max(min(LEAST, -(-total // len(batches))), G)
    kept = len(batches) if total <= most else min(len(batches), max(1, most // least))
    step = (len(batches) - 1) / (kept - 1) if kept > 1 else 0
    chosen = [batches[round(n * step)] for n in range(kept)] if kept > 1 else batches[-1:]
    return dict(zip(chosen, share([sizes[batch].completions for batch in chosen], most), strict=True))
