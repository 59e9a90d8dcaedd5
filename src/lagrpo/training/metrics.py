"""The metrics of a batch: one flat dict, for metrics.jsonl, the display and every tracker alike. Every line of every
run has the same keys, and its values are numbers or None."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any

import torch

from lagrpo.training.clock import Clock
from lagrpo.training.loop import Step
from lagrpo.types import Completion, Group

AT_ONCE = 1e-3  # seconds: what took less to come was sampled before


def batch_metrics(step: Step) -> dict[str, Any]:
    """What is recorded of a batch beside the lag (docs/metrics.md). Metrics of the objective describe the first
    update on the batch, where π = π_k; loss, grad_norm, lr, moved and the clip shares _last describe the last one."""
    updates, groups, clock = step.updates, step.batch.groups, step.clock
    first, last = (updates[0], updates[-1]) if updates else ({}, {})
    completions = [c for group in groups for c in group.completions]
    flat = [len(set(group.rewards)) < 2 for group in groups if group.rewards]
    return {
        "stage": step.stage,
        "batch": step.b,
        "version": step.version,
        "synced": int(bool(step.reason)),
        **_lag(completions, step.version),
        **_outcomes(completions),
        "zero_variance_share": sum(flat) / len(flat) if flat else None,
        **_objective_metrics(first),
        **_clip_shares(first),
        **{f"{name}_last": share for name, share in _clip_shares(last).items()},
        **{name: last.get(name) for name in ("loss", "grad_norm", "lr", "moved")},
        **_pace(clock, sum(c.length for c in completions), sum(u.get("tokens", 0.0) for u in updates)),
    }


SAMPLER_METRICS = (
    "moved_synced",
    *("parity_mean", "parity_max", "parity_kl", "parity_telling"),
    *("sync_bytes", "seconds_writing", "seconds_paused", "seconds_generating", "recoveries", "regenerated"),
)


def sampler_metrics(weight_sync: Mapping[str, float], sampling: Mapping[str, float]) -> dict[str, float | None]:
    """What the last weight sync cost and checked, and what happened to the sampler since the batch before."""
    return {name: sampling.get(name, weight_sync.get(name)) for name in SAMPLER_METRICS}


def _lag(completions: Sequence[Completion], version: int) -> dict[str, float | None]:
    """Over all sampled tokens whose version is known: it is -1 in completions of a file."""
    versions = torch.cat([torch.empty(0, dtype=torch.long), *(c.versions[c.sampled] for c in completions)])
    lag_T = version - versions[versions >= 0]
    if not len(lag_T):
        return dict.fromkeys(("lag_min", "lag_max", "lag_mean"))
    return {"lag_min": int(lag_T.min()), "lag_max": int(lag_T.max()), "lag_mean": float(lag_T.double().mean())}


def _outcomes(completions: Sequence[Completion]) -> dict[str, float | None]:
    kinds = Counter(c.outcome.kind for c in completions if c.outcome is not None)
    rewards = torch.tensor([c.reward for c in completions if c.reward is not None], dtype=torch.float64)
    count = len(completions)
    return {
        "completions": count,
        **{kind: kinds[kind] for kind in ("unscored", "failed")},
        "reward_mean": float(rewards.mean()) if len(rewards) else None,
        "reward_std": float(rewards.std(correction=0)) if len(rewards) else None,
        "tokens_mean": sum(c.length for c in completions) / count if count else None,
        "finished_share": sum(c.finished for c in completions) / count if count else None,
        "turns_mean": sum(c.policy_turns for c in completions) / count if count else None,
    }


def reward_metrics(groups: Sequence[Group], names: Sequence[str]) -> dict[str, float | None]:
    """Of a task with several rewards, of each by its name: mean and standard deviation over the completions that it
    could score, unweighted, and how many of those it was asked about it could not."""
    parts = [
        c.outcome.parts for group in groups for c in group.completions if c.outcome is not None and c.outcome.parts
    ]
    found: dict[str, float | None] = {}
    for name in names:
        values = [part[name] for part in parts if part[name] is not None]
        values_C = torch.tensor(values, dtype=torch.float64)
        found |= {
            f"reward_{name}_mean": float(values_C.mean()) if values else None,
            f"reward_{name}_std": float(values_C.std(correction=0)) if values else None,
            f"reward_{name}_unscored": len(parts) - len(values),
        }
    return found


def _pace(clock: Clock, sampled: int, learned: float) -> dict[str, float | None]:
    seconds = {phase: clock.seconds[phase] for phase in ("sampling", "judging", "learning", "scoring", "sync")}
    return {
        **{f"seconds_{phase}": spent for phase, spent in seconds.items()},
        "seconds_total": clock.total,
        "tokens_sampled": sampled,
        "tokens_learned": learned,
        "tokens_per_s_sampling": clock.generated / seconds["sampling"] if seconds["sampling"] > AT_ONCE else None,
        "tokens_per_s_learning": learned / seconds["learning"] if seconds["learning"] else None,
    }


def _objective_metrics(sums: dict[str, float]) -> dict[str, float | None]:
    """Means over the tokens of the objective, from the sums of core.losses.diagnostics."""
    tokens, known = sums.get("tokens"), sums.get("tokens_alpha")

    def mean(name: str, over: float | None = tokens) -> float | None:
        return sums[name] / over if over else None

    return {
        "kl_alpha": mean("kl_alpha", known),
        "kl_ref": mean("kl_ref"),
        "ratio_mean": mean("ratio", known),
        "ess": sums["ratio"] ** 2 / (known * sums["ratio_squared"]) if known else None,
        "mismatch_mean": mean("abs_log_ratio", known),
        "mismatch_max": sums.get("max_abs_log_ratio"),
        "entropy": mean("entropy", sums.get("tokens_entropy")),
        "objective": sums.get("objective"),
    }


def _clip_shares(sums: dict[str, float]) -> dict[str, float | None]:
    """Shares of the tokens of the objective whose gradient an update cut."""
    tokens = sums.get("tokens")
    kinds = (("clip_low_share", "clipped_negative"), ("clip_high_share", "clipped_positive"))
    return {name: sums[kind] / tokens if tokens else None for name, kind in kinds}
