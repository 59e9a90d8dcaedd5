"""What a replay found: checks with their counts, differences with their places, and what could not be checked."""

from __future__ import annotations

import math
from collections import Counter
from dataclasses import dataclass, field
from typing import Any


class UnreadableError(ValueError):
    """A file of a run is not whole, or not in the format that a replay reads."""


@dataclass(frozen=True, slots=True)
class Difference:
    """One value of a run that its replay contradicts: the file, the place in it, and both values."""

    file: str
    place: str
    name: str
    recorded: Any
    replayed: Any

    def __str__(self) -> str:
        where = f"{self.file}, {self.place}" if self.place else self.file
        return f"{where}: {self.name} is {_short(self.recorded)}, the replay gives {_short(self.replayed)}"


@dataclass(slots=True)
class Check:
    """One row of the report."""

    name: str
    compared: int = 0
    undecided: int = 0
    differences: list[Difference] = field(default_factory=list)
    greatest: float | None = None
    """The greatest |recorded - replayed| in `unit`; None where nothing compared is a number."""
    unit: str = ""
    note: str = ""
    """What a reader must know, such as the noise."""
    _sum: float = 0.0
    _numbers: int = 0

    @property
    def agree(self) -> int:
        return self.compared - self.undecided - len(self.differences)

    @property
    def mean(self) -> float | None:
        return self._sum / self._numbers if self._numbers else None

    def equal(self, file: str, place: str, name: str, recorded: Any, replayed: Any) -> None:
        """Compare values that must be the same."""
        self.compared += 1
        if recorded != replayed:
            self.differences.append(Difference(file, place, name, recorded, replayed))

    def near(
        self, file: str, place: str, name: str, recorded: float | None, replayed: float | None, tolerance: float
    ) -> None:
        """Compare numbers that may differ by rounding, or be absent (None) on both sides."""
        self.compared += 1
        if recorded is not None and replayed is not None:
            gap = abs(recorded - replayed)
            self.measure(gap)
            if gap <= tolerance:
                return
        elif recorded is None and replayed is None:
            return
        self.differences.append(Difference(file, place, name, recorded, replayed))

    def measure(self, gap: float) -> None:
        """Take |recorded - replayed| into the greatest and the mean."""
        if math.isfinite(gap):
            self.greatest = gap if self.greatest is None else max(self.greatest, gap)
            self._sum, self._numbers = self._sum + gap, self._numbers + 1


@dataclass(slots=True)
class Report:
    """All checks of a run, and, as (what, why), how often something could not be checked."""

    run: str
    checks: list[Check] = field(default_factory=list)
    skipped: Counter[tuple[str, str]] = field(default_factory=Counter)

    def check(self, name: str, unit: str = "", note: str = "") -> Check:
        """A new check at the end of the report."""
        self.checks.append(Check(name, unit=unit, note=note))
        return self.checks[-1]

    def skip(self, what: str, why: str, count: int = 1) -> None:
        """Note what could not be checked."""
        if count:
            self.skipped[what, why] += count

    @property
    def differences(self) -> list[Difference]:
        return [difference for check in self.checks for difference in check.differences]


def _short(value: Any) -> str:
    text = f"{value:.9g}" if isinstance(value, float) else "absent" if value is None else repr(value)
    return text if len(text) <= 120 else text[:119] + "…"
