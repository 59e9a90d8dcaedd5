"""Tables of reports/staleness.md: losses that beat plain GRPO, and how far orders of losses agree.

`publish.py` writes them, so that the report never says more than the records.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import product
from statistics import fmean
from typing import Literal, TypeVar

from lagrpo.core.estimators import student_probability, student_quantile
from lagrpo.settings.lag_table import TASKS
from lagrpo.study.statistics import CONFIDENCE, Verdict

from .ages import Kind
from .methods import Table
from .plan import (
    LARGE_RATES,
    LENGTH_LAGS,
    LENGTH_METHODS,
    LENGTH_RATES,
    LENGTH_TASKS,
    MAIN_METHODS,
    VARIANT_RATES,
)
from .records import Record, RunKey
from .report import (
    BASELINE,
    Cells,
    Column,
    final_verdict_on,
    find_cells,
    markdown_table,
    rank_agreement,
    verdict_on,
)
from .tasks import TASKS as ALL_TASKS

Records = Mapping[RunKey, Record]
Key = TypeVar("Key")
Word = Literal["better", "worse", "undecided"]
WORDS: dict[str, Word] = {
    "supported": "better",
    "refuted": "worse",
    "inconclusive": "undecided",
}
SCHEDULES: tuple[Kind, ...] = ("sawtooth", "mixed")
NOT_RUN = "–"
DIFFERENCES = {
    "chain-many": "chain with 32 right answers",
    "chain-graded": "chain with a graded reward",
    "chain-long": "chain with 24 tokens, a better teacher, half the prompts and updates",
    "chain-inept": (
        "chain with 16 tokens, a graded reward, a worse teacher, half the prompts and updates"
    ),
    "chain-luck": "chain with a wrong reward one time in ten",
    "chain-wide": "chain with 3,125 right answers and a worse teacher",
    "gamble-sure": "gamble without luck: reckless jumps do no harm",
    "gamble-exact": "the same with an exact reward",
    "gamble-apt": "gamble with a teacher who errs seldom",
    "gamble-firm": "gamble with a teacher who repeats himself",
    "gamble-short": "gamble with 4 to 7 tokens",
    "journey": "gamble with 21 to 42 tokens",
    "chain-other": "chain with another table and another start",
    "gamble-other": "gamble with another table and another start",
    "chain-large": "chain with a model of 132,000 parameters",
    "gamble-large": "gamble with a model of 134,000 parameters",
}
"""What each variant changes of its family's base."""
STARTS = {
    "chain": (1.2, 3.0),
    "chain-many": (1.1, 6.0),
    "chain-wide": (0.9, 9.2),
    "chain-graded": (1.2, 3.0),
    "chain-long": (1.6, 6.4),
    "chain-inept": (6.6, 14.9),
    "chain-luck": (1.2, 3.0),
    "chain-other": (1.2, 3.0),
    "gamble": (5.6, 15.7),
    "gamble-sure": (3.1, 15.7),
    "gamble-exact": (3.1, 15.7),
    "gamble-apt": (1.8, 10.3),
    "gamble-firm": (6.4, 5.9),
    "gamble-short": (1.7, 3.9),
    "journey": (10.7, 31.9),
    "chain-large": (1.1, 2.9),
    "gamble-large": (5.6, 15.6),
    "gamble-other": (5.6, 15.5),
}
"""Mistakes and entropy (nats) of a completion of the starting point.

`python -m experiments.lag.starts` prints them.
"""


# Better or worse than plain GRPO


@dataclass(frozen=True, slots=True)
class AgainstBaseline:
    """A method against plain GRPO on a task, both at their best learning rates."""

    task: str
    area: Verdict
    """on the areas kept"""
    final: Verdict
    """on the scores at the end"""


Comparisons = Mapping[tuple[str, str, int], AgainstBaseline]
"""by method, task and constant lag"""


def compare_with_baseline(
    cells: Mapping[str, Cells], names: Iterable[str], lags: Sequence[int]
) -> Comparisons:
    """Each method but plain GRPO against it, on each task and at each lag that both were run at."""
    comparisons = {}
    for name, task, lag in product(names, TASKS, lags):
        area = verdict_on(cells[task], name, ("constant", lag))
        final = final_verdict_on(cells[task], name, ("constant", lag))
        if name != BASELINE and area is not None and final is not None:
            comparisons[name, task, lag] = AgainstBaseline(task, area, final)
    return comparisons


def p_value(verdict: Verdict) -> float:
    """The two-sided p of Student's t test that the mean difference is 0; 1 for a single seed."""
    difference = verdict.difference
    if difference is None or difference.half is None:
        return 1.0
    if difference.half == 0:
        # Identical differences: `judge` decides whether they are enough.
        return 1.0 if verdict.outcome == "inconclusive" else 0.0
    degrees = difference.n - 1
    t = abs(difference.mean) / difference.half * student_quantile(degrees, CONFIDENCE)
    return 1 - student_probability(t, degrees)


