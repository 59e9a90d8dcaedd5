"""The tables of docs/off-policy.md and reports/staleness.md, the figure, and lag_table.json.

`python -m experiments.lag` writes them from the records, together with its report (report.py).
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from itertools import product
from pathlib import Path
from statistics import fmean
from typing import Any

from lagrpo.core.recipes import needs_of
from lagrpo.runs.files import write_atomically
from lagrpo.settings import lag_table
from lagrpo.settings.lag_table import ADVICE, FILE, SHARED_RATE, TASKS, Advice
from lagrpo.study.statistics import Interval

from .distillation import distillation_table, recomputed_sentence
from .language_model import (
    MEASURES,
    at_both_rates,
    language_model_agreement,
    language_model_table,
    load_cells,
)
from .methods import Method
from .plan import VARIANT_RATES
from .rates import (
    controls_by_loss_table,
    controls_table,
    judge_rules,
    other_settings_sentences,
    rules_sentence,
    setting_sentences,
)
from .records import Record, RunKey
from .report import (
    Cell,
    Cells,
    Column,
    area_text,
    find_cells,
    leaders,
    markdown_table,
    rate_name,
    write_figure,
)
from .verdicts import (
    NOT_RUN,
    agreement_table,
    all_tasks_sentences,
    all_tasks_table,
    better_on_both_sentence,
    claims_table,
    compare_with_baseline,
    lengths_table,
    minus_baseline_table,
    on_all_tasks,
    variants_table,
)

ROOT = Path(__file__).parents[2]
DOCS = ROOT / "docs"
FIGURE = DOCS / "images" / "lag.png"
PACKAGE_TABLE = Path(lag_table.__file__).parent / FILE
BLOCKS_OF_PAGES = {
    DOCS / "off-policy.md": ("advice", "setting"),
    ROOT / "reports" / "staleness.md": (
        "expectations",
        "rules",
        "table",
        "differences",
        "tasks",
        "learning rates",
        "schedules",
        "lengths",
        "agreement",
        "variants",
        "language model",
        "controls",
        "distillation",
        "claims",
    ),
}
"""The parts of each page that are written here, each between two marks."""
LAGS = (16, 64, 256)
SCHEDULES_LAG = 64
"""the largest age of the schedules that are compared"""
EXPECTATIONS: tuple[tuple[Column, str], ...] = (
    (("constant", 0), "stale_reinforce"),
    (("sawtooth", 15), "prime_rl"),
    (("sawtooth", 15), "grpo"),
    (("constant", 16), "prime_rl"),
    (("constant", 16), "grpo"),
    (("constant", 64), "prime_rl"),
    (("constant", 64), "grpo"),
    (("constant", 256), "rec_one_side_nois_wide"),
    (("constant", 256), "grpo"),
)
"""Schedule and method of the rows that say what to expect of the advice."""
RECOMMENDED = "prime_rl"

Records = Mapping[RunKey, Record]


def publish(records: Records, methods: Mapping[str, Method]) -> None:
    """Write lag_table.json, the figure and the tables of the pages."""
    cells = {task: find_cells(records, "published", task) for task in TASKS}
    write_atomically(PACKAGE_TABLE, package_table(cells, methods))
    write_figure(FIGURE, records)
    blocks = page_blocks(records, methods)
    for page, names in BLOCKS_OF_PAGES.items():
        text = page.read_text(encoding="utf-8")
        for name in names:
            text = with_block(text, name, blocks[name])
        write_atomically(page, text)


# lag_table.json


def package_table(cells: Mapping[str, Cells], methods: Mapping[str, Method]) -> str:
    """The JSON of lag_table.json: recipe -> constant lag -> task -> measurements.

    A line per lag.
    """
    recipes = []
    for method in methods.values():
        if not method.is_plain_recipe:
            continue
        by_lag: dict[int, dict[str, Any]] = {}
        for task in TASKS:
            for lag, cell in constant_lags(cells[task], method.same_as or method.name):
                if lag > 0:
                    by_lag.setdefault(lag, {})[task] = _measured(cell)
        lines = [f'  "{lag}": {json.dumps(by_lag[lag])}' for lag in sorted(by_lag)]
        if lines:
            recipes.append(f' "{method.recipe_name}": {{\n' + ",\n".join(lines) + "\n }")
    return "{\n" + ",\n".join(recipes) + "\n}\n"


def constant_lags(cells: Cells, method: str) -> list[tuple[int, Cell]]:
    """The cells of a method at constant lags, by ascending lag."""
    pairs = []
    for (name, (kind, lag)), cell in cells.items():
        if name == method and kind == "constant":
            pairs.append((lag, cell))
    return sorted(pairs, key=lambda pair: pair[0])


def _measured(cell: Cell) -> dict[str, Any]:
    interval = Interval.of(list(cell.kept(SHARED_RATE).values()))
    living_rate = cell.highest_living_rate
    return {
        "kept": round(interval.mean, 4),
        "half_interval": None if interval.half is None else round(interval.half, 4),
        "final": round(fmean(cell.final(SHARED_RATE).values()), 4),
        "living_rate": living_rate,
        "kl": None if living_rate is None else round(cell.kl(living_rate), 4),
    }


# docs/off-policy.md and reports/staleness.md


def page_blocks(records: Records, methods: Mapping[str, Method]) -> dict[str, str]:
    """The text of each part of BLOCKS_OF_PAGES."""
    cells = {task: find_cells(records, "published", task) for task in TASKS}
    labels = {method.name: method.label for method in methods.values()}
    on_tasks = on_all_tasks(records, RECOMMENDED, SCHEDULES_LAG)
    comparisons = compare_with_baseline(cells, labels, LAGS)
    return {
        "advice": advice_table(ADVICE),
        "rules": rules_sentence(judge_rules(cells)),
        "expectations": "\n\n".join(
            [
                expectations_table(cells, methods),
                all_tasks_sentences(on_tasks, labels[RECOMMENDED], SCHEDULES_LAG),
            ]
        ),
        "table": page_table(cells, methods),
        "differences": "\n\n".join(
            [
                better_on_both_sentence(comparisons, LAGS),
                minus_baseline_table(comparisons, labels, LAGS),
            ]
        ),
        "tasks": all_tasks_table(on_tasks),
        "learning rates": learning_rates_table(cells, methods),
        "schedules": schedules_table(records, methods),
        "lengths": lengths_table(records, labels),
        "agreement": agreement_table(
            records, LAGS, language_model_agreement(records, methods, LAGS)
        ),
        "language model": language_model_table(records, methods),
        "variants": variants_table(records, labels),
        "controls": "\n\n".join(
            [
                other_settings_sentences(records),
                controls_table(records),
                controls_by_loss_table(records, labels),
            ]
        ),
        "distillation": "\n\n".join([recomputed_sentence(records), distillation_table(records)]),
        "setting": setting_sentences(records),
        "claims": claims_table(cells, labels, SHARED_RATE),
    }


def with_block(page: str, name: str, text: str) -> str:
    """The page with other text between the two marks of a part."""
    begin = f"<!-- {name} of experiments/lag -->"
    end = f"<!-- end of the {name} -->"
    head, _, after_begin = page.partition(begin)
    _, _, tail = after_begin.partition(end)
    return f"{head}{begin}\n\n{text}\n\n{end}{tail}"


def advice_table(rows: Sequence[Advice]) -> str:
    """A row for each staleness: the loss and the learning rate to start with."""
    table = [["your samples", "loss", "learning rate to start with"]]
    for advice in rows:
        losses = " or ".join(f"`{name}`" for name in advice.recipes)
        if advice.more:
            losses += f", and {advice.more} if you can"
        age = "older"
        if advice is rows[0]:
            age = f"fresh, or up to {advice.staleness} updates old"
            losses += ", or the loss that you use"
        elif advice.staleness is not None:
            age = f"up to {advice.staleness} updates old, as with `sync_every` up to "
            age += str(advice.staleness + 1)
        rate = f"{advice.rate}, the best rate with fresh samples" if age[0] == "f" else advice.rate
        table.append([age, losses, rate])
    links = "[another engine](#correct-for-another-engine), [offline](#train-on-offline-data)"
    return markdown_table([*table, ["from another engine, or offline", links, ""]])


def expectations_table(cells: Mapping[str, Cells], methods: Mapping[str, Method]) -> str:
    """A row for each of EXPECTATIONS: area kept, score at the end, and the language model.

    A cell has the value at a third of the best learning rate with fresh samples, then at that rate.
    """
    head = ["ages", "loss"]
    for task in TASKS:
        head += [f"area kept on `{task}`", f"end of `{task}`"]
    rows = [[*head, *(f"SmolLM2-135M, {words}" for words in MEASURES.values())]]
    language_model_cells = load_cells()
    for column, name in EXPECTATIONS:
        if not all((name, column) in cells[task] for task in TASKS):
            continue
        kind, lag = column
        method = methods[name]
        # With fresh samples, the loss without any correction is plain REINFORCE.
        row = [
            str(lag) if kind == "constant" else f"0 to {lag}",
            "REINFORCE" if lag == 0 else method.label,
        ]
        for task in TASKS:
            cell = cells[task].get((name, column))
            row += [both_rates_text(cell, Cell.kept), both_rates_text(cell, Cell.final)]
        for measure in MEASURES:
            if kind == "constant":
                text = at_both_rates(language_model_cells, method.recipe_name, lag, measure)
            else:
                text = NOT_RUN
            row.append(text)
        rows.append(row)
    return markdown_table(rows)


def page_table(cells: Mapping[str, Cells], methods: Mapping[str, Method]) -> str:
    """A row per method.

    Area kept and score at the end, stable learning rates (every seed lives), area kept at one rate,
    needs, programs that ship it, source.
    """
    head = ["loss"]
    head += [f"{task} {lag}" for task in TASKS for lag in LAGS]
    head += ["stable learning rates", "at one rate", "needs", "shipped by", "source"]
    rows = [head]
    for method, largest_lag in ranked(cells, methods):
        row = [method.label]
        for task, lag in product(TASKS, LAGS):
            row.append(cell_text(cells[task], method, ("constant", lag), with_final=True))
        row.append(living_rates_text(cells, method, largest_lag))
        row.append(one_rate_text(cells, method, largest_lag))
        row.append(", ".join(needs_of(method.recipe)) or "–")
        row.append(method.shipped_by or "–")
        row.append(method.recipe.source.partition("arXiv ")[2][: len("2505.22257")] or "–")
        rows.append(row)
    return markdown_table(rows)


def learning_rates_table(cells: Mapping[str, Cells], methods: Mapping[str, Method]) -> str:
    """A row per method: the area kept at each of two learning rates, as in "92 / 91"."""
    columns: dict[str, Column] = {str(lag): ("constant", lag) for lag in LAGS}
    columns["mixed"] = ("mixed", SCHEDULES_LAG)
    rows = [["loss", *(f"{task} {title}" for task in TASKS for title in columns)]]
    for method, _ in ranked(cells, methods):
        row = [method.label]
        for task in TASKS:
            for column in columns.values():
                row.append(both_rates_text(cells[task].get((method.name, column))))
        rows.append(row)
    return markdown_table(rows)


def schedules_table(records: Records, methods: Mapping[str, Method]) -> str:
    """A row per method: area kept with other schedules of the same largest age.

    The last column of a task has equal advantages and reductions, at constant lag.
    """
    published = {task: find_cells(records, "published", task) for task in TASKS}
    equal = {task: find_cells(records, "equal", task) for task in TASKS}
    head = ["loss"]
    for task in TASKS:
        head += [f"{task} constant", "sawtooth", "mixed", "equal"]
    rows = [head]
    constant = ("constant", SCHEDULES_LAG)
    for method, _ in ranked(published, methods):
        row = [method.label]
        for task in TASKS:
            row += [
                cell_text(published[task], method, constant),
                cell_text(published[task], method, ("sawtooth", SCHEDULES_LAG)),
                cell_text(published[task], method, ("mixed", SCHEDULES_LAG)),
                cell_text(equal[task], method, constant),
            ]
        rows.append(row)
    return markdown_table(rows)


def ranked(cells: Mapping[str, Cells], methods: Mapping[str, Method]) -> list[tuple[Method, int]]:
    """The methods, best first, each with its largest lag that was run on both tasks.

    Methods with runs at the largest lag come first, then by the area kept on the worse task.
    """
    ranks = []
    for method in methods.values():
        rank = largest_common_lag(cells, method)
        if rank is not None:
            ranks.append((rank, method))
    ranks.sort(key=lambda pair: pair[0], reverse=True)
    return [(method, lag) for (lag, _), method in ranks]


def cell_text(cells: Cells, method: Method, column: Column, *, with_final: bool = False) -> str:
    """The area kept by a method, and the score at the end if it is asked for, or a dash."""
    cell = cells.get((method.name, column))
    if cell is None:
        return NOT_RUN
    text = area_text(cell, is_best=method.name in leaders(cells, column))
    if with_final:
        text += f", {100 * fmean(cell.final(cell.best_rate).values()):.0f}"
    return text


def largest_common_lag(cells: Mapping[str, Cells], method: Method) -> tuple[int, float] | None:
    """The largest lag of LAGS that was run on both tasks, and the area kept on the worse task.

    None if there is no such lag.
    """
    for lag in reversed(LAGS):
        cells_by_task = [cells[task].get((method.name, ("constant", lag))) for task in TASKS]
        existing = [cell for cell in cells_by_task if cell is not None]
        if len(existing) == len(TASKS):
            return lag, min(fmean(cell.best.values()) for cell in existing)
    return None


def both_rates_text(
    cell: Cell | None, measure: Callable[[Cell, float], Mapping[int, float]] = Cell.kept
) -> str:
    """A measure in percent at VARIANT_RATES, the lower rate first. †: a seed dies there."""
    if cell is None:
        return NOT_RUN
    texts = []
    for rate in VARIANT_RATES:
        mean = fmean(measure(cell, rate).values())
        mark = "" if rate in cell.living_rates else " †"
        texts.append(f"{100 * mean:.0f}{mark}")
    return " / ".join(texts)


def living_rates_text(cells: Mapping[str, Cells], method: Method, lag: int) -> str:
    """The learning rates at which every seed lives at a lag, on both tasks."""
    by_task = [set(cells[task][method.name, ("constant", lag)].living_rates) for task in TASKS]
    living = set.intersection(*by_task)
    if not living:
        return f"none (lag {lag})"
    lowest = rate_name(min(living))
    highest = rate_name(max(living))
    rates = lowest if lowest == highest else f"{lowest} to {highest}"
    return f"{rates} (lag {lag})"


def one_rate_text(cells: Mapping[str, Cells], method: Method, lag: int) -> str:
    """The area kept on each task at the same learning rate.

    It is the rate with the largest area on the worse task, among those at which every seed lives
    on both.
    """
    by_task = [cells[task][method.name, ("constant", lag)] for task in TASKS]
    living = set.intersection(*(set(cell.living_rates) for cell in by_task))
    if not living:
        return "–"

    def kept(rate: float) -> list[float]:
        return [fmean(cell.kept(rate).values()) for cell in by_task]

    best_rate = max(sorted(living), key=lambda rate: min(kept(rate)))
    areas = " and ".join(f"{100 * area:.0f}" for area in kept(best_rate))
    return f"{areas} at {rate_name(best_rate)}"
