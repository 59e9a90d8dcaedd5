"""The table of reports/staleness.md that compares forms of distillation on stale samples."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import product
from statistics import fmean

from .methods import load_methods
from .plan import DISTILLATION_LAGS, MAIN_TASKS, VARIANT_RATES
from .records import Record, RunKey
from .report import markdown_table, rate_name

Records = Mapping[RunKey, Record]
LAGS = sorted(DISTILLATION_LAGS)
RECOMPUTED = "opd_recomputed"
RECORDED = "opd_stale"


def distillation_table(records: Records) -> str:
    """A row per task, method and learning rate, a column per lag.

    A cell has the score at the end and KL(pi || teacher), means over the seeds, and the runs that
    collapse.
    """
    rows = [["task", "loss", "rate", *(f"lag {lag}" for lag in LAGS)]]
    methods = load_methods("distilled")
    for task, method, rate in product(MAIN_TASKS, methods.values(), VARIANT_RATES):
        cells = [_runs(records, task, method.name, rate, lag) for lag in LAGS]
        if any(cells):
            name = method.label
            rows.append([f"`{task}`", name, rate_name(rate), *(_cell_text(runs) for runs in cells)])
    return markdown_table(rows)


def recomputed_sentence(records: Records) -> str:
    """The scores with d of pi and with d of alpha, over the runs that both have."""
    texts = []
    for lag in LAGS:
        recomputed, recorded = _paired(records, lag)
        if recomputed:
            scores = f"{_mean_score(recomputed):.3f} against {_mean_score(recorded):.3f}"
            distances = f"{_mean_kl(recomputed):.3f} against {_mean_kl(recorded):.3f}"
            texts.append(
                f"at lag {lag} a score of {scores} and a KL of {distances} ({len(recomputed)} "
                "runs each)"
            )
    return f"`{RECOMPUTED}` against `{RECORDED}`: {'; '.join(texts)}."


def _paired(records: Records, lag: int) -> tuple[list[Record], list[Record]]:
    """The runs at a lag with d of pi, and those with d of alpha that only differ in that."""
    pairs = [
        (record, records[key._replace(method=RECORDED)])
        for key, record in records.items()
        if (key.table, key.method, key.lag) == ("distilled", RECOMPUTED, lag)
        and key._replace(method=RECORDED) in records
    ]
    return [pair[0] for pair in pairs], [pair[1] for pair in pairs]


def _runs(records: Records, task: str, method: str, rate: float, lag: int) -> list[Record]:
    wanted = ("distilled", task, method, rate, lag)
    return [
        record
        for key, record in records.items()
        if (key.table, key.task, key.method, key.learning_rate, key.lag) == wanted
    ]


def _cell_text(runs: Sequence[Record]) -> str:
    """As in ".93, .041" or ".27, 3.100 †2"; a dash without runs."""
    if not runs:
        return "–"
    text = f"{_mean_score(runs):.2f}, {_mean_kl(runs):.3f}"
    collapsed = sum(run.dies(run.updates) for run in runs)
    return f"{text} †{collapsed}" if collapsed else text


def _mean_score(runs: Sequence[Record]) -> float:
    return fmean(run.final_score(run.updates) for run in runs)


def _mean_kl(runs: Sequence[Record]) -> float:
    return fmean(run.diagnostics["kl_to_teacher"] for run in runs)
