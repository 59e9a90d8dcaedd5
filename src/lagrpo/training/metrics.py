"""The metrics of a batch: one flat dict, for metrics.jsonl, the display and every tracker. Every line of a run has the
same keys, and its values are numbers or None. runs/metrics.py says what each one means."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Mapping, Sequence

import torch

from lagrpo.core.ratios import limit
from lagrpo.training.clock import Clock
from lagrpo.training.lag import log_ratio
from lagrpo.training.loop import Step
from lagrpo.types import Completion, Group

AT_ONCE = 1e-3  # seconds: completions that took less were sampled before


def batch_metrics(step: Step) -> dict[str, float | None]:
    """What metrics.jsonl has of a batch, except for rewards by name, staleness of whole completions and evaluations.
    Token metrics cover all completions in the objective, whatever their advantage, at the first update, where π = π_k;
    loss, gradient and learning rate are of the last update."""
    updates, groups, sync = step.updates, step.batch.groups, step.state.sync
    first, last = (updates[0], updates[-1]) if updates else ({}, {})
    completions = [c for group in groups for c in group.completions]
    flat = [len(set(group.rewards)) < 2 for group in groups if group.rewards]
    return {
        "step": step.b,
        "policy_version": step.version,
        "num_tokens": sum(c.length for c in completions),
        **_rewards(completions),
        "frac_reward_zero_std": sum(flat) / len(flat) if flat else None,
        **_completions(completions),
        "loss": last.get("loss"),
        "grad_norm": last.get("grad_norm"),
        "learning_rate": last.get("lr"),
        **_clip_ratios(updates, int(step.batch.lengths_C[step.batch.weight_C != 0].sum())),
        **_staleness(completions, step.version),
        "weight_sync/performed": int(bool(step.reason)),
        "weight_sync/logp_difference": sync.get("logp_difference_max"),
        "weight_sync/changed_fraction": sync.get("changed_fraction"),
        **_token_metrics(first, _sums_of_zero_advantage(step)),
        **_pace(step.clock, sum(u.get("tokens", 0.0) for u in updates)),
    }


def reward_metrics(groups: Sequence[Group], names: Sequence[str]) -> dict[str, float | None]:
    """The mean of each of several rewards, unweighted, over the completions that it could score."""
    parts = [c.outcome.parts for group in groups for c in group.completions if c.outcome and c.outcome.parts]
    values = {name: [value for part in parts if (value := part[name]) is not None] for name in names}
    return {f"rewards/{name}/mean": sum(own) / len(own) if own else None for name, own in values.items()}


def _rewards(completions: Sequence[Completion]) -> dict[str, float | None]:
    rewards = torch.tensor([c.reward for c in completions if c.reward is not None], dtype=torch.float64)
    if not len(rewards):
        return {"reward": None, "reward_std": None}
    return {"reward": float(rewards.mean()), "reward_std": float(rewards.std(correction=0))}


def _completions(completions: Sequence[Completion]) -> dict[str, float | None]:
    kinds = Counter(c.outcome.kind for c in completions if c.outcome is not None)
    count = len(completions)
    return {
        "completions/mean_length": sum(c.length for c in completions) / count if count else None,
        "completions/clipped_ratio": sum(not c.finished for c in completions) / count if count else None,
        "completions/unscored": kinds["unscored"],
        "completions/failed": kinds["failed"],
        "num_turns/mean": sum(c.policy_turns for c in completions) / count if count else None,
    }


def _staleness(completions: Sequence[Completion], version: int) -> dict[str, float | None]:
    """Over all sampled tokens whose version is known: it is -1 in completions of a file."""
    versions = torch.cat([torch.empty(0, dtype=torch.long), *(c.versions[c.sampled] for c in completions)])
    stale_T = version - versions[versions >= 0]
    if not len(stale_T):
        return {"staleness/mean": None, "staleness/max": None}
    return {"staleness/mean": float(stale_T.double().mean()), "staleness/max": int(stale_T.max())}


def _sums_of_zero_advantage(step: Step) -> dict[str, float]:
    """The sums of core.losses.diagnostics over the tokens that are in the objective, and not computed in the updates
    because their advantage is 0."""
    sums: defaultdict[str, float] = defaultdict(float)
    for c, logp_k_T in step.left_out.items():
        if step.batch.weight_C[c] == 0:
            continue
        log_rho_T = log_ratio(step.batch, c, logp_k_T)
        ratio_T, size_T = limit(log_rho_T).exp(), log_rho_T.abs()
        sums["tokens_alpha"] += len(log_rho_T)
        sums["ratio"] += ratio_T.sum().item()
        sums["ratio_squared"] += ratio_T.square().sum().item()
        sums["abs_log_ratio"] += size_T.sum().item()
        sums["kl_alpha"] += (torch.expm1(limit(log_rho_T)) - limit(log_rho_T)).sum().item()
        sums["max_abs_log_ratio"] = max([sums["max_abs_log_ratio"], *size_T.tolist()])
    return sums


def _token_metrics(first: Mapping[str, float], zero: Mapping[str, float]) -> dict[str, float | None]:
    """Means over the tokens of the objective, from the sums of core.losses.diagnostics."""
    sums = {name: first.get(name, 0.0) + zero.get(name, 0.0) for name in {**first, **zero}}
    known, largest = sums.get("tokens_alpha"), "max_abs_log_ratio"

    def mean(name: str, over: float | None) -> float | None:
        return sums[name] / over if over else None

    return {
        "entropy": mean("entropy", sums.get("tokens_entropy")),
        "kl": mean("kl_ref", sums.get("tokens")),
        "rollout/ratio_mean": mean("ratio", known),
        "rollout/ess": sums["ratio"] ** 2 / (known * sums["ratio_squared"]) if known else None,
        "rollout/kl": mean("kl_alpha", known),
        "rollout/logp_difference_mean": mean("abs_log_ratio", known),
        "rollout/logp_difference_max": max(first.get(largest, 0.0), zero.get(largest, 0.0)) if known else None,
    }


def _clip_ratios(updates: Sequence[Mapping[str, float]], tokens: int) -> dict[str, float | None]:
    """Shares of the `tokens` of the objective whose gradient the clip cuts, as means over the updates on the batch."""
    found: dict[str, float | None] = {}
    for end, name in (("low", "clipped_negative"), ("high", "clipped_positive")):
        clipped = sum(update.get(name, 0.0) for update in updates)
        found[f"clip_ratio/{end}_mean"] = clipped / (tokens * len(updates)) if tokens and updates else None
    return found


PHASES = {"generate": "sampling", "reward": "judging", "score": "scoring", "train": "learning", "sync": "sync"}


def _pace(clock: Clock, trained: float) -> dict[str, float | None]:
    spent = {name: clock.seconds[phase] for name, phase in PHASES.items()}
    return {
        "time/step": clock.total,
        **{f"time/{name}": seconds for name, seconds in spent.items()},
        "tokens_per_s/generate": clock.generated / spent["generate"] if spent["generate"] > AT_ONCE else None,
        "tokens_per_s/train": trained / spent["train"] if spent["train"] else None,
    }
