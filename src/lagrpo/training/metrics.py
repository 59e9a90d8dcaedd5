"""The metrics of a batch: one flat dict, for metrics.jsonl, the display and every tracker.

Every line of a run has the same keys, and its values are numbers or None. runs/metrics.toml says
what each one means. Metrics of whole completions compare π_k, the policy at the start of the batch,
with α, which sampled it. They cover every scored completion whose log α is known, also in groups
that the loss leaves out because of their rewards.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Mapping, Sequence

import torch
from torch import Tensor

from lagrpo.core.advantages import leave_one_out, one_group, sigma
from lagrpo.core.kl import ess, prefers_bounded, tv_terms
from lagrpo.core.ratios import limit
from lagrpo.training.batch import Batch, has_zero_variance
from lagrpo.training.step import LOGGED_COUNT, LOGGED_SUM, Phase, Records, Step, Times
from lagrpo.types import Completion, ExcludedReason, JsonObject, OutcomeKind, Range

Metrics = dict[str, float | None]
AT_ONCE = 1e-3  # seconds: completions that took less were sampled before
ENOUGH = 25.0
"""Effective sample size from which an improvement means something.

Its standard error is then at most about a tenth of the range of rewards (the standard deviation of
a reward, at most 1/2, over √ESS).
"""
RATIO_METRICS = (
    "rollout/ratio_mean",
    "rollout/ess",
    "rollout/kl",
    "rollout/logp_difference_mean",
    "rollout/logp_difference_max",
    "rollout/log_ratio_squared",
)
PHASES = {
    "generate": Phase.SAMPLING,
    "reward": Phase.SCORING,
    "score": Phase.LOGPROBS,
    "train": Phase.LEARNING,
    "sync": Phase.SYNC,
}


def batch_metrics(
    step: Step,
    rewards: Sequence[str] = (),
    reward_range: Range = (0.0, 1.0),
    loss_metrics: Sequence[str] = (),
) -> Metrics:
    """Returns the line of metrics.jsonl for a batch, without the metrics of evaluations.

    `rewards` are the names of several rewards, `loss_metrics` of what the loss logs. Loss, gradient
    and learning rate are of the last update.
    """
    groups = step.batch.groups
    updates = step.updates
    last = updates[-1] if updates else {}
    sync = step.state.sync
    completions = [c for group in groups for c in group.completions]
    # A scored completion that is alone in its group has nothing to be compared with: no signal.
    is_zero_variance = [has_zero_variance(group) for group in groups if group.rewards]
    return {
        "step": step.b,
        "policy_version": step.version,
        "num_tokens": sum(c.length for c in completions),
        **_rewards(completions, rewards),
        "frac_reward_zero_std": _mean(is_zero_variance),
        **_completions(completions),
        "loss": last.get("loss"),
        "grad_norm": last.get("grad_norm"),
        "learning_rate": last.get("lr"),
        "gradient_cosine": last.get("gradient_cosine"),
        **_clip_ratios(updates, step.batch),
        **_staleness(completions, step.version),
        **_sampling(step.sampling),
        "weight_sync/performed": int(bool(step.reason)),
        "weight_sync/logp_difference": sync.get("logp_difference_max"),
        "weight_sync/changed_fraction": sync.get("changed_fraction"),
        **_token_metrics(step),
        **sequence_metrics(step.batch, step.records, reward_range),
        **_pace(step.times, sum(u.get("tokens", 0.0) for u in updates)),
        **dict.fromkeys(loss_metrics),  # null in a batch without an update
        **_own_metrics(updates),
    }


def _own_metrics(updates: Sequence[Mapping[str, float]]) -> Metrics:
    """Returns the means of what the loss has logged with `x.log`, over the updates on the batch."""
    totals = Counter[str]()
    for update in updates:
        totals.update(update)
    return {
        name.removesuffix(LOGGED_SUM): value / totals[name.removesuffix(LOGGED_SUM) + LOGGED_COUNT]
        for name, value in totals.items()
        if name.endswith(LOGGED_SUM)
    }


def _mean(values: Sequence[float]) -> float | None:
    return sum(values) / len(values) if values else None


def _rewards(completions: Sequence[Completion], names: Sequence[str]) -> Metrics:
    """Returns mean and standard deviation of the reward, and the mean of each of several rewards.

    These are unweighted, over the completions that the reward could score.
    """
    rewards = torch.tensor(
        [c.reward for c in completions if c.reward is not None], dtype=torch.float64
    )
    metrics: Metrics = {"reward": None, "reward_std": None}
    if len(rewards):
        metrics["reward"] = float(rewards.mean())
        metrics["reward_std"] = float(rewards.std(correction=0))
    parts = [c.outcome.parts for c in completions if c.outcome and c.outcome.parts]
    for name in names:
        values = [part[name] for part in parts]
        metrics[f"rewards/{name}/mean"] = _mean([value for value in values if value is not None])
    return metrics


def _completions(completions: Sequence[Completion]) -> Metrics:
    """Returns metrics of lengths, ends, outcomes and turns."""
    kinds = Counter(c.outcome.kind for c in completions if c.outcome is not None)
    return {
        "completions/mean_length": _mean([c.length for c in completions]),
        "completions/clipped_ratio": _mean([not c.finished for c in completions]),
        "completions/unscored": kinds[OutcomeKind.UNSCORED],
        "completions/failed": kinds[OutcomeKind.FAILED],
        "num_turns/mean": _mean([c.policy_turns for c in completions]),
    }


def _staleness(completions: Sequence[Completion], version: int) -> Metrics:
    """Returns metrics over all sampled tokens whose version is known.

    The version is -1 in completions of a file.
    """
    versions = torch.cat(
        [torch.empty(0, dtype=torch.long), *(c.versions[c.sampled] for c in completions)]
    )
    stale_T = version - versions[versions >= 0]
    if not len(stale_T):
        return dict.fromkeys(("staleness/mean", "staleness/max", "staleness/mixed"))
    return {
        "staleness/mean": float(stale_T.double().mean()),
        "staleness/max": int(stale_T.max()),
        "staleness/mixed": _mean([_has_several_versions(c) for c in completions]),
    }


def _has_several_versions(completion: Completion) -> bool:
    versions = completion.versions[completion.sampled]
    return len(versions) > 0 and bool((versions != versions[0]).any())


def _sampling(counts: Mapping[str, float]) -> Metrics:
    """Returns metrics of an engine that counts while completions go on after weight syncs."""
    rows = counts.get("rows")
    return {
        "completions/occupancy": counts["rows_in_flight"] / rows if rows else None,
        "weight_sync/recomputed": counts.get("recomputed"),
    }


def _clip_ratios(updates: Sequence[Mapping[str, float]], batch: Batch) -> Metrics:
    """Returns the shares of the objective that clips and filters cut.

    The clip's are shares of the tokens whose gradient it cuts; the filters' are shares of the
    tokens and completions with an advantage that they drop. They are means over the updates on the
    batch.
    """
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
    """Returns means over the tokens of the objective at the first update, where π = π_k.

    They cover tokens with any advantage. Means of ρ leave out completions whose log α is unknown,
    and limit a ratio as the losses do.
    """
    first = step.updates[0] if step.updates else {}
    metrics: Metrics = {"entropy": None, "kl": None, **dict.fromkeys(RATIO_METRICS)}
    metrics["entropy_coef"] = first.get("entropy_coef")
    if first.get("tokens_entropy"):
        metrics["entropy"] = first["entropy"] / first["tokens_entropy"]
    if first.get("tokens"):
        metrics["kl"] = first["kl_ref"] / first["tokens"]
    known: list[Tensor] = []  # log ρ of each completion with a known log α, float64 [t]
    for c, record in step.records.by_completion.items():
        if step.batch.weight_C[c] != 0 and not record.log_ratio.isnan().any():
            known.append(record.log_ratio)
    if known:
        metrics |= _ratio_metrics(torch.cat(known))
    return metrics


def _ratio_metrics(log_rho_T: Tensor) -> Metrics:
    """Returns RATIO_METRICS of tokens, from log ρ = log π_k - log α, nats."""
    limited_T = limit(log_rho_T)
    rho_T = limited_T.exp()
    # rho - 1 - log rho: at least 0 for every token, with mean KL(α‖π_k) on tokens of α.
    kl_T = torch.expm1(limited_T) - limited_T
    size_T = log_rho_T.abs()
    return {
        "rollout/ratio_mean": float(rho_T.mean()),
        "rollout/ess": float(ess(rho_T) / len(rho_T)),
        "rollout/kl": float(kl_T.mean()),
        "rollout/logp_difference_mean": float(size_T.mean()),
        "rollout/logp_difference_max": float(size_T.max()),
        "rollout/log_ratio_squared": float(log_rho_T.square().mean()),
    }


def _pace(times: Times, trained_tokens: float) -> Metrics:
    """Returns the seconds of each phase, and tokens per second."""
    seconds = {name: times.seconds.get(phase, 0.0) for name, phase in PHASES.items()}
    metrics: Metrics = {"time/step": times.total}
    for name in PHASES:
        metrics[f"time/{name}"] = seconds[name]
    sampled_per_second = None
    if seconds["generate"] > AT_ONCE:
        sampled_per_second = times.generated / seconds["generate"]
    trained_per_second = None
    if seconds["train"]:
        trained_per_second = trained_tokens / seconds["train"]
    metrics["tokens_per_s/generate"] = sampled_per_second
    metrics["tokens_per_s/train"] = trained_per_second
    return metrics


# Whole completions. ρ = π_k(y|x) / α(y|x).


def sequence_metrics(batch: Batch, records: Records, reward_range: Range = (0.0, 1.0)) -> Metrics:
    """Returns metrics of whole completions.

    All are None unless there are records of every scored completion whose log α is known.
    """
    known_C = batch.has_logp_C
    known = records.log_ratio_C[known_C]
    if not len(known) or bool(known.isnan().any()):
        return dict.fromkeys(("rollout/seq_kl", "rollout/seq_tv", "rollout/seq_ess", "improvement"))
    # A common factor does not change the ESS, and no ratio overflows.
    size = float(ess((known - known.max()).exp()))
    improvement = None
    if size >= ENOUGH:
        improvement = estimate_improvement(batch, records.log_ratio_C, reward_range)
    # More than the range of rewards is impossible: the estimate has too much noise.
    if improvement is not None and not abs(improvement) <= 1:
        improvement = None
    return {
        "rollout/seq_kl": float(records.kl_C[known_C].mean()),
        "rollout/seq_tv": float(tv_terms(known, bounded=prefers_bounded(known)).mean()),
        "rollout/seq_ess": size,
        "improvement": improvement,
    }


def estimate_improvement(batch: Batch, log_ratio_C: Tensor, reward_range: Range) -> float | None:
    """Returns the mean over the groups of two or more of (ρ - 1)(r - mean of the others).

    It is unbiased for J(π_k) - J(α), in units of the range of rewards. None if a reward is outside
    the range, or no group is known.
    """
    low, high = reward_range
    gains: list[float] = []
    for members, rewards in _members_of_groups(batch):
        log_ratios = log_ratio_C[members]
        if len(members) < 2 or bool(log_ratios.isnan().any()):
            continue
        if bool(((rewards < low) | (rewards > high)).any()):
            return None
        scaled = one_group((rewards - low) / (high - low))
        gain_per_completion = log_ratios.expm1() * leave_one_out(scaled)
        gains.append(float(gain_per_completion.mean()))
    return _mean(gains)


def completion_columns(step: Step, eps_std: float) -> list[list[JsonObject]]:
    """Returns the columns of the rollouts that a completion itself does not have, per group.

    A completion that was not scored has none. old_logprobs and entropy are float32 [t], or None if
    they were not computed. ref_logprobs are there if the updates read them.
    """
    batch = step.batch
    columns: list[list[JsonObject]] = [[{} for _ in group.completions] for group in batch.groups]
    for members, rewards in _members_of_groups(batch):
        spread = float(sigma(rewards, torch.zeros(len(rewards), dtype=torch.long), eps_std)[0])
        for c in members:
            g, j = batch.member_C[c]
            record = step.records.by_completion.get(c)
            excluded_reason = ExcludedReason.NOT_EXCLUDED
            if batch.weight_C[c] == 0:
                excluded_reason = ExcludedReason.ZERO_VARIANCE
            columns[g][j] = {
                "advantage": float(batch.advantage_C[c]),
                "excluded_reason": excluded_reason.value,
                "group_std": spread,
                "old_logprobs": None if record is None else record.old_logp,
                "entropy": None if record is None else record.entropy,
            }
            if record is not None and record.ref_logp is not None:
                columns[g][j]["ref_logprobs"] = record.ref_logp
    return columns


def _members_of_groups(batch: Batch) -> list[tuple[list[int], Tensor]]:
    """Returns indices in C and rewards of the scored completions of each group.

    Groups without a scored completion are left out. Rewards are float64.
    """
    members: defaultdict[int, list[int]] = defaultdict(list)
    for c, (g, _) in enumerate(batch.member_C):
        members[g].append(c)
    return [
        (indices, torch.tensor(batch.groups[g].rewards, dtype=torch.float64))
        for g, indices in members.items()
    ]
