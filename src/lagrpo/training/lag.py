"""How far a batch is from its theory's conditions: the lag metrics, from log π_k and log α of its completions.

Everything here speaks of the policy π_k at the start of the batch, against α that sampled it, over every scored
completion whose log α is known, in groups that the loss leaves out too. A mean over what the loss computes would be
a mean over a subset chosen by its rewards. ρ = π_k/α of a *whole completion* unless said otherwise.
reports/theory.md says what each metric estimates and how its variance grows.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from lagrpo.core import bounds
from lagrpo.core.advantages import sigma
from lagrpo.core.estimators import bootstrap_interval
from lagrpo.core.kl import ess, pinsker, prefers_bounded, sampled_chi2, tv_terms
from lagrpo.core.objective import Recipe
from lagrpo.settings.schema import Settings
from lagrpo.training.batch import Batch, MicroBatch, knows_alpha
from lagrpo.types import Range

SIGMA_BINS = 10  # of the histogram of sigma over [0, 1/2], the range of rewards in [0, 1]
ENOUGH = 25.0
"""Effective sample size from which an improvement means something: its standard error is then at most about a tenth of
the range of rewards (standard deviation of a reward, at most 1/2, over √ESS)."""

Row = dict[str, float | None]

SIGMA_KEYS = ("sigma_mean", *(f"sigma_bin_{n}" for n in range(SIGMA_BINS)))
DIVERGENCE_KEYS = ("kl_sequence", "pinsker", "tv_sequence", "tv_sequence_low", "tv_sequence_high", "chi2_sequence")
BOUND_KEYS = ("ess", "reliable", "improvement", "theorem1", "identity")
KEYS = (*SIGMA_KEYS, *DIVERGENCE_KEYS, *(f"{step}_{key}" for step in ("lag", "step") for key in BOUND_KEYS))
"""Every metric of `lag_metrics`."""


def sequence_log_ratio(batch: Batch, rows: Sequence[MicroBatch], logp_T: Sequence[Tensor] | None = None) -> Tensor:
    """log π_k(y|x) - log α(y|x) of each completion, nats, float64 [C]; NaN where it was not computed or α is unknown.
    With `logp_T`, the log-probs of each row under another policy, that policy takes the place of π_k."""
    return _sums(batch, rows, logp_T, lambda difference_T: difference_T)


def sequence_kl(batch: Batch, rows: Sequence[MicroBatch]) -> Tensor:
    """Σ_t (ρ_t - 1 - ln ρ_t) over the tokens of each completion, float64 [C]: estimates KL(α‖π_k) of the sequence from
    the ratios of its tokens, so its variance grows with the length, not exponentially in it; NaN as above."""
    return _sums(batch, rows, None, lambda d_T: torch.expm1(d_T) - d_T)


def _sums(
    batch: Batch, rows: Sequence[MicroBatch], logp_T: Sequence[Tensor] | None, term: Callable[[Tensor], Tensor]
) -> Tensor:
    """Sums over each completion's tokens of term(log π - log α), float64 [C]."""
    sums_C = torch.full((len(batch.member_C),), math.nan, dtype=torch.float64)
    for n, micro in enumerate(rows):
        policy_T = logp_T[n] if logp_T is not None else micro.logp_k_T
        if micro.logp_alpha_T is None:
            continue
        value_T = term((policy_T - micro.logp_alpha_T).double().cpu())
        own = torch.zeros(len(micro.members), dtype=torch.float64)
        sums_C[list(micro.members)] = own.index_add(0, micro.completion_T.cpu(), value_T)
    return sums_C


