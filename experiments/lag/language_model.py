"""A language model beside the small tasks: the table of reports/staleness.md, and the order.

The runs are those of a study, SmolLM2-135M on single-digit addition, of which the record lies in
experiments/papers/results:

    lagrpo study experiments/papers/staleness-llm.toml
"""

from __future__ import annotations

import json
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import fmean

from lagrpo.settings.lag_table import TASKS
from lagrpo.study.statistics import Interval

from .methods import Method
from .report import markdown_table
from .verdicts import NOT_RUN, Records, agreement_text, areas

RECORD = Path(__file__).parents[1] / "papers" / "results" / "staleness-llm.json"
MEASURES = {"mean reward": "mean reward", "pass@1": "pass@1 at the end"}
"""What orders the losses with the language model, and its words in the table."""
RATES = ("6e-6", "2e-5")
"""A third of the better of two learning rates with fresh samples, and that rate."""
Runs = Sequence[Mapping[str, float]]
"""the measures of the runs of a cell, one per seed"""


@dataclass(frozen=True, slots=True)
class LanguageModelCell:
    """The runs of a recipe at a constant lag and a learning rate."""

    recipe: str
    lag: int
    rate: str
    runs: Runs

    def mean(self, measure: str) -> float:
        """The mean of a measure over the seeds."""
        return fmean(run[measure] for run in self.runs)


def load_cells(record: Path = RECORD) -> list[LanguageModelCell]:
    """The cells of the study by falling lag, then by falling mean reward."""
    runs_by_cell: defaultdict[tuple[str, int, str], list[Mapping[str, float]]] = defaultdict(list)
    for run in json.loads(record.read_text(encoding="utf-8"))["runs"]:
        recipe, _, lag = run["cell"]["run"].partition(", lag ")
        rate = run["cell"]["lr"].removeprefix("lr ")
        runs_by_cell[recipe, int(lag), rate].append(run["measures"])
    cells = [LanguageModelCell(*key, runs) for key, runs in runs_by_cell.items()]
    return sorted(cells, key=lambda cell: (cell.lag, cell.mean("mean reward")), reverse=True)


def at_best_rates(cells: Sequence[LanguageModelCell]) -> list[LanguageModelCell]:
    """For each recipe and lag its cell at the learning rate with the largest mean reward."""
    best_cells: dict[tuple[str, int], LanguageModelCell] = {}
    for cell in cells:  # by falling mean reward
        best_cells.setdefault((cell.recipe, cell.lag), cell)
    return list(best_cells.values())


def language_model_table(
    records: Records, methods: Mapping[str, Method], record: Path = RECORD
) -> str:
    """A row per lag, recipe and learning rate.

    It has the area that the recipe keeps on the small tasks at that lag.
    """
    names = methods_by_recipe(methods)
    head = ["lag", "loss", "learning rate", "mean reward", "largest fall", "reward at the end"]
    rows = [[*head, "pass@1", "KL from α", "seeds", *TASKS]]
    for cell in load_cells(record):
        name = names[cell.recipe]
        row = [
            str(cell.lag),
            f"`{cell.recipe}`",
            cell.rate,
            _interval(cell.runs, "mean reward"),
            f"{100 * cell.mean('fall reward'):.0f}",
            _interval(cell.runs, "end reward"),
            _interval(cell.runs, "pass@1"),
            f"{cell.mean('mean rollout/kl'):.3f}",
            str(len(cell.runs)),
        ]
        for task in TASKS:
            kept = areas(records, task, ("constant", cell.lag))
            row.append(f"{100 * kept[name]:.0f}" if name in kept else NOT_RUN)
        rows.append(row)
    return markdown_table(rows)


def at_both_rates(cells: Sequence[LanguageModelCell], recipe: str, lag: int, measure: str) -> str:
    """The mean of a measure in percent at each of RATES, as in "85 / 84"."""
    by_rate = {cell.rate: cell for cell in cells if (cell.recipe, cell.lag) == (recipe, lag)}
    if not by_rate:
        return NOT_RUN
    texts = []
    for rate in RATES:
        cell = by_rate.get(rate)
        texts.append(f"{100 * cell.mean(measure):.0f}" if cell else NOT_RUN)
    return " / ".join(texts)


def language_model_agreement(
    records: Records,
    methods: Mapping[str, Method],
    lags: Sequence[int],
    record: Path = RECORD,
) -> list[list[str]]:
    """A row per small task and measure of the language model: how far the two orders agree."""
    names = methods_by_recipe(methods)
    language_model_cells = at_best_rates(load_cells(record))
    rows = []
    for task in TASKS:
        for measure, words in MEASURES.items():
            row = [f"`{task}` and SmolLM2-135M on addition, {words}"]
            for lag in lags:
                order = {
                    names[cell.recipe]: cell.mean(measure)
                    for cell in language_model_cells
                    if cell.lag == lag
                }
                row.append(agreement_text(order, areas(records, task, ("constant", lag))))
            rows.append(row)
    return rows


def methods_by_recipe(methods: Mapping[str, Method]) -> dict[str, str]:
    """The name of the method that is a recipe with its own knobs, by the recipe's name."""
    plain_methods = [method for method in methods.values() if method.is_plain_recipe]
    return {method.recipe_name: method.name for method in plain_methods}


def _interval(runs: Runs, measure: str) -> str:
    """The mean in percent: of two seeds with both values, of more ± half the 95 % interval."""
    values = [run[measure] for run in runs]
    interval = Interval.of(values)
    mean = f"{100 * interval.mean:.0f}"
    if interval.half is None:
        return mean
    if len(values) == 2:
        return f"{mean} ({', '.join(f'{100 * value:.0f}' for value in sorted(values))})"
    return f"{mean} ± {100 * interval.half:.0f}"
