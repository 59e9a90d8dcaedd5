"""Detectors of updates that lose their gradient, do not move the policy, or move it too far."""

from __future__ import annotations

import math
import statistics
from typing import Any

from lagrpo.diagnosis.finding import Finding, lower_rate, percent, places_of
from lagrpo.diagnosis.record import FIRST_BATCHES, RunRecord, mean
from lagrpo.settings.lag_table import (
    LARGEST_KL,
    advice_for,
    kept_text,
    load_table,
    nearest_lag,
)
from lagrpo.terminal.text import count_of

LEAST_SYNCS = 3
"""Weight syncs after updates that say how much weights change."""


def find_clip(record: RunRecord, threshold: float) -> Finding | None:
    """The clip cuts the gradient of many tokens of one sign of the advantage."""
    in_objective = [row for row in record.recent_rows if row["excluded_reason"] == ""]
    tokens = sum(row["length"] for row in in_objective)
    if not tokens:
        return None
    tokens_with_signal = sum(row["length"] for row in in_objective if row["advantage"])
    cut_shares = {}
    for sign, metric in ((-1, "clip_ratio/low_mean"), (1, "clip_ratio/high_mean")):
        of_sign = sum(row["length"] for row in in_objective if sign * (row["advantage"] or 0) > 0)
        cut = (record.last(metric) or 0.0) * tokens
        cut_shares[sign] = (min(1.0, cut / of_sign) if of_sign else 0.0, cut)
    (low, low_cut), (high, high_cut) = cut_shares[-1], cut_shares[1]
    if max(low, high) < threshold:
        return None
    settings = _fresher_samples(record)
    return Finding(
        f"The clip cuts the gradient of {percent(low)} of the tokens with a negative advantage and "
        f"of {percent(high)} of those with a positive one.",
        cost=min(1.0, (low_cut + high_cut) / max(1, tokens_with_signal)),
        settings=settings,
    )