def holm(p_values: Mapping[Key, float], level: float = 0.05) -> set[Key]:
    """The hypotheses that Holm's procedure rejects: at `level` not even one of all is wrong."""
    rejected = set()
    for rank, key in enumerate(sorted(p_values, key=p_values.__getitem__)):
        if p_values[key] > level / (len(p_values) - rank):
            break
        rejected.add(key)
    return rejected


def minus_baseline_table(
    comparisons: Comparisons, labels: Mapping[str, str], lags: Sequence[int]
) -> str:
    """A row per loss: points above plain GRPO by area kept / by score at the end.

    Bold: decided with Holm's correction over all areas, or over all scores at the end. `labels` has
    the text of each method.
    """
    decided_areas = holm({key: p_value(item.area) for key, item in comparisons.items()})
    decided_finals = holm({key: p_value(item.final) for key, item in comparisons.items()})
    rows = [["loss minus `grpo`", *(f"{task} {lag}" for task in TASKS for lag in lags)]]
    for name, label in labels.items():
        row = [label]
        for task, lag in product(TASKS, lags):
            key = name, task, lag
            if key not in comparisons:
                row.append(NOT_RUN)
                continue
            area = _points_text(comparisons[key].area, is_decided=key in decided_areas)
            final = _points_text(comparisons[key].final, is_decided=key in decided_finals)
            row.append(f"{area} / {final}")
        if set(row[1:]) != {NOT_RUN}:
            rows.append(row)
    return markdown_table(rows)


def _points_text(verdict: Verdict, *, is_decided: bool) -> str:
    assert verdict.difference is not None
    text = f"{100 * verdict.difference.mean:+.0f}".replace("-", "−")
    return f"**{text}**" if is_decided else text


def better_on_both_sentence(comparisons: Comparisons, lags: Sequence[int]) -> str:
    """The numbers of losses that beat plain GRPO on both tasks, with Holm's correction."""
    names_by_lag = {
        lag: {name for name, _, other_lag in comparisons if other_lag == lag} for lag in lags
    }
    parts: list[str] = []
    for measure in "area", "final":
        decided = holm({key: p_value(getattr(item, measure)) for key, item in comparisons.items()})
        better = {
            key for key in decided if getattr(comparisons[key], measure).outcome == "supported"
        }
        counts = [
            str(sum(all((name, task, lag) in better for task in TASKS) for name in names))
            for lag, names in names_by_lag.items()
        ]
        parts.append(" / ".join(counts))
    return (
        f"With Holm's correction over {len(comparisons)} comparisons, {parts[0]} of "
        f"{' / '.join(str(len(names)) for names in names_by_lag.values())} losses keep more than "
        f"`{BASELINE}` on both tasks at lags "
        f"{' / '.join(map(str, lags))}. {parts[1]} end higher on both."
    )


# Claims of the papers

CLAIMS = (
    ("m2po", 256, "loses nothing at lag 256, 1.7B to 32B (2510.01161)"),
    ("oapl", 256, "learns at lag 400 (2602.19362)"),
    ("vespo", 64, "stable at lag 64, where GRPO and SAPO collapse at 4 (2602.10693)"),
    ("dppo_tv", 64, "stable where importance weights and CISPO collapse (2602.04879)"),
    ("rec_one_side_nois_wide", 64, "a wide range learns more with stale samples (2509.24203)"),
    ("seq_tis_ess", 64, "a rate scaled by ESS prevents a collapse (2602.17616)"),
    ("a3po", 64, "as good as decoupled PPO, 1.8 times as fast (2512.06547)"),
    ("prime_rl", 16, "the default of prime-rl, used at lags of 1 to 4 (2602.04879)"),
)
"""Method, the lag at which it is compared here, and what its authors report."""


def claims_table(cells: Mapping[str, Cells], labels: Mapping[str, str], rate: float) -> str:
    """A row for each of CLAIMS: what its authors report, and area and KL here at one rate."""
    rows = [["loss", "theirs", "lag here", "area kept here", "KL there"]]
    for name, lag, text in CLAIMS:
        at_lag = [cells[task][name, ("constant", lag)] for task in TASKS]
        kept = " and ".join(f"{100 * fmean(cell.kept(rate).values()):.0f}" for cell in at_lag)
        kl = " and ".join(f"{cell.kl(rate):.2g}" for cell in at_lag)
        rows.append([labels[name], text, str(lag), kept.replace("-", "−"), kl])
    return markdown_table(rows)


# One loss on all tasks


