"""The report: tables, and a figure of the area that methods keep against the lag.

Area kept: the mean score of a run over its updates, above the score of the starting point, in
percent of the same for the best method at lag 0 with its best learning rate (of the same table,
task and number of updates; plan.py lists the methods that count there). A cell has the method's
best learning rate, by the mean over its seeds, among those at which no seed dies.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import takewhile
from pathlib import Path
from statistics import correlation, fmean

from experiments.theory.style import (
    BLUE,
    FAINT,
    GREEN,
    INK,
    ORANGE,
    PURPLE,
    VERMILLION,
    canvas,
    plain,
)
from lagrpo.runs.files import write_atomically
from lagrpo.study.statistics import Interval, Verdict, judge

from .methods import Method, Table
from .plan import FIGURE_METHODS, MAIN_TASKS, REFERENCE_METHODS, Pass
from .records import Record, RunKey
from .tasks import TASKS

MARGIN = 0.02
"""of the area at lag 0: a method is among the best unless it is shown to be that much below the
leader
"""
BASELINE = "grpo"
VERDICT_WORDS = {"supported": "better", "refuted": "worse", "inconclusive": "inconclusive"}
NOTABLE_LOSS = 5
"""points"""
NOT_COUNTED = ("prime_rl", "ipo_mask")
"""Recipes whose cut tokens the records do not have: a regularizer gave them a gradient."""
TITLES: dict[Table, str] = {
    "published": "As published: each method with its own advantage and reduction",
    "equal": "Equal: the same advantage and reduction, no clip of the gradient's norm",
}


@dataclass(frozen=True, slots=True)
class Cell:
    """Runs of a method at one schedule, on one task: every learning rate and seed."""

    by_rate: dict[float, dict[int, Record]]
    """learning rate -> seed -> record"""
    reference: float
    """area of the best method at lag 0"""
    reference_final: float
    """score at the end of the best method at lag 0"""
    updates: int

    def kept(self, rate: float) -> dict[int, float]:
        """The area kept at a learning rate by seed, 1 for that of the best method at lag 0."""
        return {
            seed: record.gain(self.updates) / self.reference
            for seed, record in self.by_rate[rate].items()
        }

    @property
    def best_rate(self) -> float:
        """The learning rate with the largest mean area among those where no seed dies.

        Among all rates if there is no such rate.
        """
        candidates = self.living_rates or list(self.by_rate)
        return max(candidates, key=lambda rate: fmean(self.kept(rate).values()))

    @property
    def held_out(self) -> dict[int, float]:
        """The area kept by each seed at the learning rate that is best for the other seeds.

        `best` chooses the rate on the seeds that it judges, so it is a little too high. Only seeds
        that were run at every rate; empty for a single one.
        """
        seeds = sorted(set.intersection(*(set(runs) for runs in self.by_rate.values())))
        if len(seeds) < 2:
            return {}
        area_by_seed = {}
        for seed in seeds:
            others = {
                rate: {other: runs[other] for other in seeds if other != seed}
                for rate, runs in self.by_rate.items()
            }
            rate = replace(self, by_rate=others).best_rate
            area_by_seed[seed] = self.kept(rate)[seed]
        return area_by_seed

    @property
    def best(self) -> dict[int, float]:
        """The area kept at the best learning rate by seed."""
        return self.kept(self.best_rate)

    def final(self, rate: float) -> dict[int, float]:
        """The score at the end at a learning rate by seed, 1 for that of the best at lag 0."""
        return {
            seed: record.final_score(self.updates) / self.reference_final
            for seed, record in self.by_rate[rate].items()
        }

    def kl(self, rate: float) -> float:
        """The mean KL(alpha || pi) of the runs at a learning rate, nats per token."""
        return fmean(record.diagnostics["kl"] for record in self.by_rate[rate].values())

    def deaths(self, rate: float) -> float:
        """The share of the runs at a learning rate that die."""
        return fmean(record.dies(self.updates) for record in self.by_rate[rate].values())

    @property
    def final_scores(self) -> dict[int, float]:
        """The score at the end of the run, at the best learning rate, by seed."""
        runs = self.by_rate[self.best_rate]
        return {seed: record.final_score(self.updates) for seed, record in runs.items()}

    @property
    def living_rates(self) -> list[float]:
        """The learning rates at which no seed dies."""
        return [rate for rate in sorted(self.by_rate) if self.deaths(rate) == 0]

    @property
    def highest_living_rate(self) -> float | None:
        """The highest learning rate at which no seed dies, nor at a lower one."""
        living_rates = list(takewhile(lambda rate: self.deaths(rate) == 0, sorted(self.by_rate)))
        return living_rates[-1] if living_rates else None


Column = tuple[str, int]
"""kind of schedule, lag"""
Cells = Mapping[tuple[str, Column], Cell]
"""by method and column, of one table and task"""


def write_report(
    directory: Path,
    records: Mapping[RunKey, Record],
    plan: Sequence[Pass],
    methods: Mapping[str, Method],
) -> None:
    """Write report.md into the directory of the records, and print it."""
    text = "\n\n".join(_sections(records, plan, methods)) + "\n"
    write_atomically(directory / "report.md", text)
    print(text)


def find_cells(records: Mapping[RunKey, Record], table: Table, task: str) -> Cells:
    """The cells of a table and task. Empty until there are runs at lag 0, the reference of all."""
    selected = [r for r in records.values() if (r.table, r.task) == (table, task)]
    at_lag_0: dict[tuple[str, float], list[Record]] = defaultdict(list)
    by_cell: dict[tuple[str, Column], dict[float, dict[int, Record]]] = {}
    for record in selected:
        rates = by_cell.setdefault((record.method, (record.schedule, record.lag)), {})
        rates.setdefault(record.learning_rate, {})[record.seed] = record
        if record.lag == 0:
            at_lag_0[record.method, record.learning_rate].append(record)
    if not at_lag_0:
        return {}
    # Runs at lag 0 are longer, as the reference of long runs; their own column is cut to this.
    shortest = min(record.updates for record in selected)
    cells = {}
    reference_by_length: dict[int, tuple[float, float]] = {}
    for key, rates in by_cell.items():
        kind_and_lag = key[1]
        length = next(iter(next(iter(rates.values())).values())).updates
        updates = shortest if kind_and_lag[1] == 0 else length
        if updates not in reference_by_length:
            reference_by_length[updates] = _reference(at_lag_0, updates)
        area, final = reference_by_length[updates]
        cells[key] = Cell(rates, area, final, updates)
    return cells


def _reference(
    at_lag_0: Mapping[tuple[str, float], Sequence[Record]], updates: int
) -> tuple[float, float]:
    """The largest area and the highest score at the end of all methods at lag 0.

    Each is that of a method at the best learning rate for it at which no seed dies.

    `at_lag_0` has the runs by method and learning rate. A longer run has a larger mean score, so
    they are cut to the length of those that are compared.
    """
    living = {}
    for method_and_rate, runs in at_lag_0.items():
        if not any(run.dies(updates) for run in runs):
            living[method_and_rate] = runs
    references = {key: runs for key, runs in living.items() if key[0] in REFERENCE_METHODS}
    # A small table may have none of the methods that others are compared with, and one seed.
    references = references or living or at_lag_0
    area = max(fmean(run.gain(updates) for run in runs) for runs in references.values())
    final = max(fmean(run.final_score(updates) for run in runs) for runs in references.values())
    return area, final


def leaders(cells: Cells, column: Column) -> set[str]:
    """The methods of a column that are not shown to be MARGIN below the leader.

    The test is on paired differences over the seeds (lagrpo.study.statistics). Empty with a
    single seed, which shows nothing.
    """
    best = {method: cell.best for (method, at), cell in cells.items() if at == column}
    leader = max(best, key=lambda method: fmean(best[method].values()))
    if len(best[leader]) < 2:
        return set()
    return {
        method
        for method in best
        if method == leader
        or judge(_paired(best[method], best[leader]), ">=", MARGIN).outcome != "refuted"
    }


def _paired(left: Mapping[int, float], right: Mapping[int, float]) -> list[float]:
    """Left - right of the seeds that both have."""
    return [left[seed] - right[seed] for seed in sorted(left.keys() & right.keys())]


def verdict_on(cells: Cells, method: str, column: Column) -> Verdict | None:
    """The verdict on a method keeping more than plain GRPO, by paired differences over the seeds.

    Both have their best learning rates. None if one of them was not run.
    """
    cell = cells.get((method, column))
    baseline = cells.get((BASELINE, column))
    if cell is None or baseline is None:
        return None
    return judge(_paired(cell.best, baseline.best), ">")


def final_verdict_on(cells: Cells, method: str, column: Column) -> Verdict | None:
    """As `verdict_on`, but on the scores at the end of the runs."""
    cell = cells.get((method, column))
    baseline = cells.get((BASELINE, column))
    if cell is None or baseline is None:
        return None
    return judge(_paired(cell.final_scores, baseline.final_scores), ">")


def held_out_verdict_on(cells: Cells, method: str, column: Column) -> Verdict | None:
    """As `verdict_on`, but each seed has the learning rate that is best for the other seeds.

    None if one of the two has fewer than two seeds.
    """
    cell = cells.get((method, column))
    baseline = cells.get((BASELINE, column))
    if cell is None or baseline is None:
        return None
    differences = _paired(cell.held_out, baseline.held_out)
    return judge(differences, ">") if len(differences) > 1 else None


def rank_agreement(left: Mapping[str, float], right: Mapping[str, float]) -> float | None:
    """Spearman's correlation of the ranks of the names that both have.

    None for fewer than three names.
    """
    names = sorted(left.keys() & right.keys())
    if len(names) < 3:
        return None
    left_ranks = _ranks([left[name] for name in names])
    right_ranks = _ranks([right[name] for name in names])
    return correlation(left_ranks, right_ranks)


def _ranks(values: Sequence[float]) -> list[float]:
    """The rank of each value from 0; equal values share the mean of their ranks."""
    return [
        sum(other < value for other in values) + (sum(other == value for other in values) - 1) / 2
        for value in values
    ]


# report.md


def _sections(
    records: Mapping[RunKey, Record], plan: Sequence[Pass], methods: Mapping[str, Method]
) -> Iterable[str]:
    planned = [key for item in plan for key in item.keys]
    done = sum(key in records for key in planned)
    hours = sum(record.seconds for record in records.values()) / 3600
    yield "# Methods against staleness"
    yield (
        f"{done} of {len(planned)} planned runs, {len(records)} with those that have more seeds; "
        f"{hours:.1f} core-hours. Area kept in percent of that of the best method at lag 0, at the "
        "method's best learning rate at which no seed dies: mean over seeds ± half its 95 % "
        "interval (Student's t). Bold: among the best, that is, not shown to be "
        f"{100 * MARGIN:.0f} points below the leader. A run dies if it ends below its start, or "
        "below 80 % of its own peak; †: some seed dies at every learning rate. "
        "`python -m experiments.lag` makes the missing runs."
    )
    with_runs = {record.method for record in records.values()}
    exceptions = [
        f"- `{method.name}`: {method.label}"
        for method in methods.values()
        if method.name in with_runs
        and not (method.is_plain_recipe and method.name == method.recipe_name)
    ]
    if exceptions:
        yield "A method is a recipe of that name, except these:"
        yield "\n".join(exceptions)
    for table, title in TITLES.items():
        for task in TASKS:
            cells = find_cells(records, table, task)
            if not cells:
                continue
            yield f"## {task}. {title}"
            yield _area_table(cells)
            yield _rates_table(cells)
            if any(len(cell.best) > 1 for cell in cells.values()):
                yield _verdict_table(cells)
    yield from _summary(records)
    yield from _agreement(records)
    yield from _held_out(records)
    yield from _clipped(records)
    machines = Counter(f"{r.cpu}, torch {r.torch}, commit {r.commit}" for r in records.values())
    yield "\n".join(f"- {count} runs: {machine}" for machine, count in machines.most_common())


def _methods(cells: Cells) -> list[str]:
    return list(dict.fromkeys(method for method, _ in cells))


def _columns(cells: Cells) -> list[Column]:
    """The schedules that all methods are planned for, or most."""
    return sorted({column for _, column in cells if column[0] not in ("in_order", "by_length")})


def _column_name(column: Column) -> str:
    kind, lag = column
    return f"lag {lag}" if kind == "constant" else f"{kind} {lag}"


def _cell_table(cells: Cells, show: Callable[[str, Column, Cell], str]) -> str:
    """A row per method, a column per schedule."""
    columns = _columns(cells)
    rows = [["method", *map(_column_name, columns)]]
    for method in _methods(cells):
        row = [
            show(method, column, cells[method, column]) if (method, column) in cells else "–"
            for column in columns
        ]
        rows.append([method, *row])
    return markdown_table(rows)


def _area_table(cells: Cells) -> str:
    best = {column: leaders(cells, column) for column in _columns(cells)}

    def show(method: str, column: Column, cell: Cell) -> str:
        return area_text(cell, is_best=method in best[column])

    return "Area kept (%):\n\n" + _cell_table(cells, show)


def area_text(cell: Cell, *, is_best: bool) -> str:
    """Area kept in percent ± half its interval. Bold: among the best; †: a seed dies there."""
    interval = Interval.of(list(cell.best.values()))
    half = "" if interval.half is None else f" ± {100 * interval.half:.0f}"
    text = f"{100 * interval.mean:.0f}{half}"
    if cell.best_rate not in cell.living_rates:
        text += " †"
    return f"**{text}**" if is_best else text


def _rates_table(cells: Cells) -> str:
    def show(_method: str, _column: Column, cell: Cell) -> str:
        living = ", ".join(map(rate_name, cell.living_rates))
        return f"{living or 'none'} ({rate_name(cell.best_rate)})"

    head = "Learning rates at which every seed lives (in brackets the one with the largest area):"
    return f"{head}\n\n{_cell_table(cells, show)}"


def rate_name(rate: float) -> str:
    """A learning rate as people write it: 3e-4."""
    return f"{rate:.0e}".replace("e-0", "e-")


def _verdict_table(cells: Cells) -> str:
    """The paired difference from plain GRPO, both at their best learning rates."""

    def show(method: str, column: Column, _cell: Cell) -> str:
        verdict = verdict_on(cells, method, column)
        if verdict is None or verdict.difference is None or method == BASELINE:
            return "–"
        return f"{VERDICT_WORDS[verdict.outcome]}, {100 * verdict.difference.mean:+.0f}"

    return f"Against {BASELINE}, in points, by paired differences:\n\n" + _cell_table(cells, show)


def _summary(records: Mapping[RunKey, Record]) -> Iterable[str]:
    """The columns where each method is among the best, and where it dies at every learning rate."""
    for table in TITLES:
        best: dict[str, list[str]] = {}
        dead: dict[str, list[str]] = {}
        for task in TASKS:
            cells = find_cells(records, table, task)
            for column in _columns(cells):
                among_best = leaders(cells, column)
                label = f"{task} {_column_name(column).removeprefix('lag ')}"
                for method in _methods(cells):
                    if method in among_best:
                        best.setdefault(method, []).append(label)
                    if (method, column) in cells and not cells[method, column].living_rates:
                        dead.setdefault(method, []).append(label)
        if not best:
            continue
        rows = [["method", "among the best", "some seed dies at every learning rate"]]
        for method in {**best, **dead}:
            rows.append([method, ", ".join(best.get(method, [])), ", ".join(dead.get(method, []))])
        yield f"## Where each method is among the best, and where it dies ({table})"
        yield "Task and constant lag, or task and schedule."
        yield markdown_table(rows)


def _agreement(records: Mapping[RunKey, Record]) -> Iterable[str]:
    """Rank correlations between tasks, for constant lag 64."""
    column = ("constant", 64)
    areas = {}
    for task in TASKS:
        cells = find_cells(records, "published", task)
        areas[task] = {
            method: fmean(cell.best.values())
            for (method, at), cell in cells.items()
            if at == column
        }
    with_runs = [task for task in TASKS if areas[task]]
    if len(with_runs) < 2:
        return
    rows = [["", *with_runs]]
    for task in with_runs:
        row = [rank_agreement(areas[task], areas[other]) for other in with_runs]
        rows.append([task, *("–" if value is None else f"{value:.2f}" for value in row)])
    yield "## Agreement between tasks"
    yield (
        "Spearman's correlation of the methods' order by area at lag 64, as published, at the best "
        "learning rate of those that were run:"
    )
    yield markdown_table(rows)


def _held_out(records: Mapping[RunKey, Record]) -> Iterable[str]:
    """The cells of the main tasks that change if the rate is chosen on the other seeds."""
    compared = 0
    rows = [["task", "schedule", "method", "area kept", "on other seeds", "verdict", "then"]]
    for task in MAIN_TASKS:
        cells = find_cells(records, "published", task)
        for (method, column), cell in cells.items():
            verdict = verdict_on(cells, method, column)
            held_out_verdict = held_out_verdict_on(cells, method, column)
            if method == BASELINE or verdict is None or held_out_verdict is None:
                continue
            compared += 1
            area = 100 * fmean(cell.best.values())
            held_out_area = 100 * fmean(cell.held_out.values())
            words = VERDICT_WORDS[verdict.outcome]
            held_out_words = VERDICT_WORDS[held_out_verdict.outcome]
            if words == held_out_words and area - held_out_area < NOTABLE_LOSS:
                continue
            areas = [f"{area:.0f}", f"{held_out_area:.0f}"]
            rows.append([task, _column_name(column), method, *areas, words, held_out_words])
    if compared == 0:
        return
    yield "## Learning rates chosen on other seeds"
    yield (
        "Elsewhere a learning rate is chosen on the seeds that are judged with it. Here each "
        "seed has the rate that is best for the other ones, and so has "
        f"`{BASELINE}`. Of {compared} cells as published, these get another verdict against it, or "
        f"lose {NOTABLE_LOSS} points or more:"
    )
    yield markdown_table(rows)


def _clipped(records: Mapping[RunKey, Record]) -> Iterable[str]:
    """The share of tokens whose gradient a threshold removes: at 0 it never acts, at 1 always."""
    shares: dict[str, list[Record]] = defaultdict(list)
    for record in records.values():
        key = (record.table, record.schedule, record.lag, record.learning_rate)
        if key == ("published", "constant", 16, 3e-4) and record.task in ("chain", "gamble"):
            shares[record.method].append(record)
    if not shares:
        return
    rows = [["method", "chain A > 0", "chain A < 0", "gamble A > 0", "gamble A < 0"]]
    for method, runs in shares.items():
        row = []
        for task in ("chain", "gamble"):
            for sign in ("positive", "negative"):
                values = [r.diagnostics[f"clipped_{sign}"] for r in runs if r.task == task]
                if runs[0].recipe in NOT_COUNTED:
                    values = []
                values = [value for value in values if value >= 0]  # -1: there is no such token
                row.append(f"{100 * fmean(values):.1f}" if values else "–")
        rows.append([method, *row])
    yield "## Tokens without a gradient"
    yield "In percent, at lag 16 and learning rate 3e-4, as published:"
    yield markdown_table(rows)


def markdown_table(rows: Sequence[Sequence[str]]) -> str:
    head, *body = ["| " + " | ".join(row) + " |" for row in rows]
    return "\n".join([head, "|---" * len(rows[0]) + "|", *body])


# The figure


def write_figure(file: Path, records: Mapping[RunKey, Record]) -> None:
    """Draw the area kept on the two main tasks, as published.

    Nothing is written before there are runs at lag 0.
    """
    cells_by_task = {task: find_cells(records, "published", task) for task in MAIN_TASKS}
    panels = {task: cells for task, cells in cells_by_task.items() if cells}
    if panels:
        figure = draw_area(panels)
        write_atomically(file, lambda path: figure.savefig(path, format="png", dpi=150))


def draw_area(panels: Mapping[str, Cells]):
    """Area kept against constant lag, a panel per task and a line per method of FIGURE_METHODS.

    A hollow point: some seed dies at every learning rate.
    """
    figure = canvas(4.6 * len(panels), 3.8)
    colors = (FAINT, BLUE, ORANGE, GREEN, VERMILLION, PURPLE)
    styles = (":", "-", "--", "-", "-.", "--")
    markers = ("P", "o", "s", "^", "D", "v")
    axes_of_task = figure.subplots(1, len(panels), sharey=True, squeeze=False)[0]
    for axes, (task, cells) in zip(axes_of_task, panels.items(), strict=True):
        plain(axes, task, "constant lag (updates)", "area kept (%)")
        lags = sorted({lag for _, (kind, lag) in cells if kind == "constant"})
        for method, color, style, marker in zip(
            FIGURE_METHODS, colors, styles, markers, strict=True
        ):
            measured_lags = [lag for lag in lags if (method, ("constant", lag)) in cells]
            cells_of_line = [cells[method, ("constant", lag)] for lag in measured_lags]
            areas = [100 * fmean(cell.best.values()) for cell in cells_of_line]
            # Lags have equal distances on the axis.
            positions = [lags.index(lag) for lag in measured_lags]
            axes.plot(positions, areas, color=color, linestyle=style, marker=marker, label=method)
            dying_points = [
                (position, area)
                for position, area, cell in zip(positions, areas, cells_of_line, strict=True)
                if not cell.living_rates
            ]
            for position, area in dying_points:
                axes.plot(position, area, color=color, marker=marker, markerfacecolor="white")
        axes.set_xticks(range(len(lags)), [str(lag) for lag in lags])
        axes.axhline(0, color=INK, linewidth=0.8)
    lines, names = axes_of_task[0].get_legend_handles_labels()
    figure.legend(lines, names, loc="outside lower center", ncols=3, frameon=False, fontsize=9)
    return figure
