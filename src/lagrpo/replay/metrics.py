"""metrics.jsonl: the metrics of each batch that follow from its rows, written out here. docs/metrics.md defines
each; the lag metrics come from the columns that the replay of the divergences checks."""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Iterable, Sequence
from typing import Any

import torch

from lagrpo.replay import formulas
from lagrpo.replay.findings import Check, Report
from lagrpo.replay.source import UNCLEAR, Row, Source, scored_groups
from lagrpo.runs.rollouts import reward_columns
from lagrpo.settings.evaluation import OF_A_SET

SIGMA_BINS = 10  # tenths of [0, 1/2]
EXACT = 1e-9  # relative and absolute: sums of float64 in another order
FLOAT32 = 1e-4  # relative: sums over tokens in float32
ROUNDED = {"kl_alpha": 1e-7, "ratio_mean": 1e-6}  # absolute, for those: a mean ratio near 1 has spacings of 1.2e-7
CALM = 0.8  # share of the completions that their effective number reaches where |rho - 1| / 2 estimates TV
ENOUGH = 25.0  # effective completions from which an improvement is reliable
LAG = ("kl_sequence", "pinsker", "tv_sequence", "chi2_sequence")
LAG += ("lag_ess", "lag_reliable", "lag_improvement", "lag_identity")


def check(source: Source, rows: Sequence[Row], report: Report) -> None:
    """Check every line against the rows of its batch."""
    found = report.check("metrics.jsonl")
    check_lines(source, found)
    by_batch: defaultdict[int, list[Row]] = defaultdict(list)
    for row in rows:
        by_batch[row["batch"]].append(row)
    known: set[str] = set()
    for batch, (number, line) in sorted(source.metrics.items()):
        if batch in source.unclear:
            report.skip("metrics.jsonl: lines", UNCLEAR)
            continue
        if not len(by_batch[batch]) == len(source.batches.get(batch, ())) > 0:
            report.skip("metrics.jsonl: lines", "rows of their batch are missing or not whole")
            continue
        expected = metrics(source.at(batch), batch, by_batch[batch])
        for name, value in expected.items():
            tolerance = EXACT * (1 + abs(value or 0.0))
            if name in ROUNDED:
                tolerance = FLOAT32 * abs((value or 0.0) - (name == "ratio_mean")) + ROUNDED[name]
            found.near("metrics.jsonl", f"line {number} (batch {batch})", name, line.get(name), value, tolerance)
        known |= expected.keys()
    found.note = ", ".join(sorted(known))
    others = {name for _, line in source.metrics.values() for name in line} - known - {"synced"}
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
    """The metrics of a batch that follow from its rows."""
    outcomes = [row["outcome"] for row in rows]
    rewards = [row["reward"] for row in rows if row.scored]
    tokens = sum(row.length for row in rows)
    lags = [row["pi_k_version"] - v for row in rows for v in row.sampled("versions") if v >= 0]
    return {
        "stage": (batch - 1) // source.settings.schedule.batches + 1,
        "version": rows[0]["pi_k_version"],
        "lag_min": min(lags, default=None),
        "lag_mean": formulas.mean_or_none(lags),
        "lag_max": max(lags, default=None),
        "completions": len(rows),
        "unscored": outcomes.count("unscored"),
        "failed": outcomes.count("failed"),
        "reward_mean": formulas.mean_or_none(rewards),
        "reward_std": formulas.sigma(rewards, 0.0) if rewards else None,
        "tokens_sampled": tokens,
        "tokens_mean": tokens / len(rows),
        "finished_share": formulas.mean([row["finished"] for row in rows]),
        "turns_mean": formulas.mean([len(row["turns"][::2]) or 1 for row in rows]),
        **group_metrics(source, rows),
        **token_metrics(source, rows),
        **lag_metrics(source, rows),
        **reward_metrics(rows),
        **evaluated(source, batch),
    }


def reward_metrics(rows: Sequence[Row]) -> dict[str, Any]:
    """Metrics of each of several rewards, from its column."""
    judged, found = [row for row in rows if row.generated], dict[str, Any]()
    for name in reward_columns(rows[0].columns):
        values = [row[f"reward_{name}"] for row in judged if row[f"reward_{name}"] is not None]
        found |= {
            f"reward_{name}_mean": formulas.mean_or_none(values),
            f"reward_{name}_std": formulas.sigma(values, 0.0) if values else None,
            f"reward_{name}_unscored": len(judged) - len(values),
        }
    return found