def on_all_tasks(records: Records, method: str, lag: int) -> list[AgainstBaseline]:
    """A method against plain GRPO on each task that both were run on, at a constant lag."""
    column = ("constant", lag)
    comparisons = []
    for task in ALL_TASKS:
        cells = find_cells(records, "published", task)
        area = verdict_on(cells, method, column)
        final = final_verdict_on(cells, method, column)
        if area is not None and final is not None:
            comparisons.append(AgainstBaseline(task, area, final))
    return comparisons


def all_tasks_table(comparisons: Sequence[AgainstBaseline]) -> str:
    """A row per task: the differences in points, and their verdicts."""
    rows = [["task", "seeds", "area kept", "score at the end"]]
    for item in comparisons:
        seeds = item.area.difference.n if item.area.difference else 0
        row = [f"`{item.task}`", str(seeds), _difference_text(item.area, digits=0)]
        rows.append([*row, _difference_text(item.final, digits=1)])
    return markdown_table(rows)


def _difference_text(verdict: Verdict, digits: int) -> str:
    """A verdict and its difference in points, as in "better, +8 ± 1"."""
    difference = verdict.difference
    if difference is None:
        return NOT_RUN
    half = "" if difference.half is None else f" ± {100 * difference.half:.{digits}f}"
    mean = f"{100 * difference.mean:+.{digits}f}".replace("-", "−")
    return f"{WORDS[verdict.outcome]}, {mean}{half}"


def all_tasks_sentences(comparisons: Sequence[AgainstBaseline], label: str, lag: int) -> str:
    """The same in words: on how many tasks the method gains more, and on how many it ends higher.

    `label` has the text of the method.
    """
    better = [item for item in comparisons if item.area.outcome == "supported"]
    points = [round(100 * item.area.difference.mean) for item in better if item.area.difference]
    higher = sum(item.final.outcome == "supported" for item in comparisons)
    lower = sum(item.final.outcome == "refuted" for item in comparisons)
    distance = f", by {min(points)} to {max(points)} points" if points else ""
    return (
        f"At lag {lag} {label} keeps more than `{BASELINE}` on {len(better)} of "
        f"{len(comparisons)} small tasks{distance}. "
        f"It ends higher on {higher or 'none'} of them, lower on {lower or 'none'}."
    )


# Agreement


@dataclass(frozen=True, slots=True)
class Order:
    """The runs that order the losses, at a lag that is still open."""

    task: str
    kind: Kind = "constant"
    table: Table = "published"
    rates: tuple[float, ...] | None = None
    """None for all learning rates"""

    def areas(self, records: Records, lag: int) -> dict[str, float]:
        """The mean area kept by method, each at its best rate of those that were run."""
        return areas(records, self.task, (self.kind, lag), self.table, self.rates)


def agreement_table(
    records: Records, lags: Sequence[int], more_rows: Sequence[Sequence[str]] = ()
) -> str:
    """Rank correlations of the losses by area kept.

    A row compares two tables that differ in one thing; `more_rows` follow.
    """
    pairs = {"`chain` and `gamble`": (Order("chain"), Order("gamble"))}
    # A table at one learning rate might have chosen either.
    low, high = VARIANT_RATES
    for task in TASKS:
        title = f"learning rates 3e-4 and 1e-3, on `{task}`"
        pairs[title] = (Order(task, rates=(low,)), Order(task, rates=(high,)))
    for task in TASKS:
        title = f"as published and with equal advantages and reductions, on `{task}`"
        pairs[title] = (Order(task), Order(task, table="equal"))
    for kind in SCHEDULES:
        for task in TASKS:
            pairs[f"constant lag and {kind} ages, on `{task}`"] = (Order(task), Order(task, kind))
    for task in TASKS:
        title = f"17,000 and 132,000 parameters, on `{task}`"
        large = Order(f"{task}-large", rates=LARGE_RATES)
        pairs[title] = (Order(task, rates=LARGE_RATES), large)

    rows = [["order of the losses by", *(f"lag {lag}" for lag in lags)]]
    for title, (left, right) in pairs.items():
        texts = [
            agreement_text(left.areas(records, lag), right.areas(records, lag)) for lag in lags
        ]
        if set(texts) != {NOT_RUN}:
            rows.append([title, *texts])
    return markdown_table([*rows, *more_rows])


