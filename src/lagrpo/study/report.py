"""The report of a study: tables in report.md, every number in report.json, curves.png."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from pathlib import Path
from statistics import fmean
from typing import TYPE_CHECKING

from lagrpo.errors import as_settings_error
from lagrpo.logs import print_text, visible
from lagrpo.runs.files import read_json_object, to_json, write_atomically
from lagrpo.runs.plots import INK, plain_axes
from lagrpo.terminal.text import count_of
from lagrpo.types import JsonView

from .measures import RunResult, measure, metrics_of, smoothed
from .spec import Claim, Study
from .statistics import ROUNDING, Cell, Interval, Values, Verdict

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

# After Okabe and Ito: distinct with any color vision.
COLORS = (
    "#0072B2",
    "#D55E00",
    "#009E73",
    "#8E4585",
    "#E69F00",
    "#56B4E9",
    "#CC79A7",
    "#222222",
)
STYLES = ("-", "--", ":", "-.")
Results = Mapping[tuple[Cell, int], RunResult]
Verdicts = Sequence[tuple[Claim, Verdict]]


def write_report(study: Study, results: Results, directory: Path) -> None:
    """Writes the report into the directory and prints the verdicts."""
    values = {
        text: {key: measure(text, run, study.smooth) for key, run in results.items()}
        for text in study.all_measures
    }
    claims = [(claim, study.verdict(claim, values[claim.measure])) for claim in study.claims]
    write_atomically(directory / "report.json", _json(study, results, values, claims))
    if results and study.curves:
        figure = draw_curves(study, results)
        write_atomically(
            directory / "curves.png", lambda path: figure.savefig(path, format="png", dpi=110)
        )
    write_atomically(directory / "report.md", visible(_markdown(study, results, values, claims)))
    for claim, verdict in claims:
        print_text(f"{verdict.outcome}: {claim.says}")
    print_text(f"report: {directory / 'report.md'}")


def load_results(file: Path, study: Study) -> dict[tuple[Cell, int], RunResult]:
    """The runs of the study's cells and seeds in a report.json.

    They are found by their labels; their settings are not compared.
    """
    with as_settings_error(f"{file} is not a report.json", LookupError, TypeError, AttributeError):
        return _read_results(read_json_object(file)["runs"], study)


def _read_results(runs: Sequence[JsonView], study: Study) -> dict[tuple[Cell, int], RunResult]:
    """Returns the runs of the study's cells and seeds."""
    results = {}
    for run in runs:
        # A record made before an axis was added has no label of it, and matches no cell.
        cell = tuple(run["cell"].get(axis, "") for axis in study.grid)
        if cell not in study.cells or run["seed"] not in study.seeds:
            continue
        curves = run["curves"]
        lines = [
            dict(zip(curves, batch, strict=True)) for batch in zip(*curves.values(), strict=True)
        ]
        results[cell, run["seed"]] = RunResult(lines, run["evaluations"], run["where"])
    return results


def draw_curves(study: Study, results: Results) -> Figure:
    """Draws a row of panels per metric.

    A row has a panel per label of the last axis if there are several axes.

    A line is the mean of a cell's seeds, its shade their range.
    """
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    panels = list(list(study.grid.values())[-1]) if len(study.grid) > 1 else [""]
    figure = Figure(
        figsize=(max(7.0, 4.6 * len(panels)), 3.6 * len(study.curves)), layout="constrained"
    )
    FigureCanvasAgg(figure)
    rows = figure.subplots(len(study.curves), len(panels), sharex=True, sharey="row", squeeze=False)
    for metric, row in zip(study.curves, rows, strict=True):
        for label, axes in zip(panels, row, strict=True):
            plain_axes(axes)
            axes.set_title(label, loc="left", fontsize=10, fontweight="bold", color=INK)
            panel_cells = [cell for cell in study.cells if not label or cell[-1] == label]
            for number, cell in enumerate(panel_cells):
                curves = [run.curve(metric) for (key, _), run in results.items() if key == cell]
                name = ", ".join(cell[:-1] if label else cell)
                _draw_cell(axes, curves, study.smooth, number, name)
        row[0].set_ylabel(f"{metric}, mean of {study.smooth} batches", color=INK, fontsize=9)
    lines, names = rows[0][0].get_legend_handles_labels()
    figure.legend(lines, names, loc="outside lower center", fontsize=8, frameon=False, ncols=3)
    return figure


