"""Which learning rate: rules that choose one, and controls that change it (control.py).

Both are compared with the best fixed rate in hindsight: the one with the largest area among those
at which no seed dies.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from statistics import fmean

from lagrpo.settings.lag_table import FRESH_RATE, LARGEST_KL, SHARED_RATE, TASKS, rate_text

from .control import CONTROLS, Control
from .plan import CONTROL_RATES
from .records import Record, RunKey
from .report import Cell, Cells, Column, find_cells, markdown_table

Records = Mapping[RunKey, Record]
Arm = tuple[Control, float]
"""a control, and the learning rate that it changes"""
RULE_COLUMNS: tuple[Column, ...] = (
    ("constant", 4),
    ("constant", 16),
    ("constant", 64),
    ("constant", 256),
    ("sawtooth", 64),
    ("mixed", 64),
)
KINDS = ("sawtooth", "constant")
CONTROLS_OF_LOSSES: tuple[Control, ...] = ("fixed", "kl_feedback", "ess_root", "sync_at_kl")
"""The controls that are compared loss by loss."""
OTHER_SETTINGS: dict[Control, str] = {
    "ess_root": "scale_lr_by_ess",
    "sync_at_kl": "sync_at_kl",
}
"""Controls that a user can set instead of scale_lr_by_kl, and their settings."""
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
    """The rules in words, for reports/staleness.md."""
    losses = ", ".join(f"{100 * result.loss:.1f} points with {result.words}" for result in results)
    deaths = ", ".join(f"{100 * result.deaths:.1f}" for result in results)
    return (
        f"Over {results[0].cells} combinations of loss, task and schedule of the small tasks, the "
        f"area kept is smaller than at the best rate in hindsight by {losses}. In this order "
        f"{deaths} % of the runs collapse."
    )


# Controls


def controls_table(records: Records) -> str:
    """A row per kind of schedule, control and learning rate, over the cells in which it was run.

    Area and score at the end are points above the best fixed rate in hindsight on the same seeds,
    both in percent of the best loss with fresh samples.
    """
    rows = [["ages", "control", "rate", "area", "score at the end", "collapses", "cells", "runs"]]
    for kind in KINDS:
        cells = list(_controlled_cells(records, kind))
        arms: list[Arm] = [("fixed", SHARED_RATE)]
        arms.extend((control, rate) for rate in CONTROL_RATES for control in CONTROLS)
        for control, rate in arms:
            with_runs = [cell for cell in cells if cell.runs(control, rate)]
            if not with_runs:
                continue
            results = [cell.against_best(control, rate) for cell in with_runs]
            area, final, deaths = (fmean(values) for values in zip(*results, strict=True))
            runs = sum(len(cell.runs(control, rate)) for cell in with_runs)
            numbers = [_points(area), _points(final), f"{100 * deaths:.0f} %"]
            counts = [str(len(with_runs)), str(runs)]
            rows.append([kind, f"`{control}`", rate_text(rate), *numbers, *counts])
    return markdown_table(rows)


def controls_by_loss_table(records: Records, labels: Mapping[str, str]) -> str:
    """A row per task, ages and loss: area kept and score at the end, in percent, by control.

    The fixed rates are the best in hindsight and SHARED_RATE, then CONTROL_RATES as for each
    control. † with a number: the runs that collapse. `labels` has the text of each method.
    """
    head = ["task", "ages", "loss", "seeds", "best fixed rate", rate_text(SHARED_RATE)]
    names = " and ".join(rate_text(rate) for rate in CONTROL_RATES)
    rows = [[*head, *(f"`{control}` at {names}" for control in CONTROLS_OF_LOSSES)]]
    for cell in (cell for kind in KINDS for cell in _controlled_cells(records, kind)):
        best_rate = cell.fixed.best_rate
        row = [f"`{cell.task}`", cell.ages, labels[cell.method], str(len(cell.seeds))]
        row.append(f"{cell.text('fixed', best_rate)} at {rate_text(best_rate)}")
        row.append(cell.text("fixed", SHARED_RATE))
        for control in CONTROLS_OF_LOSSES:
            row.append(" / ".join(cell.text(control, rate) for rate in CONTROL_RATES))
        rows.append(row)
    return markdown_table(rows)


def setting_sentences(records: Records) -> str:
    """What optimizer.scale_lr_by_kl gains beside fixed rates, in words, for docs/off-policy.md."""
    cells = _cells_with_setting(records)
    losses = {cell.method for cell in cells}
    seeds = sorted({len(cell.seeds) for cell in cells})
    runs = sum(len(cell.runs("kl_feedback", rate)) for cell in cells for rate in CONTROL_RATES)
    return (
        f"Over {len(cells)} combinations of loss, task and ages ({len(losses)} losses, the two "
        f"small tasks, {' to '.join(map(str, seeds))} seeds, {runs} runs with the setting), the "
        "area kept minus that of the best fixed rate in hindsight, in points, is "
        f"{_differences_text(cells, _at_rates('kl_feedback'))} with the setting. With a fixed rate "
        f"it is {_differences_text(cells, [('fixed', SHARED_RATE), *_at_rates('fixed')])}."
    )


def other_settings_sentences(records: Records) -> str:
    """The same for each of OTHER_SETTINGS, over the cells in which both were run."""
    sentences = []
    for control, name in OTHER_SETTINGS.items():
        cells = [
            cell
            for cell in _cells_with_setting(records)
            if all(cell.runs(control, rate) for rate in CONTROL_RATES)
        ]
        if cells:
            sentences.append(
                f"Where `{name}` was run ({len(cells)} combinations), the difference is "
                f"{_differences_text(cells, _at_rates(control))} with that, and "
                f"{_differences_text(cells, _at_rates('kl_feedback'))} with `scale_lr_by_kl`."
            )
    return " ".join(sentences)


def _cells_with_setting(records: Records) -> list[_ControlledCell]:
    """The cells in which scale_lr_by_kl was run at every rate of CONTROL_RATES."""
    return [
        cell
        for kind in KINDS
        for cell in _controlled_cells(records, kind)
        if all(cell.runs("kl_feedback", rate) for rate in CONTROL_RATES)
    ]


def _at_rates(control: Control) -> list[Arm]:
    return [(control, rate) for rate in CONTROL_RATES]


def _differences_text(cells: Sequence[_ControlledCell], arms: Sequence[Arm]) -> str:
    """As in "+0.3 at f (end +0.1, 0 % collapse), −6.1 at 3 f (end ...)": means over the cells."""
    texts = []
    for control, rate in arms:
        results = [cell.against_best(control, rate) for cell in cells]
        area, final, deaths = (fmean(values) for values in zip(*results, strict=True))
        end = f"end {_points(final)}, {100 * deaths:.0f} % collapse"
        texts.append(f"{_points(area)} at {rate_text(rate)} ({end})")
    return ", ".join(texts)


def _points(value: float) -> str:
    return f"{100 * value:+.1f}".replace("-", "−")


@dataclass(frozen=True, slots=True)
class _ControlledCell:
    """The runs of a method on a task and schedule, by control."""

    task: str
    method: str
    column: Column
    fixed: Cell
    by_control: Mapping[Control, Mapping[float, Mapping[int, Record]]]

    @property
    def seeds(self) -> set[int]:
        """The seeds that were run with a control."""
        return {
            seed for rates in self.by_control.values() for runs in rates.values() for seed in runs
        }

    def runs(self, control: Control, rate: float) -> dict[int, Record]:
        """The runs by seed, of the seeds that were run with a control."""
        by_rate = self.fixed.by_rate if control == "fixed" else self.by_control.get(control, {})
        return {seed: run for seed, run in by_rate.get(rate, {}).items() if seed in self.seeds}

    @property
    def ages(self) -> str:
        """The staleness of the samples in updates, as in "64" or "0 to 15"."""
        kind, lag = self.column
        return str(lag) if kind == "constant" else f"0 to {lag}"

    def text(self, control: Control, rate: float) -> str:
        """Area kept and score at the end in percent, as in "92, 99" or "27, 42 †1"; or a dash."""
        runs = list(self.runs(control, rate).values())
        if not runs:
            return "–"
        updates = self.fixed.updates
        area = fmean(run.gain(updates) for run in runs) / self.fixed.reference
        final = fmean(run.final_score(updates) for run in runs) / self.fixed.reference_final
        collapsed = sum(run.dies(updates) for run in runs)
        text = f"{100 * area:.0f}, {100 * final:.0f}".replace("-", "−")
        return f"{text} †{collapsed}" if collapsed else text

    def against_best(self, control: Control, rate: float) -> tuple[float, float, float]:
        """Area and score at the end above those of the best fixed rate, and the share of deaths."""
        fixed = self.fixed
        updates = fixed.updates
        best = self.runs("fixed", fixed.best_rate)
        runs = self.runs(control, rate)
        seeds = runs.keys() & best.keys()
        area = fmean(runs[s].gain(updates) - best[s].gain(updates) for s in seeds)
        final = fmean(runs[s].final_score(updates) - best[s].final_score(updates) for s in seeds)
        deaths = fmean(runs[s].dies(updates) for s in seeds)
        return area / fixed.reference, final / fixed.reference_final, deaths


def _controlled_cells(records: Records, kind: str) -> Iterable[_ControlledCell]:
    for task in TASKS:
        runs: dict[tuple[str, Column], dict[Control, dict[float, dict[int, Record]]]] = {}
        for record in records.values():
            if (record.table, record.task, record.schedule) == ("controlled", task, kind):
                by_control = runs.setdefault((record.method, (record.schedule, record.lag)), {})
                by_rate = by_control.setdefault(record.control, {})
                by_rate.setdefault(record.learning_rate, {})[record.seed] = record
        fixed = find_cells(records, "published", task)
        for key, by_control in runs.items():
            if key in fixed:
                method, column = key
                yield _ControlledCell(task, method, column, fixed[key], by_control)