def completion_columns(batch: Batch, rows: Sequence[MicroBatch], eps_std: float) -> list[list[dict[str, Any]]]:
    """What the rollouts say of each completion beyond itself, per group: advantage, masked (its group was left out of
    the objective), sigma of its group, log_ratio = log π_k - log α of the whole completion, kl_alpha its share of the
    sequence KL; and of its sampled tokens logp_k and entropy, float32 [t]. None where it was not scored, or the number
    was not computed."""
    log_ratio_C, kl_C = sequence_log_ratio(batch, rows).tolist(), sequence_kl(batch, rows).tolist()
    logp_k, entropy = _by_completion(rows, "logp_k_T"), _by_completion(rows, "entropy_T")
    columns: list[list[dict[str, Any]]] = [[{} for _ in group.completions] for group in batch.groups]
    for members, rewards in _rewards(batch):
        spread = float(sigma(rewards, eps_std))
        for c in members:
            g, j = batch.member_C[c]
            columns[g][j] = {
                "advantage": float(batch.advantage_C[c]),
                "masked": bool(batch.weight_C[c] == 0),
                "sigma": spread,
                "log_ratio": None if math.isnan(log_ratio_C[c]) else log_ratio_C[c],
                "kl_alpha": None if math.isnan(kl_C[c]) else kl_C[c],
                "logp_k": logp_k.get(c),
                "entropy": entropy.get(c),
            }
    return columns


def _by_completion(rows: Sequence[MicroBatch], name: str) -> dict[int, Tensor]:
    """A quantity of the rows' tokens, for each completion that they have."""
    found = {}
    for micro in rows:
        if (values_T := getattr(micro, name)) is None:
            continue
        counts = micro.completion_T.bincount(minlength=len(micro.members)).tolist()
        found |= dict(zip(micro.members, values_T.float().cpu().split(counts), strict=True))
    return found


def lag_metrics(
    batch: Batch,
    rows: Sequence[MicroBatch],
    eps_std: float,
    reward_range: Range = (0.0, 1.0),
    after_T: Sequence[Tensor] | None = None,
) -> Row:
    """The lag metrics of a batch: all KEYS, None where there is no such number. Those of the lag need `rows` with every
    scored completion whose log α is known; those of the step from π_k to π need `after_T`, the log-probs of the rows
    under π after the updates."""
    metrics: Row = dict.fromkeys(KEYS) | sigma_metrics(batch, eps_std)
    log_ratio_C = sequence_log_ratio(batch, rows)
    known_C = torch.tensor([knows_alpha(batch, [c]) for c in range(len(batch.member_C))], dtype=torch.bool)
    if not bool(known_C.any()) or bool(log_ratio_C[known_C].isnan().any()):
        return metrics
    metrics |= divergence_metrics(log_ratio_C[known_C], sequence_kl(batch, rows)[known_C])
    alpha_C = torch.where(known_C, torch.zeros_like(log_ratio_C), log_ratio_C)
    metrics |= bound_metrics("lag", batch, log_ratio_C, alpha_C, eps_std, reward_range)
    if after_T is not None:
        after_C = sequence_log_ratio(batch, rows, after_T)
        metrics |= bound_metrics("step", batch, after_C, log_ratio_C, eps_std, reward_range)
    return metrics


def lag_is_complete(settings: Settings, recipe: Recipe) -> bool:
    """Whether every scored completion is computed, so that metrics of the lag are over all of them."""
    return settings.run.score_lag or not (recipe.skips_zero_advantage or recipe.mask_zero_variance)


def measure_spending(settings: Settings, batch: Batch, rows: Sequence[MicroBatch]) -> float | None:
    """What schedule budget decides by: the mean of `sequence_kl`, nats per completion. None if no log-prob of α is
    known, and for other schedules."""
    mean = sequence_kl(batch, rows).nanmean().item() if settings.schedule.kind == "budget" else math.nan
    return None if math.isnan(mean) else mean