def _draw_cell(
    axes: Axes, curves: Sequence[Sequence[float | None]], smooth: int, number: int, name: str
) -> None:
    """Draws the mean and the range of a cell's seeds. `number` chooses color and style."""
    numbers = [[float("nan") if value is None else value for value in curve] for curve in curves]
    smoothed_curves = [smoothed(curve, smooth) for curve in numbers]
    # By batch, up to the end of the shortest curve.
    columns = list(zip(*smoothed_curves, strict=False))
    lowest = [min(column) for column in columns]
    means = [fmean(column) for column in columns]
    highest = [max(column) for column in columns]
    batches = range(1, len(columns) + 1)
    color = COLORS[number % len(COLORS)]
    style = STYLES[number // len(COLORS) % len(STYLES)]
    axes.plot(batches, means, color=color, linestyle=style, lw=1.8, label=name)
    axes.fill_between(batches, lowest, highest, color=color, alpha=0.12, lw=0)


def _json(study: Study, results: Results, values: Mapping[str, Values], verdicts: Verdicts) -> str:
    """The claims, and a line for each run with its measures and what they are computed from."""
    claims = []
    for claim, (outcome, interval, _) in verdicts:
        difference = None
        if interval is not None:
            difference = {
                "mean": interval.mean,
                "half_width": interval.half,
                "seeds": interval.n,
            }
        claim_fields = claim.model_dump(exclude_none=True)
        claims.append(claim_fields | {"verdict": outcome, "difference": difference})
    names = dict.fromkeys([*study.curves, *(name for text in values for name in metrics_of(text))])
    lines = []
    for (cell, seed), run in results.items():
        line = {
            "cell": dict(zip(study.grid, cell, strict=True)),
            "seed": seed,
            "measures": {text: values[text][cell, seed] for text in values},
            "where": run.where,
            "curves": {name: run.curve(name) for name in names},
            "evaluations": run.evaluations,
        }
        lines.append(to_json(line))
    head = to_json({"title": study.title, "claims": claims})
    return f'{head[:-1]}, "runs": [\n' + ",\n".join(lines) + "\n]}\n"


def _markdown(
    study: Study, results: Results, values: Mapping[str, Values], verdicts: Verdicts
) -> str:
    runs = f"{len(results)} of {len(study.cells) * len(study.seeds)} runs."
    parts = [
        f"# {study.title}",
        study.note.strip(),
        f"{runs} Values are means over the seeds ± half their 95 % intervals (Student's t).",
        "## Claims",
        _table(_claim_rows(verdicts)),
        "## Results",
        _table(_cell_rows(study, results, values)),
    ]
    if results and study.curves:
        parts.append("![curves](curves.png)")
    machines = Counter(
        ", ".join(f"{name} {value}" for name, value in run.where.items() if value is not None)
        for run in results.values()
    )
    lines = [f"- {count_of(n, 'run')}: {machine}" for machine, n in machines.most_common()]
    parts.append("\n".join(lines))
    return "\n\n".join(parts) + "\n"


def _claim_rows(verdicts: Verdicts) -> list[list[str]]:
    rows = [["claim", "tested as", "difference", "verdict"]]
    for claim, (outcome, interval, lacking) in verdicts:
        says = claim.says
        if claim.source:
            says += f" ({claim.source})"
        test = f"{claim.measure}: {claim.claim}"
        if claim.margin:
            test += f", margin {claim.margin:g}"
        difference = format_interval(claim.measure, interval)
        verdict = "not run"
        if interval is not None:
            verdict = f"{outcome}, {count_of(interval.n, 'seed')}"
        if lacking:
            verdict = f"{outcome}: no value in {count_of(lacking, 'run')}"
        rows.append([says, test, difference, verdict])
    return rows


def _cell_rows(study: Study, results: Results, values: Mapping[str, Values]) -> list[list[str]]:
    rows = [[*study.grid, "seeds", *study.measures]]
    for cell in study.cells:
        seeds = [seed for key, seed in results if key == cell]
        row = [*cell, str(len(seeds))]
        for text in study.measures:
            seed_values = [values[text][cell, seed] for seed in seeds]
            numbers = [value for value in seed_values if value is not None]
            column = format_interval(text, Interval.of(numbers) if numbers else None)
            if numbers and len(numbers) < len(seeds):
                column += f" ({count_of(len(numbers), 'value')})"
            row.append(column)
        rows.append(row)
    return rows


def format_interval(text: str, interval: Interval | None) -> str:
    """A value of a measure. Shares such as pass@1 are in percent."""
    if interval is None:
        return "–"
    is_share = text.rpartition(".")[2].startswith(("pass@", "accuracy"))
    digits = 1 if is_share or abs(interval.mean) >= 10 else 3
    scale = 100 if is_share else 1
    unit = " %" if is_share else ""
    largest = max(abs(interval.mean), interval.half or 0.0)
    if not is_share and ROUNDING < largest < 0.001:
        # Three digits after the point would be zeros, as they should be for rounding errors.
        half = "" if interval.half is None else f" ± {interval.half:.2g}"
        return f"{interval.mean:.2g}{half}"
    half = "" if interval.half is None else f" ± {scale * interval.half:.{digits}f}"
    return f"{scale * interval.mean:.{digits}f}{half}{unit}"


def _table(rows: Sequence[Sequence[str]]) -> str:
    lines = ["| " + " | ".join(cell.replace("|", "\\|") for cell in row) + " |" for row in rows]
    head, *body = lines
    return "\n".join([head, "|---" * len(rows[0]) + "|", *body])
