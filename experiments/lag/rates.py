"""Which learning rate: rules that choose one, and controls that change it (control.py).

Both are compared with the best fixed rate in hindsight: the one with the largest area among those
at which no seed dies.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from statistics import fmean

from lagrpo.settings.lag_table import FRESH_RATE, LARGEST_KL, SHARED_RATE, TASKS, rate_text

from .control import Control
from .plan import CONTROL_RATES, CONTROL_SCHEDULES, RATE_CONTROLS
from .records import Record, RunKey
from .report import Cell, Cells, Column, find_cells, markdown_table

Records = Mapping[RunKey, Record]
RULE_COLUMNS: tuple[Column, ...] = (
    ("constant", 4),
    ("constant", 16),
    ("constant", 64),
    ("constant", 256),
    ("sawtooth", 64),
    ("mixed", 64),
)
HOPELESS = ("stale_reinforce", "red_drop", "oapl", "tba")
"""Methods that no rule for the learning rate saves."""


# Rules


def _by_kl(cell: Cell) -> float:
    """The largest rate up to f with a mean KL of at most LARGEST_KL; the smallest if none has."""
    small = [r for r in cell.by_rate if r <= FRESH_RATE and cell.kl(r) <= LARGEST_KL]
    return max(small, default=min(cell.by_rate))


RULES: dict[str, Callable[[Cell], float]] = {
    f"the largest rate up to f with a mean KL of at most {LARGEST_KL:g} nats per token".replace(
        "0.", "."
    ): _by_kl,
    "f / 3": lambda _: SHARED_RATE,
    "f": lambda _: FRESH_RATE,
}


@dataclass(frozen=True, slots=True)
class RuleResult:
    """A rule for the learning rate over many cells."""

    words: str
    loss: float
    """area kept below that of the best rate in hindsight, mean over the cells"""
    deaths: float
    """share of the runs that die, mean over the cells"""
    cells: int


def judge_rules(cells_by_task: Mapping[str, Cells]) -> list[RuleResult]:
    """The rules over all methods but HOPELESS, at RULE_COLUMNS."""
    cells = [
        cell
        for cells in cells_by_task.values()
        for (method, column), cell in cells.items()
        if column in RULE_COLUMNS and method not in HOPELESS
    ]
    results = []
    for words, rule in RULES.items():
        chosen = [(cell, rule(cell)) for cell in cells]
        losses = [fmean(cell.best.values()) - _kept(cell, rate) for cell, rate in chosen]
        deaths = [cell.deaths(rate) for cell, rate in chosen]
        results.append(RuleResult(words, fmean(losses), fmean(deaths), len(cells)))
    return results


def _kept(cell: Cell, rate: float) -> float:
    return fmean(cell.kept(rate).values())


def rules_sentence(results: Sequence[RuleResult]) -> str:
    """The rules in words, for docs/off-policy.md."""
    losses = ", ".join(f"{100 * result.loss:.1f} points with {result.words}" for result in results)
    deaths = ", ".join(f"{100 * result.deaths:.1f}" for result in results)
    return (
        f"Over {results[0].cells} combinations of loss, task and schedule of the small tasks, the "
        f"area kept is below that of the best rate in hindsight by {losses}. In this order "
        f"{deaths} % of the runs collapse."
    )


# Controls


def controls_table(records: Records) -> str:
    """A row per kind of schedule, control and learning rate, over cells in which all were run.

    Area and score at the end are points below the best fixed rate in hindsight, both in percent of
    the best loss with fresh samples.
    """
    rows = [["ages", "control", "rate", "area", "score at the end", "collapses", "cells", "runs"]]
    for kind in "sawtooth", "constant":
        controls: list[Control] = [*RATE_CONTROLS, *(["sync_at_kl"] if kind == "sawtooth" else [])]
        cells = list(_controlled_cells(records, kind, controls))
        if not cells:
            continue
        arms: list[tuple[str, float]] = [("fixed", SHARED_RATE)]
        arms += [(control, rate) for rate in CONTROL_RATES for control in ("fixed", *controls)]
        for control, rate in arms:
            area, final, deaths = (
                fmean(values)
                for values in zip(
                    *(cell.against_best(control, rate) for cell in cells), strict=True
                )
            )
            runs = sum(len(cell.runs(control, rate)) for cell in cells)
            numbers = [_points(area), _points(final), f"{100 * deaths:.0f} %"]
            rows.append(
                [kind, f"`{control}`", rate_text(rate), *numbers, str(len(cells)), str(runs)]
            )
    return markdown_table(rows) if len(rows) > 1 else "No runs yet."


def _points(value: float) -> str:
    return f"{100 * value:+.1f}".replace("-", "−")


@dataclass(frozen=True, slots=True)
class _ControlledCell:
    """The runs of a method on a task and schedule, by control, for the seeds that all have."""

    fixed: Cell
    by_control: Mapping[Control, Mapping[float, Mapping[int, Record]]]

    @property
    def seeds(self) -> set[int]:
        """The seeds that were run with every control at every rate."""
        runs = [runs for rates in self.by_control.values() for runs in rates.values()]
        runs += [self.fixed.by_rate[rate] for rate in (SHARED_RATE, *CONTROL_RATES)]
        return set.intersection(*(set(by_seed) for by_seed in runs))

    def runs(self, control: str, rate: float) -> list[Record]:
        by_rate = self.fixed.by_rate if control == "fixed" else self.by_control[control]  # type: ignore[index]
        return [by_rate[rate][seed] for seed in sorted(self.seeds)]

    def against_best(self, control: str, rate: float) -> tuple[float, float, float]:
        """Area and score at the end above those of the best fixed rate, and the share of deaths."""
        fixed = self.fixed
        updates = fixed.updates
        best = self.runs("fixed", fixed.best_rate)
        runs = self.runs(control, rate)
        area = fmean(r.gain(updates) for r in runs) - fmean(r.gain(updates) for r in best)
        final = fmean(r.final_score(updates) for r in runs)
        final -= fmean(r.final_score(updates) for r in best)
        deaths = fmean(r.dies(updates) for r in runs)
        return area / fixed.reference, final / fixed.reference_final, deaths


def _controlled_cells(
    records: Records, kind: str, controls: Sequence[Control]
) -> Iterable[_ControlledCell]:
    for task in TASKS:
        runs: dict[tuple[str, Column], dict[Control, dict[float, dict[int, Record]]]] = {}
        for record in records.values():
            if (record.table, record.task, record.schedule) == ("controlled", task, kind):
                by_control = runs.setdefault((record.method, (record.schedule, record.lag)), {})
                by_rate = by_control.setdefault(record.control, {})
                by_rate.setdefault(record.learning_rate, {})[record.seed] = record
        fixed = find_cells(records, "published", task)
        for key, by_control in runs.items():
            is_whole = all(set(CONTROL_RATES) <= set(by_control.get(c, {})) for c in controls)
            if is_whole and key in fixed and key[1] in CONTROL_SCHEDULES:
                cell = _ControlledCell(fixed[key], by_control)
                if cell.seeds:
                    yield cell