def evaluated(source: Source, batch: int) -> dict[str, Any]:
    """What the sets of prompts found of the policy at the start of the batch."""
    found: dict[str, Any] = {}
    for one in source.settings.evaluation.sets if source.settings.evaluation.takes_place else ():
        made = [e for e in source.evaluations if e.get("set") == one.name and (e.get("batch") or 0) == batch - 1]
        for name in OF_A_SET:
            found[f"eval_{one.name}_{name}"] = made[0].get(name) if made else None
    return found


def group_metrics(source: Source, rows: Sequence[Row]) -> dict[str, Any]:
    """Metrics over the groups that have a scored completion."""
    scored = [[row["reward"] for row in members] for members in scored_groups(rows)]
    sigmas = [formulas.sigma(rewards, source.recipe.composition.eps_std) for rewards in scored]
    # float32 decides on which side of an edge a sigma lies, as it did in the run
    bins = torch.histc(torch.tensor(sigmas).clamp(max=0.5), SIGMA_BINS, 0.0, 0.5).int().tolist() if sigmas else None
    return {
        "zero_variance_share": formulas.mean_or_none([len(set(rewards)) == 1 for rewards in scored]),
        "sigma_mean": formulas.mean_or_none(sigmas),
        **{f"sigma_bin_{n}": bins[n] if bins else None for n in range(SIGMA_BINS)},
    }


def token_metrics(source: Source, rows: Sequence[Row]) -> dict[str, Any]:
    """Metrics of π_k against α over the tokens of the objective, from the columns log_ratio = Σ ln ρ and kl_alpha =
    Σ (ρ - 1 - ln ρ): Σ ρ = kl_alpha + tokens + log_ratio."""
    used = [row for row in rows if row["kl_alpha"] is not None and not row["masked"]]
    used = [row for row in used if row["advantage"] or not source.recipe.silent]
    tokens = sum(row.length for row in used)
    kl, log_ratio = (sum(row[name] for row in used) for name in ("kl_alpha", "log_ratio"))
    return {
        "kl_alpha": kl / tokens if tokens else None,
        "ratio_mean": (kl + log_ratio) / tokens + 1 if tokens else None,
    }


def lag_metrics(source: Source, rows: Sequence[Row]) -> dict[str, Any]:
    """The lag metrics of the rows of a batch, from log rho = log π_k - log α of its completions and their rewards; None
    where a completion that they need was not computed, or the run asks for none."""
    recipe = source.recipe
    asked = source.settings.run.score_lag or not (recipe.silent or recipe.mask_zero_variance)
    groups = list(scored_groups(rows))
    known = [row for members in groups for row in members if row.knows_alpha]
    if not known or not asked or any(row["log_ratio"] is None for row in known):
        return dict.fromkeys(LAG)
    rho = [ratio(row) for row in known]
    greatest = max(row["log_ratio"] for row in known)
    weights = [math.exp(row["log_ratio"] - greatest) for row in known]
    ess = sum(weights) ** 2 / sum(x * x for x in weights)
    kl = formulas.mean([row["kl_alpha"] for row in known])
    gain = improvement(source, groups)
    found = {
        "kl_sequence": kl,
        "pinsker": min(math.sqrt(kl / 2), 1.0),
        "tv_sequence": formulas.mean([abs(x - 1) / 2 if ess >= CALM * len(rho) else max(1 - x, 0.0) for x in rho]),
        "chi2_sequence": formulas.mean([(x - 1) * (x - 1) for x in rho]),
        "lag_ess": ess,
        "lag_reliable": None if gain is None else int(ess >= ENOUGH and abs(gain) <= 1),
        "lag_improvement": gain,
        "lag_identity": gain,
    }
    return {name: value if value is not None and math.isfinite(value) else None for name, value in found.items()}


def improvement(source: Source, groups: Iterable[Sequence[Row]]) -> float | None:
    """mean rho (r - mean of the others), over the groups of two or more whose rho are known, in units of the range."""
    low, high = source.settings.task.reward_range
    gains = []
    for members in groups:
        if len(members) < 2 or any(row["log_ratio"] is None for row in members):
            continue
        r = [(row["reward"] - low) / (high - low) for row in members]
        if min(r) < 0 or max(r) > 1 or source.recipe.composition.eps_std > 0.75:
            return None
        others = [(sum(r) - x) / (len(r) - 1) for x in r]
        terms = zip(members, r, others, strict=True)
        gains.append(formulas.mean([(ratio(row) - 1) * (x - other) for row, x, other in terms]))
    return formulas.mean_or_none(gains)


def ratio(row: Row) -> float:
    """rho = π_k/α of the whole completion; infinite where float64 does not hold it."""
    return math.exp(row["log_ratio"]) if row["log_ratio"] < 709 else math.inf
