"""The metrics of a batch: one flat dict, for metrics.jsonl, the display and every tracker. Every line of a run has the
same keys, and its values are numbers or None. runs/metrics.py says what each one means.

Metrics of whole completions compare π_k, the policy at the start of the batch, with α, which sampled it. They cover
every scored completion whose log α is known, also in groups that the loss leaves out because of their rewards.
"""

from __future__ import annotations

import math
from collections import Counter, defaultdict
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from lagrpo.core.advantages import leave_one_out, one_group, sigma
from lagrpo.core.kl import ess, prefers_bounded, tv_terms
from lagrpo.core.ratios import limit
from lagrpo.training.batch import Batch, MicroBatch, has_zero_variance
from lagrpo.training.step import Clock, Step
from lagrpo.types import Completion, Range

Metrics = dict[str, float | None]
AT_ONCE = 1e-3  # seconds: completions that took less were sampled before
ENOUGH = 25.0
"""Effective sample size from which an improvement means something: its standard error is then at most about a tenth of
the range of rewards (standard deviation of a reward, at most 1/2, over √ESS)."""
RATIO_METRICS = ("rollout/ratio_mean", "rollout/ess", "rollout/kl")
RATIO_METRICS += (
    "rollout/logp_difference_mean",
    "rollout/logp_difference_max",
    "rollout/log_ratio_squared",
)
PHASES = {
    "generate": "sampling",
    "reward": "judging",
    "score": "scoring",
    "train": "learning",
    "sync": "sync",
}


def batch_metrics(
    step: Step, rewards: Sequence[str] = (), reward_range: Range = (0.0, 1.0)
) -> Metrics:
    """What metrics.jsonl has of a batch, except for evaluations. `rewards` are the names of several rewards. Loss,
    gradient and learning rate are of the last update."""
    updates, groups, sync = step.updates, step.batch.groups, step.state.sync
    last = updates[-1] if updates else {}
    completions = [c for group in groups for c in group.completions]
    flat = [has_zero_variance(group) for group in groups if group.rewards]
    return {
        "step": step.b,
        "policy_version": step.version,
        "num_tokens": sum(c.length for c in completions),
        **_rewards(completions, rewards),
        "frac_reward_zero_std": sum(flat) / len(flat) if flat else None,
        **_completions(completions),
        "loss": last.get("loss"),
        "grad_norm": last.get("grad_norm"),
        "learning_rate": last.get("lr"),
        "gradient_cosine": last.get("gradient_cosine"),
        **_clip_ratios(updates, step.batch),
        **_staleness(completions, step.version),
        "weight_sync/performed": int(bool(step.reason)),
        "weight_sync/logp_difference": sync.get("logp_difference_max"),
        "weight_sync/changed_fraction": sync.get("changed_fraction"),
        **_token_metrics(step),
        **sequence_metrics(step.batch, step.logp_k, reward_range),
        **_pace(step.clock, sum(u.get("tokens", 0.0) for u in updates)),
    }


def _rewards(completions: Sequence[Completion], names: Sequence[str]) -> Metrics:
    """Mean and standard deviation, and the mean of each of several rewards, unweighted, over what it could score."""
    rewards = torch.tensor(
        [c.reward for c in completions if c.reward is not None], dtype=torch.float64
    )
    found: Metrics = dict.fromkeys(("reward", "reward_std"))
    if len(rewards):
        found = {"reward": float(rewards.mean()), "reward_std": float(rewards.std(correction=0))}
    parts = [c.outcome.parts for c in completions if c.outcome and c.outcome.parts]
    for name in names:
        own = [value for part in parts if (value := part[name]) is not None]
        found[f"rewards/{name}/mean"] = sum(own) / len(own) if own else None
    return found


def _completions(completions: Sequence[Completion]) -> Metrics:
    kinds = Counter(c.outcome.kind for c in completions if c.outcome is not None)
    count = len(completions)
    return {
        "completions/mean_length": sum(c.length for c in completions) / count if count else None,
        "completions/clipped_ratio": sum(not c.finished for c in completions) / count
        if count
        else None,
        "completions/unscored": kinds["unscored"],
        "completions/failed": kinds["failed"],
        "num_turns/mean": sum(c.policy_turns for c in completions) / count if count else None,
    }


