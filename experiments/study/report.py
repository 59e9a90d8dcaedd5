"""The report of a study: report.md with tables of claims and cells, report.json with every number, curves.png."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Mapping, Sequence
from pathlib import Path
from statistics import fmean
from typing import Any

from lagrpo.runs.files import to_json, write_atomically
from lagrpo.runs.plots import INK, plain_axes

from .measures import RunResult, measure, metrics_of, smoothed
from .spec import Claim, Study
from .statistics import Cell, Interval, Values, Verdict

COLORS = (
    "#0072B2",
    "#D55E00",
    "#009E73",
    "#8E4585",
    "#E69F00",
    "#56B4E9",
    "#CC79A7",
    "#222222",
)  # Okabe and Ito
STYLES = ("-", "--", ":", "-.")
Results = Mapping[tuple[Cell, int], RunResult]
Verdicts = Sequence[tuple[Claim, Verdict]]


def write_report(study: Study, results: Results, directory: Path) -> None:
    """Write the report into the directory and print the verdicts."""
    texts = dict.fromkeys([*study.measures, *(claim.measure for claim in study.claims)])
    values = {
        text: {key: measure(text, run, study.smooth) for key, run in results.items()}
        for text in texts
    }
    claims = [(claim, study.verdict(claim, values[claim.measure])) for claim in study.claims]
    write_atomically(directory / "report.json", _json(study, results, values, claims))
    if results and study.curves:
        figure = draw_curves(study, results)
        write_atomically(
            directory / "curves.png", lambda path: figure.savefig(path, format="png", dpi=110)
        )
    write_atomically(directory / "report.md", _markdown(study, results, values, claims))
    for claim, verdict in claims:
        print(f"{verdict.outcome}: {claim.says}")
    print(f"report: {directory / 'report.md'}")


def load_results(file: Path, study: Study) -> dict[tuple[Cell, int], RunResult]:
    """The runs of the study's cells and seeds in a report.json, by label: their settings are not compared."""
    found = {}
    for run in json.loads(file.read_text(encoding="utf-8"))["runs"]:
        cell, curves = tuple(run["cell"].get(axis, "") for axis in study.grid), run["curves"]
        if cell in study.cells and run["seed"] in study.seeds:
            lines = [
                dict(zip(curves, batch, strict=True))
                for batch in zip(*curves.values(), strict=True)
            ]
            found[cell, run["seed"]] = RunResult(lines, run["evaluations"], run["where"])
    return found