def variants_table(records: Records, labels: Mapping[str, str], lag: int = 64) -> str:
    """The order of the losses of MAIN_METHODS on each variant of the tasks, beside the two bases.

    Each loss has the better of two learning rates. `labels` has the text of each method.
    """
    column = ("constant", lag)

    def order(task: str) -> dict[str, float]:
        all_areas = areas(records, task, column, rates=VARIANT_RATES)
        return {name: all_areas[name] for name in MAIN_METHODS if name in all_areas}

    chain = order("chain")
    gamble = order("gamble")
    head = ["task", "what differs", "mistakes at the start", "entropy at the start"]
    head += ["agrees with `chain`", "with `gamble`"]
    rows = [[*head, "first three", "place of `positive_only`"]]
    for task in ALL_TASKS:
        task_areas = order(task)
        if len(task_areas) < 3:
            continue
        mistakes, entropy = STARTS[task]
        ranking = sorted(task_areas, key=task_areas.__getitem__, reverse=True)
        rank = NOT_RUN
        if "positive_only" in ranking:
            rank = f"{ranking.index('positive_only') + 1} of {len(ranking)}"
        rows.append(
            [
                f"`{task}`",
                DIFFERENCES.get(task, NOT_RUN),
                f"{mistakes:.1f}",
                f"{entropy:.1f} nats",
                agreement_text(task_areas, chain) if task != "chain" else NOT_RUN,
                agreement_text(task_areas, gamble) if task != "gamble" else NOT_RUN,
                ", ".join(labels[name] for name in ranking[:3]),
                rank,
            ]
        )
    return markdown_table(rows)


LENGTH_WORDS: dict[Kind, str] = {
    "mixed": "independent of length",
    "in_order": "long ones are fresher: in flight, in order",
    "by_length": "long ones are older: first ended first",
}


def lengths_table(records: Records, labels: Mapping[str, str]) -> str:
    """A row for each task, lag and kind of ages, which go with the length of completions or do not.

    Only losses of LENGTH_METHODS with runs of all three kinds count, at the rate f. `labels` has
    the text of each method.
    """
    head = ["task", "largest age", "ages", "mean age", "age per token of length"]
    rows = [[*head, "losses", "agrees with the first row", "first three", "`grpo`", "`prime_rl`"]]
    for task, lag in product(LENGTH_TASKS, LENGTH_LAGS):
        by_kind = {
            kind: areas(records, task, (kind, lag), rates=LENGTH_RATES) for kind in LENGTH_WORDS
        }
        common = set(LENGTH_METHODS).intersection(*by_kind.values())
        if not common:
            continue
        for kind, words in LENGTH_WORDS.items():
            order = {name: by_kind[kind][name] for name in LENGTH_METHODS if name in common}
            ranking = sorted(order, key=order.__getitem__, reverse=True)
            independent = {name: by_kind["mixed"][name] for name in order}
            mean_age, slope = _ages(records, task, kind, lag)
            rows.append(
                [
                    f"`{task}`",
                    str(lag),
                    words,
                    mean_age,
                    slope,
                    str(len(order)),
                    NOT_RUN if kind == "mixed" else agreement_text(order, independent),
                    ", ".join(labels[name] for name in ranking[:3]),
                    *(_percent(order.get(name)) for name in ("grpo", "prime_rl")),
                ]
            )
    return markdown_table(rows)


def _ages(records: Records, task: str, kind: Kind, lag: int) -> tuple[str, str]:
    """The mean age of a token, and how the mean age of a completion changes by its length."""
    diagnostics = [
        record.diagnostics
        for key, record in records.items()
        if (key.table, key.task, key.schedule, key.lag) == ("published", task, kind, lag)
        and "age" in record.diagnostics
    ]
    if not diagnostics:
        # Older records of mixed ages, which are uniform on 0 .. lag.
        return f"{lag / 2:g}", "0"
    mean_age = fmean(one["age"] for one in diagnostics)
    slope = fmean(one["age_by_length"] for one in diagnostics)
    return f"{mean_age:.1f}", f"{slope:+.1f}".replace("-", "−")


def _percent(share: float | None) -> str:
    return NOT_RUN if share is None else f"{100 * share:.0f}"


def agreement_text(left: Mapping[str, float], right: Mapping[str, float]) -> str:
    """Spearman's correlation with the number of losses that both have, as in ".40 (32)"."""
    correlation = rank_agreement(left, right)
    if correlation is None:
        return NOT_RUN
    text = f"{correlation:.2f}".replace("0.", ".").replace("-", "−")
    return f"{text} ({len(left.keys() & right.keys())})"


def areas(
    records: Records,
    task: str,
    column: Column,
    table: Table = "published",
    rates: Sequence[float] | None = None,
) -> dict[str, float]:
    """The mean area kept by method, at a task and schedule.

    Each method has its best learning rate, of `rates` if they are given.
    """
    cells = find_cells(records, table, task)
    by_method: dict[str, float] = {}
    for (method, cell_column), cell in cells.items():
        if cell_column != column:
            continue
        if rates is None:
            by_method[method] = fmean(cell.best.values())
            continue
        run_rates = [rate for rate in rates if rate in cell.by_rate]
        living_rates = [rate for rate in run_rates if rate in cell.living_rates]
        # If a seed dies at every rate, the best rate among all counts.
        candidates = [fmean(cell.kept(rate).values()) for rate in living_rates or run_rates]
        if candidates:
            by_method[method] = max(candidates)
    return by_method
