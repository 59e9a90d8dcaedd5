"""The lag metrics of a batch, from log rho = log π_k - log α of its completions and their rewards: written out
here, over the columns that the replay of the divergences checks. docs/run-directory.md says what each estimates."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from typing import Any

from lagrpo.replay.groups import groups_of
from lagrpo.replay.source import Row, Source

CAP = 1.5  # C of the certificate
CALM = 0.8  # share of the completions that their effective number reaches where |rho - 1| / 2 estimates TV
ENOUGH = 25.0  # effective completions from which an improvement is reliable
NAMES = ("kl_sequence", "pinsker", "tv_sequence", "chi2_sequence", "lag_ess", "lag_reliable", "lag_improvement")
NAMES += ("lag_identity", "lag_certified")


def metrics(source: Source, rows: Sequence[Row]) -> dict[str, Any]:
    """The lag metrics of the rows of a batch; None where a completion that they need was not computed, or the run asks
    for none."""
    groups = [[row for row in members if row["outcome"] == "scored"] for members in groups_of(rows)]
    known = [row for members in groups for row in members if knows_alpha(row)]
    if not known or not asked(source) or any(row["log_ratio"] is None for row in known):
        return dict.fromkeys(NAMES)
    rho = [ratio(row) for row in known]
    ess = effective([row["log_ratio"] for row in known])
    kl = mean([row["kl_alpha"] for row in known])
    gain = improvement(source, groups)
    found = {
        "kl_sequence": kl,
        "pinsker": min(math.sqrt(kl / 2), 1.0),
        "tv_sequence": mean([abs(x - 1) / 2 if ess >= CALM * len(rho) else max(1 - x, 0.0) for x in rho]),
        "chi2_sequence": mean([(x - 1) * (x - 1) for x in rho]),
        "lag_ess": ess,
        "lag_reliable": None if gain is None else int(ess >= ENOUGH and abs(gain) <= 1),
        "lag_improvement": gain,
        "lag_identity": gain,
        "lag_certified": certified(source, rows),
    }
    return {name: value if value is not None and math.isfinite(value) else None for name, value in found.items()}


def knows_alpha(row: Row) -> bool:
    """Whether the log α of every sampled token is known."""
    return not any(logp is None or math.isnan(logp) for logp in row.sampled("logp_alpha"))


def asked(source: Source) -> bool:
    """Whether the run has every scored completion computed."""
    recipe = source.recipe
    return source.settings.run.score_lag or not (recipe.silent or recipe.mask_zero_variance)


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
        total, n = sum(r), len(r)
        gains.append(mean([(ratio(row) - 1) * (x - (total - x) / (n - 1)) for row, x in zip(members, r, strict=True)]))
    return mean(gains) if gains else None


def certified(source: Source, rows: Iterable[Row]) -> float | None:
    """The lower bound on J(π_k) - J(α): z = (min(rho, C) - 1) r over the completions of the sampler, one without a
    reward counted as the least, less the margin of Maurer & Pontil, arXiv 0907.3740."""
    low, high = source.settings.task.reward_range
    z = []
    for row in rows:
        scored = row["outcome"] == "scored"
        if row["source"] != "sampler":
            continue
        if scored and (row["log_ratio"] is None or not low <= row["reward"] <= high):
            return None
        z.append((min(ratio(row), CAP) - 1) * (row["reward"] - low) / (high - low) if scored else 0.0)
    if len(z) < 2 or source.settings.sampling.dynamic_sampling:
        return None
    doubt, n = math.log(2 / source.settings.schedule.doubt), len(z)
    variance = sum((x - mean(z)) ** 2 for x in z) / (n - 1)
    return max(mean(z) - math.sqrt(2 * variance * doubt / n) - 7 * CAP * doubt / (3 * (n - 1)), -1.0)


def ratio(row: Row) -> float:
    """rho = π_k/α of the whole completion; infinite where float64 does not hold it."""
    return math.exp(row["log_ratio"]) if row["log_ratio"] < 709 else math.inf


def effective(log_ratios: Sequence[float]) -> float:
    """(sum rho)^2 / sum rho^2."""
    rho = [math.exp(x - max(log_ratios)) for x in log_ratios]
    return sum(rho) ** 2 / sum(x * x for x in rho)


def mean(values: Sequence[float]) -> float:
    return sum(values) / len(values)