def _staleness(completions: Sequence[Completion], version: int) -> Metrics:
    """Over all sampled tokens whose version is known: it is -1 in completions of a file."""
    versions = torch.cat(
        [torch.empty(0, dtype=torch.long), *(c.versions[c.sampled] for c in completions)]
    )
    stale_T = version - versions[versions >= 0]
    if not len(stale_T):
        return {"staleness/mean": None, "staleness/max": None}
    return {"staleness/mean": float(stale_T.double().mean()), "staleness/max": int(stale_T.max())}


def _clip_ratios(updates: Sequence[Mapping[str, float]], batch: Batch) -> Metrics:
    """Shares of the objective's tokens whose gradient the clip cuts, and of its tokens and completions with an
    advantage that filters drop, as means over the updates on the batch."""
    is_in_objective_C = batch.weight_C != 0
    has_signal_C = is_in_objective_C & (batch.advantage_C != 0)
    tokens = int(batch.lengths_C[is_in_objective_C].sum())
    counts = {
        "clip_ratio/low_mean": ("clipped_negative", tokens),
        "clip_ratio/high_mean": ("clipped_positive", tokens),
        "filtered/tokens": ("filtered_tokens", int(batch.lengths_C[has_signal_C].sum())),
        "filtered/completions": ("filtered_completions", int(has_signal_C.sum())),
    }
    shares: Metrics = {}
    for metric, (name, count) in counts.items():
        total = sum(update.get(name, 0.0) for update in updates)
        shares[metric] = total / (count * len(updates)) if count and updates else None
    return shares


def _token_metrics(step: Step) -> Metrics:
    """Means over the tokens of the objective, whatever their advantage, at the first update, where π = π_k. Those of ρ
    leave out completions whose log α is unknown, and limit a ratio as the losses do."""
    first, batch = step.updates[0] if step.updates else {}, step.batch
    entropy = first["entropy"] / first["tokens_entropy"] if first.get("tokens_entropy") else None
    kl = first["kl_ref"] / first["tokens"] if first.get("tokens") else None
    ratios = [
        log_ratio(batch, c, logp_T) for c, logp_T in step.logp_k.items() if batch.weight_C[c] != 0
    ]
    found: Metrics = {"entropy": entropy, "kl": kl, **dict.fromkeys(RATIO_METRICS)}
    if known := [ratio_T.double() for ratio_T in ratios if not ratio_T.isnan().any()]:
        log_rho_T = torch.cat(known)
        bounded_T, size_T = limit(log_rho_T), log_rho_T.abs()
        ratio_T, kl_T = bounded_T.exp(), torch.expm1(bounded_T) - bounded_T
        values = (
            ratio_T.mean(),
            ess(ratio_T) / len(ratio_T),
            kl_T.mean(),
            size_T.mean(),
            size_T.max(),
            log_rho_T.square().mean(),
        )
        found |= zip(RATIO_METRICS, map(float, values), strict=True)
    return found


def _pace(clock: Clock, trained: float) -> Metrics:
    spent = {name: clock.seconds[phase] for name, phase in PHASES.items()}
    return {
        "time/step": clock.total,
        **{f"time/{name}": seconds for name, seconds in spent.items()},
        "tokens_per_s/generate": clock.generated / spent["generate"]
        if spent["generate"] > AT_ONCE
        else None,
        "tokens_per_s/train": trained / spent["train"] if spent["train"] else None,
    }


# Whole completions. ρ = π_k(y|x) / α(y|x); `logp_k` has log π_k of the sampled tokens of each completion.


def sequence_metrics(
    batch: Batch, logp_k: Mapping[int, Tensor], reward_range: Range = (0.0, 1.0)
) -> Metrics:
    """Of whole completions; all None unless `logp_k` has every scored completion whose log α is known."""
    log_ratio_C, kl_C = sequence_sums(batch, logp_k)
    known_C = batch.has_logp_alpha()
    known = log_ratio_C[known_C]
    if not len(known) or bool(known.isnan().any()):
        return dict.fromkeys(("rollout/seq_kl", "rollout/seq_tv", "rollout/seq_ess", "improvement"))
    size = float(ess((known - known.max()).exp()))
    gain = estimate_improvement(batch, log_ratio_C, reward_range) if size >= ENOUGH else None
    return {
        "rollout/seq_kl": float(kl_C[known_C].mean()),
        "rollout/seq_tv": float(tv_terms(known, prefers_bounded(known)).mean()),
        "rollout/seq_ess": size,
        "improvement": gain
        if gain is None or abs(gain) <= 1
        else None,  # more than 1 is impossible: too much noise
    }