def draw_curves(study: Study, results: Results) -> Any:
    """A row of panels per metric, with a panel per label of the last axis if there are several; a line is the mean of a
    cell's seeds, its shade their range."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    panels = [*list(study.grid.values())[-1]] if len(study.grid) > 1 else [""]
    figure = Figure(
        figsize=(max(7.0, 4.6 * len(panels)), 3.6 * len(study.curves)), layout="constrained"
    )
    FigureCanvasAgg(figure)
    rows = figure.subplots(len(study.curves), len(panels), sharex=True, sharey="row", squeeze=False)
    for metric, row in zip(study.curves, rows, strict=True):
        for label, axes in zip(panels, row, strict=True):
            plain_axes(axes)
            axes.set_title(label, loc="left", fontsize=10, fontweight="bold", color=INK)
            for number, cell in enumerate(
                cell for cell in study.cells if not label or cell[-1] == label
            ):
                curves = [run.curve(metric) for (of, _), run in results.items() if of == cell]
                numbers = [
                    [float("nan") if value is None else value for value in curve]
                    for curve in curves
                ]
                columns = list(
                    zip(*(smoothed(curve, study.smooth) for curve in numbers), strict=False)
                )
                color, style, x = (
                    COLORS[number % 8],
                    STYLES[number // 8 % 4],
                    range(1, len(columns) + 1),
                )
                name = ", ".join(cell[:-1] if label else cell)
                axes.plot(
                    x, [*map(fmean, columns)], color=color, linestyle=style, lw=1.8, label=name
                )
                axes.fill_between(
                    x, [*map(min, columns)], [*map(max, columns)], color=color, alpha=0.12, lw=0
                )
        row[0].set_ylabel(f"{metric}, mean of {study.smooth} batches", color=INK, fontsize=9)
    lines, names = rows[0][0].get_legend_handles_labels()
    figure.legend(lines, names, loc="outside lower center", fontsize=8, frameon=False, ncols=3)
    return figure


def _json(study: Study, results: Results, values: Mapping[str, Values], verdicts: Verdicts) -> str:
    """The claims, and a line for each run with its measures and what they are computed from."""
    claims, lines = [], []
    for claim, (outcome, found) in verdicts:
        difference = found and {"mean": found.mean, "half_width": found.half, "seeds": found.n}
        claims.append(
            claim.model_dump(exclude_none=True) | {"verdict": outcome, "difference": difference}
        )
    names = dict.fromkeys([*study.curves, *(name for text in values for name in metrics_of(text))])
    for (cell, seed), run in results.items():
        labels, measures = (
            dict(zip(study.grid, cell, strict=True)),
            {text: values[text][cell, seed] for text in values},
        )
        curves = {name: run.curve(name) for name in names}
        line = {
            "cell": labels,
            "seed": seed,
            "measures": measures,
            "where": run.where,
            "curves": curves,
        }
        lines.append(to_json(line | {"evaluations": run.evaluations}))
    head = to_json({"title": study.title, "claims": claims})
    return f'{head[:-1]}, "runs": [\n' + ",\n".join(lines) + "\n]}\n"


def _markdown(
    study: Study, results: Results, values: Mapping[str, Values], verdicts: Verdicts
) -> str:
    about = (
        f"{len(results)} of {len(study.cells) * len(study.seeds)} runs. Values are means over the seeds ± half their "
        "95 % intervals (Student's t)."
    )
    claims = [["claim", "tested as", "difference", "verdict"]]
    for claim, (outcome, found) in verdicts:
        tested = f"{claim.measure}: {claim.claim}" + (
            f", margin {claim.margin:g}" if claim.margin else ""
        )
        says = claim.says + (f" ({claim.source})" if claim.source else "")
        n = found.n if found else 0
        claims.append(
            [says, tested, format_interval(claim.measure, found), f"{outcome}, {n} seeds"]
        )
    cells = [[*study.grid, "seeds", *study.measures]]
    for cell in study.cells:
        seeds = [seed for of, seed in results if of == cell]
        known = (
            [v for seed in seeds if (v := values[text][cell, seed]) is not None]
            for text in study.measures
        )
        intervals = (Interval.of(numbers) if numbers else None for numbers in known)
        cells.append([*cell, str(len(seeds)), *map(format_interval, study.measures, intervals)])
    where = Counter(
        ", ".join(f"{k} {v}" for k, v in run.where.items() if v is not None)
        for run in results.values()
    )
    parts = [
        f"# {study.title}",
        study.note.strip(),
        about,
        "## Claims",
        _table(claims),
        "## Results",
        _table(cells),
    ]
    parts += ["![curves](curves.png)"] if results and study.curves else []
    return (
        "\n\n".join([*parts, "\n".join(f"- {n} runs: {what}" for what, n in where.most_common())])
        + "\n"
    )


def format_interval(text: str, found: Interval | None) -> str:
    """A value of a measure; shares such as pass@1 in percent."""
    if found is None:
        return "–"
    share = text.rpartition(".")[2].startswith(("pass@", "accuracy"))
    digits = 1 if share or abs(found.mean) >= 10 else 3
    scale, unit = (100, " %") if share else (1, "")
    half = "" if found.half is None else f" ± {scale * found.half:.{digits}f}"
    return f"{scale * found.mean:.{digits}f}{half}{unit}"


def _table(rows: Sequence[Sequence[str]]) -> str:
    head, *rest = [
        "| " + " | ".join(cell.replace("|", "\\|") for cell in row) + " |" for row in rows
    ]
    return "\n".join([head, "|---" * len(rows[0]) + "|", *rest])
