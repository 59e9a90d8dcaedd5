"""What the rows and lines of a run say about each other: weight syncs, versions, advantages, metrics."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping, Sequence
from math import exp, log, sqrt
from typing import Any

from lagrpo.replay.record import RecordedRun, Report, Row, groups_of, is_generated, sampled
from lagrpo.rng import uniforms
from lagrpo.runs.rollouts import reward_columns

NEVER_NULL = ("batch", "source", "epoch", "prompt_key", "completion", "pi_k_version", "finished", "outcome", "gold")
FLOAT64, FLOAT32 = 1e-9, 2.0**-22  # relative rounding of sums of float64 in another order, and of an advantage


def check_rows(run: RecordedRun, report: Report) -> list[Row]:
    """The rows whose columns fit together; no other check reads the rest. And whether every batch has its groups."""
    whole, s = list[Row](), run.settings
    for row in (row for rows in run.batches.values() for row in rows):
        wrong = broken_column(run, row)
        report.compare("rows", row["where"], wrong, "another value" if wrong else "", row.get(wrong, ""))
        whole += [] if wrong else [row]
    for batch in range(1, max([*run.metrics, *run.batches]) + 1):
        file, groups = f"rollouts/step-{batch:06d}.parquet", list(groups_of(run.batches.get(batch, [])))
        fresh = [members for members in groups if members[0]["source"] == "sampler"]
        counts = (len(groups), len(fresh)) if batch in run.batches else "no file"
        report.compare("rows", file, "groups, and generated ones", (s.schedule.prompts, run.fresh_prompts), counts)
        for members in fresh:
            numbers = [row["completion"] for row in members]
            report.compare("rows", members[0]["where"], "completions", list(range(s.sampling.G)), numbers)
    return whole


def broken_column(run: RecordedRun, row: Row) -> str:
    """The name of a column that does not fit the others or the row's place; "" for a whole row."""
    scored, reward, batch = row["outcome"] == "scored", row["reward"], row["batch"] or 0
    fits = {name: row[name] is not None for name in NEVER_NULL}
    fits |= {
        name: len(row[name] or ()) == len(row["token_ids"] or ()) for name in ("logp_alpha", "versions", "sampled")
    }
    fits["batch"] = f"step-{batch:06d}." in row["where"]
    fits["stage"] = row["stage"] == (batch - 1) // run.settings.schedule.batches + 1
    fits["reward"] = scored == (reward is not None and math.isfinite(reward))
    fits["advantage"] = scored == (row["advantage"] is not None)
    fits["log_ratio"] = (row["log_ratio"] is None) == (row["kl_alpha"] is None)
    try:
        json.loads(row["gold"] or "null")
    except ValueError:
        fits["gold"] = False
    return next((name for name, fit in fits.items() if not fit), "")


def check_syncs(run: RecordedRun, report: Report) -> None:
    """Whether weights were synced when the schedule says so: `synced` of every line, and the event with its version."""
    events = {event["batch"]: event for event in run.events if event["event"] == "weight_sync"}
    generated, kl, s = 0, 0.0, run.settings.schedule  # batches since the last sync, and the KL that the last measured
    for batch, (number, line) in sorted(run.metrics.items()):
        reason = "schedule" if s.kind == "lagged" or ((batch - 1) % s.batches + 1) % max(s.v, 1) == 0 else ""
        if s.kind == "budget":
            reason = "budget" if kl > (s.delta or 0.0) else "cap" if generated >= s.v else ""
        reason, event = "start" if batch == 1 else reason, events.get(batch, {})
        report.compare("weight syncs", f"metrics.jsonl, line {number}", "synced", int(bool(reason)), line["synced"])
        expected, found = (reason, line["version"] if reason else None), (event.get("reason", ""), event.get("version"))
        report.compare("weight syncs", f"events.jsonl, batch {batch}", "weight_sync", expected, found)
        generated, kl = 1 if reason else generated + 1, 0.0 if reason else kl
        kl = line["kl_sequence"] if line.get("kl_sequence") is not None else kl


def check_versions(run: RecordedRun, rows: Sequence[Row], report: Report) -> None:
    """Tokens have the version that the schedule announced, and π_k the version of the batch's metrics. A completion
    that vLLM finished after a weight sync may have tokens of later versions, too."""
    s, synced = run.settings, [batch for batch, (_, line) in run.metrics.items() if line["synced"]]
    spanning = s.vllm.in_flight == "span" and s.sampling.sampler == "vllm"
    for row in (row for row in rows if row["batch"] in run.metrics):
        versions, batch = sampled(row, "versions"), row["batch"]
        known = bool(versions) and min(versions) >= 0
        expected = {"pi_k_version": run.metrics[batch][1]["version"]}
        expected["lag"] = row["pi_k_version"] - min(versions) if known else None
        sync = max([b for b in synced if b <= batch], default=0)
        sync = max(1, batch - s.schedule.v) if s.schedule.kind == "lagged" else sync
        report.compare_all("versions", row["where"], expected, row)
        if known and is_generated(row) and sync in run.metrics:
            alpha = run.metrics[sync][1]["version"]
            wrong = [v for v in versions if v < alpha or (v != alpha and not spanning)]
            report.compare("versions", row["where"], "versions", alpha, wrong[0] if wrong else alpha)


