"""The memory of a run in words: the table of a dry run, its warning, and the error."""

from __future__ import annotations

from collections.abc import Sequence

from lagrpo.errors import SettingsError
from lagrpo.startup.memory import (
    ERROR,
    Computation,
    Phase,
    Term,
    largest_term,
    peak,
    terms_at_peak,
)

WORDS_OF_PHASES: dict[Phase, str] = {
    "sampling": "while sampling",
    "learning": "while learning",
    "backward": "in backward passes",
    "update": "in an update",
}


def in_words(size: int) -> str:
    """A size in GiB, or in MiB if it is small."""
    if size < 2**30 / 10:
        return f"{size / 2**20:.2f} MiB"
    return f"{size / 2**30:.2f} GiB"


def how_to_lower(term: Term) -> str:
    """Says how large a term is, and what lowers it."""
    size = in_words(term.size)
    return f"the largest part that a setting lowers is {term.name}, {size}: {term.advice}"


def needs(terms: Sequence[Term], computation: Computation) -> str:
    """Says how much a rank needs, and all ranks together."""
    expected = peak(terms)
    text = f"at most {in_words(expected)}"
    if computation.memory is not None:
        text += f" of {in_words(computation.memory)}"
    if computation.ranks > 1:
        text += f" per rank, {in_words(expected * computation.ranks)} in all"
    return text


def memory_warning(terms: Sequence[Term], computation: Computation) -> list[str]:
    """A line that says that the memory may not suffice; none if it does or is unknown."""
    expected = peak(terms)
    if computation.memory is None or expected <= computation.memory:
        return []
    return [
        f"warning     the run may not fit: it needs about {in_words(expected)}, and "
        f"{_available(computation)}"
    ]


def check_memory(terms: Sequence[Term], computation: Computation) -> None:
    """Raises SettingsError if the run cannot fit: if its estimate, less ERROR, is too large."""
    least = int((1 - ERROR) * peak(terms))
    if computation.memory is None or least <= computation.memory:
        return
    raise SettingsError(
        f"the run does not fit into memory: it needs {in_words(least)} or more, and "
        f"{_available(computation)}; {how_to_lower(largest_term(terms))}"
    )


def _available(computation: Computation) -> str:
    """Says how much memory a rank has; it must be known."""
    place = "GPU" if computation.on_gpu else "machine"
    per_rank = " for each rank" if computation.ranks > 1 else ""
    return f"the {place} has {in_words(computation.memory or 0)}{per_rank}"


def memory_table(terms: Sequence[Term], ranks: int) -> list[str]:
    """Returns the lines of a table: terms that add up to the peak, their total, and the others.

    All numbers have the unit of the peak. Among several ranks a second column is for all of them.
    """
    expected = peak(terms)
    at_peak = terms_at_peak(terms)
    unit = "MiB" if expected < 2**30 / 10 else "GiB"
    scale = 2**20 if unit == "MiB" else 2**30

    def line(name: str, amounts: Sequence[str], advice: str) -> str:
        columns = "".join(amount.rjust(10) for amount in amounts)
        return f"  {name:<24}{columns}  {advice}".rstrip()

    def row(name: str, size: int, advice: str = "") -> str:
        sizes = [size] if ranks == 1 else [size, size * ranks]
        return line(name, [f"{number / scale:,.2f}" for number in sizes], advice)

    units = [unit] if ranks == 1 else [f"{unit}/rank", "all ranks"]
    lines = [line("at the peak", units, "to lower it")]
    lines += [row(term.name, term.size, term.advice) for term in _by_size(at_peak)]
    lines.append(row("total", expected))
    others = [term for term in terms if term not in at_peak]
    if others:
        lines.append("  at other times")
    for term in _by_size(others):
        when = WORDS_OF_PHASES[term.phase]
        lines.append(row(term.name, term.size, f"{when}; {term.advice}" if term.advice else when))
    return lines


def _by_size(terms: Sequence[Term]) -> list[Term]:
    """Returns the terms, the largest first."""
    return sorted(terms, key=lambda term: -term.size)
