"""metrics.jsonl: the metrics of each batch that follow from its rows."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from lagrpo.replay import formulas, lag
from lagrpo.replay.findings import Check, Report
from lagrpo.replay.groups import groups_of
from lagrpo.replay.source import Row, Source

SIGMA_BINS = 10  # tenths of [0, 1/2]
EXACT = 1e-9  # relative and absolute: sums of float64 in another order
FLOAT32 = 1e-4  # relative: sums over tokens in float32
ROUNDED = {"kl_alpha": 1e-7, "ratio_mean": 1e-6}  # absolute, for those: a mean ratio near 1 has spacings of 1.2e-7


def check(source: Source, rows: Sequence[Row], report: Report) -> None:
    """Every line against the rows of its batch."""
    found = report.check("metrics.jsonl")
    check_lines(source, found)
    by_batch: dict[int, list[Row]] = {}
    for row in rows:
        by_batch.setdefault(row["batch"], []).append(row)
    known: set[str] = set()
    for batch, (number, line) in sorted(source.metrics.items()):
        complete = len(by_batch.get(batch, ())) == len(source.batches.get(batch, ())) > 0
        if not complete:
            report.skip("metrics.jsonl: lines", "rows of their batch are missing or not whole")
            continue
        expected = metrics(source, batch, by_batch[batch])
        for name, value in expected.items():
            if name in ROUNDED:
                tolerance = FLOAT32 * abs((value or 0.0) - (name == "ratio_mean")) + ROUNDED[name]
            else:
                tolerance = EXACT * (1 + abs(value or 0.0))
            found.near("metrics.jsonl", f"line {number} (batch {batch})", name, line.get(name), value, tolerance)
        known |= expected.keys()
    found.note = ", ".join(sorted(known))
    others = sorted({name for _, line in source.metrics.values() for name in line} - known - {"synced"})
    why = "not recomputed (clocks, gradients, parity checks, other policies, intervals, Theorem 1)"
    report.skip("metrics.jsonl: metrics", why, len(others))


def check_lines(source: Source, found: Check) -> None:
    """A line for every batch, in order, with the keys of the first. The last batch on disk may have none yet."""
    for number, line in enumerate(source.lines, start=1):
        found.equal("metrics.jsonl", f"line {number}", "batch", line["batch"], number)
        found.equal("metrics.jsonl", f"line {number}", "keys", list(line), list(source.lines[0]))
    for batch in sorted(source.batches.keys() - source.metrics.keys())[:-1]:
        found.equal("metrics.jsonl", "", f"the line of batch {batch}", "missing", "there")


def metrics(source: Source, batch: int, rows: Sequence[Row]) -> dict[str, Any]:
    """The metrics of a batch that follow from its rows; docs/run-directory.md defines each."""
    outcomes = [row["outcome"] for row in rows]
    rewards = [row["reward"] for row in rows if row["outcome"] == "scored"]
    tokens = sum(row.length for row in rows)
    lags = [row["pi_k_version"] - v for row in rows for v in row.sampled("versions") if v >= 0]
    return {
        "stage": (batch - 1) // source.settings.schedule.batches + 1,
        "version": rows[0]["pi_k_version"],
        "lag_min": min(lags, default=None),
        "lag_mean": mean(lags),
        "lag_max": max(lags, default=None),
        "completions": len(rows),
        "unscored": outcomes.count("unscored"),
        "failed": outcomes.count("failed"),
        "reward_mean": mean(rewards),
        "reward_std": formulas.sigma(rewards, 0.0) if rewards else None,
        "tokens_sampled": tokens,
        "tokens_mean": tokens / len(rows),
        "finished_share": mean([row["finished"] for row in rows]),
        **group_metrics(source, rows),
        **token_metrics(source, rows),
        **lag.metrics(source, rows),
    }


def group_metrics(source: Source, rows: Sequence[Row]) -> dict[str, Any]:
    """Metrics over the groups that have a scored completion."""
    scored = [[row["reward"] for row in members if row["outcome"] == "scored"] for members in groups_of(rows)]
    scored = [rewards for rewards in scored if rewards]
    eps_std = source.recipe.composition.eps_std
    sigmas = [formulas.sigma(rewards, eps_std) for rewards in scored]
    # float32 decides on which side of an edge a sigma lies, as it did in the run
    bins = torch.histc(torch.tensor(sigmas).clamp(max=0.5), SIGMA_BINS, 0.0, 0.5).int().tolist() if sigmas else None
    return {
        "zero_variance_share": mean([len(set(rewards)) == 1 for rewards in scored]),
        "sigma_mean": mean(sigmas),
        **{f"sigma_bin_{n}": bins[n] if bins else None for n in range(SIGMA_BINS)},
    }


def token_metrics(source: Source, rows: Sequence[Row]) -> dict[str, Any]:
    """Metrics of π_k against α over the tokens of the objective, from the columns log_ratio = Σ ln ρ and kl_alpha =
    Σ (ρ - 1 - ln ρ), of which the check of the divergences recomputes a subset: Σ ρ = kl_alpha + tokens + log_ratio."""
    used = [row for row in rows if row["kl_alpha"] is not None and not row["masked"]]
    used = [row for row in used if row["advantage"] or not source.recipe.silent]
    tokens = sum(row.length for row in used)
    kl = sum(row["kl_alpha"] for row in used)
    log_ratio = sum(row["log_ratio"] for row in used)
    return {
        "kl_alpha": kl / tokens if tokens else None,
        "ratio_mean": (kl + log_ratio) / tokens + 1 if tokens else None,
    }


def mean(values: Sequence[float]) -> float | None:
    """None over nothing."""
    return sum(values) / len(values) if values else None