def check_groups(run: RecordedRun, rows: Sequence[Row], report: Report) -> None:
    """Which completions the objective leaves out, the sigma of each group, its advantages by the formulas below, and
    the log-ratios Σ ln ρ and Σ (ρ - 1 - ln ρ) of π_k and α from the recorded log-probs."""
    made, s = run.recipe.settings, run.settings
    for members in groups_of(rows):
        scored = [row for row in members if row["outcome"] == "scored"]
        rewards, first = [row["reward"] for row in scored], members[0]
        flat = "zero_variance" if len(set(rewards)) == 1 and made["mask_zero_variance"] else ""
        uniform = uniforms(len(scored), s.run.seed, "advantage", first["batch"], first["group"]).tolist()
        shaped = [row["reward"] + length_penalty(sum(row["sampled"]), s.sampling.max_tokens, made) for row in scored]
        near = FLOAT32 * (1 + max(map(abs, shaped), default=0.0))
        for row, value in zip(scored, advantages(shaped, made, uniform), strict=True):
            report.compare_all("advantages", row["where"], {"sigma": sigma(rewards, run.recipe.eps_std)}, row, FLOAT64)
            report.compare_all("advantages", row["where"], {"advantage": value}, row, near)
        for row in members:
            masked = flat if row["outcome"] == "scored" else row["outcome"]
            report.compare("masks", row["where"], "masked", masked, row["masked"])
            if None not in (row["log_ratio"], row["logp_k"]) and None not in sampled(row, "logp_alpha"):
                d = [k - alpha for k, alpha in zip(sampled(row, "logp_k"), sampled(row, "logp_alpha"), strict=True)]
                expected = {"log_ratio": sum(d), "kl_alpha": sum(math.expm1(x) - x for x in d)}
                near = 1e-5 * (1 + sum(map(abs, d))) + FLOAT32 * sum(map(abs, sampled(row, "logp_k")))
                report.compare_all("log π_k - log α", row["where"], expected, row, near)


def mean(values: Sequence[float]) -> float | None:
    """The mean; None of nothing."""
    return sum(values) / len(values) if values else None


def sigma(r: Sequence[float], eps_std: float = 0.0) -> float:
    """sqrt(s0^2 + eps_std), Eq. 2 of Mroueh et al., arXiv 2505.22257; s0^2 = mean (r - mu)^2, 0 for equal rewards."""
    mu = sum(r) / len(r)
    return sqrt((sum((x - mu) ** 2 for x in r) / len(r) if len(set(r)) > 1 else 0.0) + eps_std)


def length_penalty(tokens: int, most: int, made: Mapping[str, Any]) -> float:
    """DAPO's penalty for length (arXiv 2503.14476, Eq. 13), if the recipe has one."""
    buffer = made["overlong_buffer"]
    return min(0.0, max(-1.0, (most - buffer - tokens) / buffer)) if buffer else 0.0


def advantages(r: Sequence[float], made: Mapping[str, Any], uniform: Sequence[float]) -> list[float]:
    """The advantages of a group as the papers print them; a group of one keeps its reward, equal rewards give 0.
    `red_drop` drops completions below the mean, smallest uniforms first, until they are no more than the others."""
    G, mu = len(r), sum(r) / max(len(r), 1)
    if len(set(r)) < 2:
        return list(r) if G == 1 else [0.0] * G
    below = sorted((u, i) for i, (x, u) in enumerate(zip(r, uniform, strict=True)) if x < mu)
    dropped = {i for _, i in below[: max(2 * len(below) - G, 0)]}
    kept = [x for i, x in enumerate(r) if i not in dropped]
    tau, top, s1 = made.get("strength", 1.0), max(r), sigma(r) * sqrt(G / (G - 1))
    return {
        "centered": lambda: [x - mu for x in r],
        "normalized": lambda: [(x - mu) / sigma(r, made["eps_std"]) for x in r],
        "normalized_unbiased": lambda: [(x - mu) / (s1 + made["std_offset"]) for x in r],
        "leave_one_out": lambda: [x - (sum(r) - x) / (G - 1) for x in r],
        "red_drop": lambda: [0.0 if i in dropped else x - sum(kept) / len(kept) for i, x in enumerate(r)],
        "log_mean_exp": lambda: [x - top - tau * log(sum(exp((y - top) / tau) for y in r) / G) for x in r],
    }[made["advantage"]]()


