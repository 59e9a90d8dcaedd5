"""The rule of `schedule.stop_at`: a run ends once a metric has held a value."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass

_FORM = re.compile(r"\s*(\S+?)\s*(>=|<=)\s*(\S+)(?:\s+for\s+([1-9]\d*))?\s*")


@dataclass(frozen=True, slots=True)
class StopRule:
    """True once the last `count` values of a metric all reach a bound."""

    metric: str
    is_lower_bound: bool
    bound: float
    count: int

    @staticmethod
    def parse(text: str) -> StopRule:
        """Reads a rule such as "reward >= 0.95 for 3". Without "for", one value is enough.

        Raises ValueError for another form.
        """
        parts = _FORM.fullmatch(text)
        if parts is None:
            raise ValueError(f"{text!r} is not a rule: write it as 'reward >= 0.95 for 3'")
        metric, comparison, number, count = parts.groups()
        try:
            bound = float(number)
        except ValueError:
            raise ValueError(f"{text!r}: {number!r} is not a number") from None
        return StopRule(metric, comparison == ">=", bound, int(count or 1))

    def holds(self, values: Sequence[float]) -> bool:
        """True if the newest of these values, in the order of their batches, obey the rule."""
        newest = values[-self.count :]
        if len(newest) < self.count:
            return False
        if self.is_lower_bound:
            return min(newest) >= self.bound
        return max(newest) <= self.bound

    def __str__(self) -> str:
        comparison = "at least" if self.is_lower_bound else "at most"
        times = "once" if self.count == 1 else f"{self.count} times in a row"
        return f"{self.metric} was {comparison} {self.bound:g}, {times}"
