"""How stale a batch is: log π_k against log α of whole completions.

Everything here is about the policy π_k at the start of the batch and the policy α that sampled it, over every scored
completion whose log α is known, in groups that the loss leaves out too. A mean over what the loss computes would be a
mean over a subset chosen by its rewards. ρ = π_k/α of a *whole completion* unless a docstring says otherwise.
reports/theory.md says what each metric estimates and how its variance grows.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from lagrpo.core.advantages import leave_one_out, sigma
from lagrpo.core.kl import ess, prefers_bounded, tv_terms
from lagrpo.core.objective import Recipe
from lagrpo.settings.schema import Settings
from lagrpo.training.batch import Batch, MicroBatch, knows_alpha
from lagrpo.types import Range

if TYPE_CHECKING:
    from lagrpo.training.loop import Step

ENOUGH = 25.0
"""Effective sample size from which an improvement means something: its standard error is then at most about a tenth of
the range of rewards (standard deviation of a reward, at most 1/2, over √ESS)."""

KEYS = ("rollout/seq_kl", "rollout/seq_tv", "rollout/seq_ess", "improvement")
"""The metrics of `lag_metrics`."""


def by_completion(rows: Sequence[MicroBatch], name: str) -> dict[int, Tensor]:
    """A quantity of the rows' tokens, float32 on the host, for each completion that they have."""
    found = {}
    for micro in rows:
        if (values_T := getattr(micro, name)) is not None:
            counts = micro.completion_T.bincount(minlength=len(micro.members)).tolist()
            found |= dict(zip(micro.members, values_T.float().cpu().split(counts), strict=True))
    return found


def sequence_log_ratio(batch: Batch, logp_k: Mapping[int, Tensor]) -> Tensor:
    """log π_k(y|x) - log α(y|x) of each completion, nats, float64 [C]; NaN if it was not computed or α is unknown.
    `logp_k` has log π_k of their sampled tokens."""
    return _sums(batch, logp_k, lambda difference_T: difference_T)


def sequence_kl(batch: Batch, logp_k: Mapping[int, Tensor]) -> Tensor:
    """Σ_t (ρ_t - 1 - ln ρ_t) over the tokens of each completion, float64 [C]: estimates KL(α‖π_k) of the sequence from
    the ratios of its tokens, so its variance grows with the length, not exponentially in it; NaN as above."""
    return _sums(batch, logp_k, lambda d_T: torch.expm1(d_T) - d_T)


def _sums(batch: Batch, logp_k: Mapping[int, Tensor], term: Callable[[Tensor], Tensor]) -> Tensor:
    """Sums over each completion's tokens of term(log π_k - log α), float64 [C]."""
    sums_C = torch.full((len(batch.member_C),), math.nan, dtype=torch.float64)
    for c, logp_T in logp_k.items():
        sums_C[c] = term(log_ratio(batch, c, logp_T).double()).sum()
    return sums_C


def log_ratio(batch: Batch, c: int, logp_k_T: Tensor) -> Tensor:
    """log π_k - log α of the sampled tokens of a completion, float32 [t]."""
    completion = batch.completion(c)
    return logp_k_T - completion.logp_alpha[completion.sampled]


def completion_columns(step: Step, eps_std: float) -> list[list[dict[str, Any]]]:
    """What the rollouts say of each completion beyond itself, per group: advantage, excluded_reason (why it is not in
    the objective), group_std, the σ of its group; and of its sampled tokens old_logprobs and entropy, float32 [t].
    Empty if it was not scored; None for tokens whose number was not computed."""
    batch, old_logprobs = step.batch, {**step.logp_k, **step.left_out}
    columns: list[list[dict[str, Any]]] = [[{} for _ in group.completions] for group in batch.groups]
    for members, rewards in _rewards(batch):
        spread = float(sigma(rewards, eps_std))
        for c in members:
            g, j = batch.member_C[c]
            columns[g][j] = {
                "advantage": float(batch.advantage_C[c]),
                "excluded_reason": "zero_variance" if batch.weight_C[c] == 0 else "",
                "group_std": spread,
                "old_logprobs": old_logprobs.get(c),
                "entropy": step.entropy.get(c),
            }
    return columns


def lag_metrics(
    batch: Batch, logp_k: Mapping[int, Tensor], reward_range: Range = (0.0, 1.0)
) -> dict[str, float | None]:
    """KL(α‖π_k) and total variation of whole completions, the effective number of completions, and the improvement
    J(π_k) - J(α). All are None unless `logp_k` has every scored completion whose log α is known."""
    log_ratio_C = sequence_log_ratio(batch, logp_k)
    known_C = torch.tensor([knows_alpha(batch, [c]) for c in range(len(batch.member_C))], dtype=torch.bool)
    known = log_ratio_C[known_C]
    if not len(known) or bool(known.isnan().any()):
        return dict.fromkeys(KEYS)
    size = float(ess((known - known.max()).exp()))
    gain = estimate_improvement(batch, log_ratio_C, reward_range) if size >= ENOUGH else None
    return {
        "rollout/seq_kl": float(sequence_kl(batch, logp_k)[known_C].mean()),
        "rollout/seq_tv": float(tv_terms(known, prefers_bounded(known)).mean()),
        "rollout/seq_ess": size,
        "improvement": gain if gain is None or abs(gain) <= 1 else None,  # more than 1 is impossible: too much noise
    }


def estimate_improvement(batch: Batch, log_ratio_C: Tensor, reward_range: Range) -> float | None:
    """Mean over the groups of two or more of (ρ - 1)(r - mean of the others): unbiased for J(π_k) - J(α), in units of
    the range of rewards. None if a reward is outside the range, or no group is known."""
    low, high = reward_range
    gains = []
    for members, rewards in _rewards(batch):
        log_ratio = log_ratio_C[members]
        if len(members) < 2 or bool(log_ratio.isnan().any()):
            continue
        if bool(((rewards < low) | (rewards > high)).any()):
            return None
        gains.append(float((log_ratio.expm1() * leave_one_out((rewards - low) / (high - low))).mean()))
    return sum(gains) / len(gains) if gains else None


def lag_is_complete(settings: Settings, recipe: Recipe) -> bool:
    """Whether every scored completion is computed, so that metrics of the lag are over all of them."""
    return settings.run.score_lag or not (recipe.skips_zero_advantage or recipe.mask_zero_variance)


def measure_spending(batch: Batch, logp_k: Mapping[int, Tensor]) -> float | None:
    """What schedule budget decides by: the mean of `sequence_kl`, nats per completion. None if no log-prob of α is
    known."""
    mean = sequence_kl(batch, logp_k).nanmean().item()
    return None if math.isnan(mean) else mean


def _rewards(batch: Batch) -> list[tuple[list[int], Tensor]]:
    """Of each group with a scored completion: their places among the C, and their rewards."""
    members: dict[int, list[int]] = {}
    for c, (g, _) in enumerate(batch.member_C):
        members.setdefault(g, []).append(c)
    return [(cs, torch.tensor(batch.groups[g].rewards, dtype=torch.float64)) for g, cs in members.items()]
