"""The figures of a batch: one flat dict, for metrics.jsonl, the display and every tracker alike."""

from __future__ import annotations

import time
from collections import defaultdict
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch

from lagrpo.policy.batch import Batch


class Clock:
    """Seconds by phase, and since it was made."""

    def __init__(self) -> None:
        self.seconds: defaultdict[str, float] = defaultdict(float)
        self._started = time.perf_counter()

    @contextmanager
    def __call__(self, phase: str) -> Iterator[None]:
        started = time.perf_counter()
        try:
            yield
        finally:
            self.seconds[phase] += time.perf_counter() - started

    def move(self, source: str, to: str, seconds: float) -> None:
        """Book seconds that were measured inside one phase under another."""
        self.seconds[source] -= seconds
        self.seconds[to] += seconds

    @property
    def total(self) -> float:
        return time.perf_counter() - self._started


def batch_metrics(
    stage: int, b: int, version: int, batch: Batch, updates: Sequence[dict[str, float]], clock: Clock, delivered: bool
) -> dict[str, Any]:
    """Everything that is recorded about batch b, where π_k has `version`. docs/run-directory.md says what each is.

    Figures of the objective are those of the first update on the batch, where π = π_k; grad_norm, lr and loss those of
    the last one."""
    completions = [c for group in batch.groups for c in group.completions]
    drawn = [c for c in completions if len(c.token_ids)]
    versions = torch.cat([c.versions for c in drawn]) if drawn else torch.empty(0)
    versions = versions[versions >= 0]  # completions that somebody else drew may have none
    rewards = torch.tensor([c.reward for c in completions if c.reward is not None], dtype=torch.float64)
    spread = [len(set(group.rewards)) < 2 for group in batch.groups if group.rewards]
    tokens_sampled = sum(len(c.token_ids) for c in completions)
    count = lambda kind: sum(1 for c in completions if c.outcome is not None and c.outcome.kind == kind)  # noqa: E731
    seconds = {f"seconds_{phase}": clock.seconds[phase] for phase in ("sampling", "judging", "learning", "delivery")}
    first, last = (updates[0], updates[-1]) if updates else ({}, {})
    tokens_learned = sum(u.get("tokens", 0.0) for u in updates)
    return {
        "stage": stage,
        "batch": b,
        "version": version,
        "delivered": delivered,
        "lag_min": version - int(versions.max()) if len(versions) else None,
        "lag_max": version - int(versions.min()) if len(versions) else None,
        "lag_mean": version - float(versions.double().mean()) if len(versions) else None,
        "completions": len(completions),
        "rejected": count("rejected"),
        "failed": count("failed"),
        "reward_mean": float(rewards.mean()) if len(rewards) else None,
        "reward_std": float(rewards.std(correction=0)) if len(rewards) else None,
        "zero_variance_share": sum(spread) / len(spread) if spread else None,
        "tokens_mean": tokens_sampled / len(completions) if completions else None,
        "finished_share": sum(c.finished for c in completions) / len(completions) if completions else None,
        **_objective_figures(first),
        "loss": last.get("loss"),
        "grad_norm": last.get("grad_norm"),
        "lr": last.get("lr"),
        **seconds,
        "seconds_total": clock.total,
        "tokens_sampled": tokens_sampled,
        "tokens_learned": tokens_learned,
        "tokens_per_s_sampling": tokens_sampled / seconds["seconds_sampling"] if seconds["seconds_sampling"] else None,
        "tokens_per_s_learning": tokens_learned / seconds["seconds_learning"] if seconds["seconds_learning"] else None,
    }


def _objective_figures(sums: dict[str, float]) -> dict[str, float | None]:
    """Means over the tokens of the objective, from the sums of core.loss.diagnostics."""
    tokens = sums.get("tokens")
    mean = lambda name: sums[name] / tokens if tokens and name in sums else None  # noqa: E731
    return {
        "kl_alpha": mean("kl_alpha"),
        "kl_ref": mean("kl_ref"),
        "ratio_mean": mean("ratio"),
        "ess": sums["ratio"] ** 2 / (tokens * sums["ratio_squared"]) if tokens and "ratio" in sums else None,
        "clip_high_share": mean("clipped_positive"),
        "clip_low_share": mean("clipped_negative"),
        "mismatch_mean": mean("abs_log_ratio"),
        "mismatch_max": sums.get("max_abs_log_ratio"),
        "objective": sums.get("objective"),
    }
