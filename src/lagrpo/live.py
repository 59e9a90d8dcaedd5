"""How far a batch is from its theory's conditions: the figures of the lag, from log π_k and log α of its completions.

Everything here is measured on the completions of the objective (masked groups cost no forward pass and have no log π_k)
and speaks of the policy π_k at the start of the batch, against α that drew it. ρ = π_k/α of a *whole completion* unless
said otherwise. docs/theory.md says what each figure estimates and how its variance grows.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from lagrpo.core import bounds, divergences
from lagrpo.core.advantages import sigma
from lagrpo.core.estimators import bootstrap_interval
from lagrpo.policy.batch import Batch, MicroBatch

SIGMA_BINS = 10  # of the histogram of sigma over [0, 1/2], the range of rewards in [0, 1]
FEW = 2.0  # below this effective sample size a sequence-level figure is the figure of one completion


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
        assert policy_T is not None, "the figures of the lag are read after the first update on a batch"
        if micro.logp_alpha_T is None:
            continue
        value_T = term((policy_T - micro.logp_alpha_T).double().cpu())
        own = torch.zeros(len(micro.members), dtype=torch.float64)
        sums_C[list(micro.members)] = own.index_add(0, micro.completion_T.cpu(), value_T)
    return sums_C


def completion_columns(batch: Batch, rows: Sequence[MicroBatch], eps_std: float) -> list[list[dict[str, Any]]]:
    """What the rollouts say of each completion beyond itself, per group: advantage, masked (its group was left out of
    the objective), sigma of its group, log_ratio = log π_k - log α of the whole completion, kl_alpha its share of the
    sequence KL. None where it was not scored, or the number was not computed."""
    log_ratio_C, kl_C = sequence_log_ratio(batch, rows).tolist(), sequence_kl(batch, rows).tolist()
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
            }
    return columns


def lag_figures(
    batch: Batch,
    rows: Sequence[MicroBatch],
    eps_std: float,
    reward_range: tuple[float, float] = (0.0, 1.0),
    after_T: Sequence[Tensor] | None = None,
) -> dict[str, Any]:
    """The figures of a batch, for its metrics. `after_T` are the log-probs of the rows under π after the updates, where
    somebody computed them: then the two sides of the bounds are also given for the step from π_k to π."""
    log_ratio_C = sequence_log_ratio(batch, rows)
    known = log_ratio_C.isfinite()
    figures: dict[str, Any] = sigma_figures(batch, eps_std)
    if not bool(known.any()):
        return figures
    figures |= divergence_figures(log_ratio_C[known], sequence_kl(batch, rows)[known])
    alpha_C = torch.zeros_like(log_ratio_C)
    figures |= bound_figures("lag", batch, log_ratio_C, alpha_C, eps_std, reward_range)
    if after_T is not None:
        after_C = sequence_log_ratio(batch, rows, after_T)
        figures |= bound_figures("step", batch, after_C, log_ratio_C, eps_std, reward_range)
    return figures


def divergence_figures(log_ratio_C: Tensor, kl_C: Tensor) -> dict[str, Any]:
    """Sequence-level divergences of π_k and α, from log ρ and the token-wise KL estimate of each completion [C]."""
    tv_C = torch.expm1(log_ratio_C).abs() / 2
    low, high = bootstrap_interval(tv_C)
    ess = float(divergences.ess((log_ratio_C - log_ratio_C.max()).exp()))
    return {
        "kl_sequence": float(kl_C.mean()),
        "pinsker": float(divergences.pinsker(kl_C.mean())),
        "tv_sequence": float(tv_C.mean()),
        "tv_sequence_low": low,
        "tv_sequence_high": high,
        "ess_sequence": ess,
        "chi2_sequence": float(divergences.sampled_chi2(log_ratio_C)),
        "sequence_level_means_something": ess >= FEW,
    }


def sigma_figures(batch: Batch, eps_std: float) -> dict[str, Any]:
    """σ_{α,r,ε} of the scored groups: its mean, and how many lie in each tenth of [0, 1/2]."""
    values = [float(sigma(rewards, eps_std)) for _, rewards in _rewards(batch)]
    if not values:
        return {"sigma_mean": None, "sigma_histogram": None}
    histogram = torch.histc(torch.tensor(values).clamp(max=0.5), SIGMA_BINS, 0.0, 0.5).int().tolist()
    return {"sigma_mean": sum(values) / len(values), "sigma_histogram": histogram}


def bound_figures(
    name: str,
    batch: Batch,
    log_ratio_C: Tensor,
    log_ratio_k_C: Tensor,
    eps_std: float,
    reward_range: tuple[float, float],
) -> dict[str, float | None]:
    """The two sides of the bounds on J(π) - J(π_k), as means over the groups of the objective, in units of the range.

    `lag_…` is the step from α to π_k (Corollary 1 with α in the place of its π_k): what was gained since the delivery.
    `step_…` is the step from π_k to π after the updates. All three are None where a reward is outside the range.

        improvement   mean (π/α - π_k/α)(r - mean of the others): unbiased for J(π) - J(π_k) over all scored groups
                      of two or more, as one whose rewards are equal contributes exactly 0, computed or not
        theorem1      plug-in estimate of the right side of Theorem 1, over the groups that were computed
        identity      s·L_α(π) - TV(π_k, α): unbiased for the right side of the identity bound, over the same
    """
    found, flat = [], 0
    for members, rewards in _rewards(batch):
        log_ratio, log_ratio_k = log_ratio_C[members], log_ratio_k_C[members]
        if len(members) > 1 and bool((log_ratio.isfinite() & log_ratio_k.isfinite()).all()):
            if bool((rewards < reward_range[0]).any() or (rewards > reward_range[1]).any()) or eps_std > 0.75:
                found = []
                break
            scaled = bounds.scaled(rewards, *reward_range)
            side = bounds.sampled(scaled, log_ratio, log_ratio_k, eps_std)
            gain_k = bounds.sampled(scaled, log_ratio_k, log_ratio_k, eps_std).gain
            found.append((float(side.gain - gain_k), float(side.theorem1), float(side.identity_bound)))
        elif len(members) > 1 and bool((rewards == rewards[0]).all()):
            flat += 1
    names = (f"{name}_improvement", f"{name}_theorem1", f"{name}_identity")
    if not found:
        return dict.fromkeys(names)
    sums = [sum(values) for values in zip(*found, strict=True)]
    counts = (len(found) + flat, len(found), len(found))
    return {key: total / count for key, total, count in zip(names, sums, counts, strict=True)}


def _rewards(batch: Batch) -> list[tuple[list[int], Tensor]]:
    """Of each group with a scored completion: their places among the C, and their rewards."""
    members: dict[int, list[int]] = {}
    for c, (g, _) in enumerate(batch.member_C):
        members.setdefault(g, []).append(c)
    return [(cs, torch.tensor(batch.groups[g].rewards, dtype=torch.float64)) for g, cs in members.items()]