def sequence_sums(batch: Batch, logp_k: Mapping[int, Tensor]) -> tuple[Tensor, Tensor]:
    """Of each completion, float64 [C]: ln ρ, nats; and Σ_t (ρ_t - 1 - ln ρ_t) over its tokens, which
    estimates KL(α‖π_k) with a variance that grows only linearly with the length. NaN if log π_k or log α is unknown."""
    log_ratio_C, kl_C = torch.full((2, len(batch.member_C)), math.nan, dtype=torch.float64)
    for c, logp_T in logp_k.items():
        log_ratio_T = log_ratio(batch, c, logp_T).double()
        log_ratio_C[c], kl_C[c] = log_ratio_T.sum(), (torch.expm1(log_ratio_T) - log_ratio_T).sum()
    return log_ratio_C, kl_C


def log_ratio(batch: Batch, c: int, logp_k_T: Tensor) -> Tensor:
    """log π_k - log α of the sampled tokens of a completion, float32 [t]."""
    completion = batch.completion(c)
    return logp_k_T - completion.logp_alpha[completion.sampled]


def estimate_improvement(batch: Batch, log_ratio_C: Tensor, reward_range: Range) -> float | None:
    """Mean over the groups of two or more of (ρ - 1)(r - mean of the others): unbiased for J(π_k) - J(α), in units of
    the range of rewards. None if a reward is outside the range, or no group is known."""
    low, high = reward_range
    gains = []
    for members, rewards in _members_of_groups(batch):
        if len(members) < 2 or bool(log_ratio_C[members].isnan().any()):
            continue
        if bool(((rewards < low) | (rewards > high)).any()):
            return None
        gains.append(
            float(
                (
                    log_ratio_C[members].expm1()
                    * leave_one_out(one_group((rewards - low) / (high - low)))
                ).mean()
            )
        )
    return sum(gains) / len(gains) if gains else None


def measure_kl_spent(batch: Batch, logp_k: Mapping[int, Tensor]) -> float | None:
    """What the schedule decides by: the mean KL(α‖π_k), nats per completion; None if no log α is known."""
    mean = sequence_sums(batch, logp_k)[1].nanmean().item()
    return None if math.isnan(mean) else mean


# By completion


def by_completion(rows: Sequence[MicroBatch], name: str) -> dict[int, Tensor]:
    """A quantity of the rows' tokens, float32 on the host, for each completion that they have."""
    found = {}
    for micro in rows:
        if (values_T := getattr(micro, name)) is not None:
            counts = micro.completion_T.bincount(minlength=len(micro.members)).tolist()
            found |= dict(zip(micro.members, values_T.float().cpu().split(counts), strict=True))
    return found


def completion_columns(step: Step, eps_std: float) -> list[list[dict[str, Any]]]:
    """What the rollouts say of each completion beyond itself, per group; nothing if it was not scored. old_logprobs and
    entropy are float32 [t], or None if they were not computed."""
    batch, old_logprobs = step.batch, step.logp_k
    columns: list[list[dict[str, Any]]] = [
        [{} for _ in group.completions] for group in batch.groups
    ]
    for members, rewards in _members_of_groups(batch):
        spread = float(sigma(rewards, torch.zeros(len(rewards), dtype=torch.long), eps_std)[0])
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


def _members_of_groups(batch: Batch) -> list[tuple[list[int], Tensor]]:
    """Of each group with a scored completion: their places among the C, and their rewards."""
    members: defaultdict[int, list[int]] = defaultdict(list)
    for c, (g, _) in enumerate(batch.member_C):
        members[g].append(c)
    return [
        (cs, torch.tensor(batch.groups[g].rewards, dtype=torch.float64))
        for g, cs in members.items()
    ]