def divergence_metrics(log_ratio_C: Tensor, kl_C: Tensor) -> Row:
    """Sequence-level divergences of π_k and α, from log ρ and the token-wise KL estimate of each completion [C]. The
    interval of TV is for these prompts."""
    tv_C = tv_terms(log_ratio_C, prefers_bounded(log_ratio_C))
    kl, tv, chi2 = kl_C.mean(), tv_C.mean(), sampled_chi2(log_ratio_C)
    found = (kl, pinsker(kl), tv, *bootstrap_interval(tv_C), chi2)
    return dict(zip(DIVERGENCE_KEYS, map(float, found), strict=True))


def sigma_metrics(batch: Batch, eps_std: float) -> Row:
    """σ_{α,r,ε} of the scored groups: its mean, and how many lie in each tenth of [0, 1/2]."""
    values = [float(sigma(rewards, eps_std)) for _, rewards in _rewards(batch)]
    if not values:
        return dict.fromkeys(SIGMA_KEYS)
    counts = torch.histc(torch.tensor(values).clamp(max=0.5), SIGMA_BINS, 0.0, 0.5).int().tolist()
    return dict(zip(SIGMA_KEYS, [sum(values) / len(values), *counts], strict=True))


def bound_metrics(
    name: str, batch: Batch, log_ratio_C: Tensor, log_ratio_k_C: Tensor, eps_std: float, ends: Range
) -> Row:
    """The two sides of the bounds on J(π) - J(π_k), as means over the groups of two or more whose log α is known, in
    units of the range of rewards, from `ends[0]` to `ends[1]`.

    `lag_…` is the step from α to π_k (Corollary 1 with α in the place of its π_k): what was gained since the weight
    sync. `step_…` is the step from π_k to π after the updates. The last three are None where a reward is outside the
    range.

        ess           effective number of completions, (Σρ)² / Σρ² with ρ = π/α
        reliable      1 where ess is at least ENOUGH and the improvement is possible, in [-1, 1]; else 0
        improvement   mean (π/α - π_k/α)(r - mean of the others): unbiased for J(π) - J(π_k)
        theorem1      plug-in estimate of the right side of Theorem 1
        identity      s·L_α(π) - TV(π_k, α): unbiased for the right side of the identity bound
    """
    known_C = log_ratio_C[~log_ratio_C.isnan()]
    metrics: Row = dict.fromkeys(f"{name}_{key}" for key in BOUND_KEYS)
    metrics[f"{name}_ess"] = size = float(ess((known_C - known_C.max()).exp()))
    bounded = [prefers_bounded(log_C[~log_C.isnan()]) for log_C in (log_ratio_C, log_ratio_k_C)]
    found = []
    for members, rewards in _rewards(batch):
        log_ratio, log_ratio_k = log_ratio_C[members], log_ratio_k_C[members]
        if len(members) < 2 or bool(log_ratio.isnan().any()):
            continue
        if bool((rewards < ends[0]).any() or (rewards > ends[1]).any()) or eps_std > 0.75:
            return metrics
        scaled = bounds.scaled(rewards, *ends)
        side = bounds.sampled(scaled, log_ratio, log_ratio_k, eps_std, *bounded)
        gain_k = bounds.sampled(scaled, log_ratio_k, log_ratio_k, eps_std).gain
        found.append((float(side.gain - gain_k), float(side.theorem1), float(side.identity_bound)))
    if not found:
        return metrics
    means = [sum(values) / len(found) for values in zip(*found, strict=True)]
    metrics |= {f"{name}_{key}": mean for key, mean in zip(BOUND_KEYS[2:], means, strict=True)}
    return metrics | {f"{name}_reliable": int(size >= ENOUGH and abs(means[0]) <= 1)}


def _rewards(batch: Batch) -> list[tuple[list[int], Tensor]]:
    """Of each group with a scored completion: their places among the C, and their rewards."""
    members: dict[int, list[int]] = {}
    for c, (g, _) in enumerate(batch.member_C):
        members.setdefault(g, []).append(c)
    return [(cs, torch.tensor(batch.groups[g].rewards, dtype=torch.float64)) for g, cs in members.items()]