def check_metrics(run: RecordedRun, rows: Sequence[Row], report: Report) -> None:
    """A line for every batch, in order, with the keys of the first, and the metrics that follow from its rows. The last
    batch on disk may have no line yet."""
    check, known = "metrics.jsonl", {"synced", "batch", "version"}
    for number, line in enumerate(run.lines, start=1):
        expected = number, list(run.lines[0])
        report.compare(check, f"{check}, line {number}", "batch and keys", expected, (line["batch"], list(line)))
    for batch in sorted(run.batches.keys() - run.metrics.keys())[:-1]:
        report.compare(check, check, f"the line of batch {batch}", "there", "missing")
    for batch, (number, line) in sorted(run.metrics.items()):
        own, where = [row for row in rows if row["batch"] == batch], f"{check}, line {number} (batch {batch})"
        if not len(own) == len(run.batches.get(batch, ())) > 0:
            report.skip("lines of metrics.jsonl: rows of their batch are missing or broken")
            continue
        found = {name: value for name, value in batch_metrics(run, batch, own).items() if name in line}
        report.compare_all(check, where, found, line, FLOAT64)
        for name, value in token_metrics(run, own).items():  # sums in float32
            near = 1e-6 + 1e-4 * abs(value - (name == "ratio_mean"))
            report.compare(check, where, name, value, line.get(name), near)
        known |= {*found, "kl_alpha", "ratio_mean"}
    others = {name for line in run.lines for name in line} - known
    report.skip("metrics: not recomputed (clocks, gradients, weight-sync checks, intervals, bounds)", len(others))


def token_metrics(run: RecordedRun, rows: Sequence[Row]) -> dict[str, float]:
    """π_k against α over the tokens of the objective: from log_ratio = Σ ln ρ and kl_alpha = Σ (ρ - 1 - ln ρ)."""
    used = [row for row in rows if row["kl_alpha"] is not None and not row["masked"]]
    used = [row for row in used if row["advantage"] or not run.recipe.skips_zero_advantage]
    if not (tokens := sum(sum(row["sampled"]) for row in used)):
        return {}
    kl, log_ratio = (sum(row[name] for row in used) / tokens for name in ("kl_alpha", "log_ratio"))
    return {"kl_alpha": kl, "ratio_mean": kl + log_ratio + 1}


def batch_metrics(run: RecordedRun, batch: int, rows: Sequence[Row]) -> dict[str, Any]:
    """The metrics of a batch that follow from its rows; docs/metrics.md defines each."""
    tokens, outcomes = sum(sum(row["sampled"]) for row in rows), [row["outcome"] for row in rows]
    scored = [*groups_of(row for row in rows if row["outcome"] == "scored")]
    rewards = [[row["reward"] for row in members] for members in scored]
    flat = [reward for group in rewards for reward in group]
    lags = [row["pi_k_version"] - v for row in rows for v in sampled(row, "versions") if v >= 0]
    found = {
        "reward_mean": mean(flat),
        "reward_std": sigma(flat) if flat else None,
        "zero_variance_share": mean([len(set(group)) == 1 for group in rewards]),
        "unscored": outcomes.count("unscored"),
        "failed": outcomes.count("failed"),
        "tokens_sampled": tokens,
        "tokens_mean": tokens / len(rows),
        "finished_share": mean([row["finished"] for row in rows]),
        "turns_mean": mean([len(row["turns"][::2]) or 1 for row in rows]),
        "lag_mean": mean(lags),
        "lag_max": max(lags, default=None),
    } | sequence_metrics(run, scored)
    for name in reward_columns(rows[0]):
        found[f"reward_{name}_mean"] = mean([x for row in rows if (x := row[f"reward_{name}"]) is not None])
    for name in (one.name for one in run.settings.evaluation.sets):
        made = [e for e in run.evaluations if e.get("set") == name and (e.get("batch") or 0) == batch - 1]
        found |= {f"eval_{name}_{m}": made[0].get(m) if made else None for m in ("pass_at_1", "reward_mean")}
    return found


def sequence_metrics(run: RecordedRun, groups: Sequence[Sequence[Row]]) -> dict[str, float | None]:
    """π_k against α for whole completions with known log α; nothing if one of them lacks log π_k, or the run left some
    out. The improvement is mean (rho - 1) (r - mean of the others), r in units of the range of rewards."""
    known = [row for members in groups for row in members if None not in sampled(row, "logp_alpha")]
    complete = run.settings.run.score_lag or not (run.recipe.skips_zero_advantage or run.recipe.mask_zero_variance)
    if not known or not complete or any(row["log_ratio"] is None for row in known):
        return {}
    rho, (low, high) = [exp(min(row["log_ratio"], 300.0)) for row in known], run.settings.task.reward_range
    ess, gains = sum(rho) ** 2 / sum(x * x for x in rho), list[float]()
    for members in (members for members in groups if len(members) > 1 and all(row in known for row in members)):
        r = [(row["reward"] - low) / (high - low) for row in members]
        others = [(sum(r) - x) / (len(r) - 1) for x in r]
        terms = zip(members, r, others, strict=True)
        gains.append(sum((exp(row["log_ratio"]) - 1) * (x - other) for row, x, other in terms) / len(r))
    inside = all(low <= row["reward"] <= high for row in known) and run.recipe.eps_std <= 0.75
    return {
        "kl_sequence": mean([row["kl_alpha"] for row in known]),
        "tv_sequence": mean([abs(x - 1) / 2 if ess >= 0.8 * len(rho) else max(1 - x, 0.0) for x in rho]),
        "lag_ess": ess,
        **({"lag_improvement": mean(gains)} if inside else {}),
    }