def _fresher_samples(record: RunRecord) -> dict[str, object]:
    """Returns the settings that make a clip act less."""
    sync_every = record.settings.get("schedule.sync_every") or 1
    iterations = record.settings.get("schedule.num_iterations") or 1
    if sync_every > 1:
        return {"schedule.sync_every": max(1, sync_every // 2)}
    for name in ("schedule.constant_lag", "schedule.max_staleness"):
        lag = record.settings.get(name) or 0
        if lag:
            return {name: lag // 2}
    if iterations > 1:
        return {"schedule.num_iterations": max(1, iterations // 2)}
    if (record.settings.get("loss.epsilon") or 0.2) < 0.2:
        return {"loss.epsilon": 0.2}
    # Fresh samples are clipped only if the engine differs from the trainer: find_mismatch.
    return {}


def find_filters(record: RunRecord, threshold: float) -> Finding | None:
    """Filters drop many tokens or completions that have an advantage."""
    tokens = record.last("filtered/tokens") or 0.0
    completions = record.last("filtered/completions") or 0.0
    if max(tokens, completions) < threshold:
        return None
    filters = record.settings.get("loss.filters")
    names = ", ".join(filters) if filters else "of the recipe"
    return Finding(
        f"The filters ({names}) drop {percent(tokens)} of the tokens with an advantage, and "
        f"{percent(completions)} of the completions with one.",
        cost=max(tokens, completions),
    )


def find_still_weights(record: RunRecord, threshold: float) -> Finding | None:
    """Updates change hardly any weight."""
    fractions = []
    had_gradient = False
    for line in record.metrics:
        # A sync is before its batch, so it shares the updates of earlier batches.
        if line.get("weight_sync/performed") and had_gradient:
            fractions.append(line.get("weight_sync/changed_fraction"))
            had_gradient = False
        had_gradient = had_gradient or bool(line.get("grad_norm"))
    fractions = [fraction for fraction in fractions if fraction is not None]
    # A warm-up begins with small updates.
    changed = mean(fractions[len(fractions) // 2 :])
    if changed is None or len(fractions) < LEAST_SYNCS or changed > threshold:
        return None
    rate = record.settings.get("optimizer.learning_rate") or 0.0
    settings: dict[str, object] = {"optimizer.learning_rate": 10 * rate}
    if record.settings.get("optimizer.dither_master_weights") is False:
        settings["optimizer.dither_master_weights"] = True
    return Finding(
        f"A weight sync changes {percent(changed)} of the weights, although updates have a "
        f"gradient: the learning rate of {rate:g} is too small.",
        cost=0.95,
        settings=settings,
    )


def find_still_policy(record: RunRecord, threshold: float) -> Finding | None:
    """The policy does not move away from the one that sampled, over whole sync cycles."""
    stale = record.stale_batches
    kl = mean(record.values("rollout/kl", stale))
    updates = mean(record.values("staleness/mean", stale))
    if kl is None or updates is None or kl > threshold or not record.has_signal:
        return None
    rate = record.settings.get("optimizer.learning_rate") or 0.0
    # The KL divergence grows with the square of the rate. Rounding adds to a small one, so the
    # rate is too low rather than too high.
    factor = math.sqrt(10 * threshold / max(kl, 1e-16))
    return Finding(
        f"The policy hardly moves: rollout/kl is {kl:.1e} nats per token at a mean staleness of "
        f"{updates:.1f} updates, with a learning rate of {rate:g}.",
        cost=0.9,
        settings={"optimizer.learning_rate": float(f"{factor * rate:.1g}")},
    )


def find_clipped_gradient(record: RunRecord, threshold: float) -> Finding | None:
    """Nearly every gradient is much longer than max_grad_norm, so that all count the same."""
    limit = record.settings.get("optimizer.max_grad_norm") or 0.0
    norms = [norm for norm in record.values("grad_norm") if norm > 0]
    if not limit or len(norms) < record.window:
        return None
    clipped = sum(norm > limit for norm in norms) / len(norms)
    median = statistics.median(norms)
    # Adapters that learn well have a median of four limits.
    if clipped < threshold or median < 10 * limit:
        return None
    return Finding(
        f"{percent(clipped)} of the gradients are longer than optimizer.max_grad_norm = {limit:g}, "
        f"with a median of {median:.3g}: batches with much signal count like batches with little.",
        cost=0.1,
        settings={"optimizer.max_grad_norm": float(f"{2 * median:.1g}")},
    )


def find_mismatch(record: RunRecord, threshold: float) -> Finding | None:
    """Engine and trainer disagree about log-probs of the same weights."""
    fresh = record.fresh_batches
    differences = record.values("rollout/logp_difference_mean", fresh)
    difference = mean(differences)
    if difference is None or difference < threshold:
        return None
    sentence = (
        f"Rollout engine and trainer differ by {difference:.2f} nats per token with the same "
        f"weights: mean of {count_of(len(fresh), 'batch', 'es')} at staleness 0."
    )
    first = statistics.fmean(differences[:FIRST_BATCHES])
    last = statistics.fmean(differences[-FIRST_BATCHES:])
    # Rounding is there from the first batch on.
    if last > 3 * first + threshold:
        sentence += f" It grew from {first:.2g} to {last:.2g}: the engine may keep old weights."
        return Finding(sentence, cost=1.0, advice="Check what the engine does in sync_weights.")
    # At a nat, the sampled tokens say nothing about the policy, and no weight corrects that.
    if difference >= 1:
        sentence += " The engine samples from another distribution, or has other weights."
        return Finding(sentence, cost=1.0)
    return Finding(sentence, cost=difference, settings={"loss.recipe": "grpo_tis"})


def find_kl(record: RunRecord, threshold: float) -> Finding | None:
    """The policy is farther from the one that sampled than stable runs were."""
    window = record.window
    # A policy that learns moves away from the one that sampled: that alone is normal.
    if len(record.metrics) < 2 * window or record.rises() or record.is_solved:
        return None
    recent = record.metrics[-window:]
    stale = [line for line in recent if (line.get("staleness/max") or 0) > 0]
    kl = mean(record.values("rollout/kl", stale))
    if kl is None or kl < threshold:
        return None
    settings: dict[str, Any] = {"optimizer.scale_lr_by_kl": LARGEST_KL}
    if record.settings.get("optimizer.scale_lr_by_kl"):
        settings = lower_rate(record)
    return Finding(
        f"The mean rollout/kl is {kl:.2f} nats per token in the last {window} batches, and the "
        f"policy does not improve: stable runs stay below {threshold:g}.",
        # Grave from twice the threshold on, where runs were unstable.
        cost=min(1.0, 0.25 * kl / threshold),
        settings=settings,
    )


def find_staleness(record: RunRecord, threshold: float) -> Finding | None:
    """A recipe that kept less than `threshold` in the benchmark learns from samples that old."""
    recipe = record.settings.get("loss.recipe") or ""
    staleness = max(record.values("staleness/max"), default=0.0)
    lag = nearest_lag(recipe, int(staleness))
    if lag is None or staleness < 1:
        return None
    if min(measured.kept for measured in load_table()[recipe][lag].values()) >= threshold:
        return None
    better = advice_for(int(staleness)).recipes
    settings: dict[str, object] = {} if recipe in better else {"loss.recipe": better[0]}
    return Finding(
        f"Samples are up to {staleness:.0f} updates old, and at a lag of {lag} the recipe {recipe} "
        f"keeps {kept_text(recipe, lag)}.",
        cost=0.3,
        places=places_of(row for row in record.recent_rows if (row["staleness"] or 0) >= staleness),
        settings=settings,
    )
