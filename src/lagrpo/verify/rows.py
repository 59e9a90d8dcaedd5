"""What the rows and lines of a run say about each other: weight syncs, versions, advantages, metrics."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import torch

from lagrpo.core.advantages import leave_one_out, sigma
from lagrpo.rng import uniforms
from lagrpo.runs.rollouts import reward_columns
from lagrpo.verify.record import RecordedRun, Report, Row, groups_of, is_generated, sampled

NEVER_NULL = ("epoch", "prompt_key", "pi_k_version", "finished", "outcome")
FLOAT64, FLOAT32 = 1e-9, 2.0**-22  # relative rounding of sums of float64 in another order, and of an advantage


def check_rows(run: RecordedRun, report: Report) -> list[Row]:
    """The rows whose columns fit together; no other check reads the rest. And whether every batch has its groups."""
    whole, s = list[Row](), run.settings
    for batch in range(1, max([*run.metrics, *run.batches]) + 1):
        rows, file = run.batches.get(batch, []), f"rollouts/step-{batch:06d}.parquet"
        groups = groups_of(rows)
        fresh = [members for members in groups if members[0]["source"] == "sampler"]
        counts = (len(groups), len(fresh)) if batch in run.batches else "no file"
        expected = {"groups, and generated ones": (s.schedule.prompts_per_batch, run.fresh_prompts)}
        report.compare("rows", file, expected, {"groups, and generated ones": counts})
        for members in fresh:
            numbers = [row["completion"] for row in members]
            report.compare(
                "rows",
                members[0]["where"],
                {"completions": list(range(s.rollout.num_generations))},
                {"completions": numbers},
            )
        for row in rows:
            expected = {"batch": batch, "stage": (batch - 1) // s.schedule.batches + 1} | missing_columns(row)
            report.compare("rows", row["where"], expected, row)
            whole += [] if missing_columns(row) or row["batch"] != batch else [row]
    return whole


def missing_columns(row: Row) -> dict[str, str]:
    """The columns without a value, or with one for another number of tokens or another outcome than the row's."""
    scored, tokens = row["outcome"] == "scored", len(row["token_ids"] or ())
    fits = {name: row[name] is not None for name in NEVER_NULL}
    fits |= {name: len(row[name] or ()) == tokens for name in ("logp_alpha", "versions", "sampled")}
    fits |= {
        name: scored == math.isfinite(row[name] if row[name] is not None else math.nan)
        for name in ("reward", "advantage")
    }
    fits["log_ratio"] = (row["log_ratio"] is None) == (row["kl_alpha"] is None)
    return {name: "another value" for name, fit in fits.items() if not fit}


def check_syncs(run: RecordedRun, report: Report) -> None:
    """Whether weights were synced when the schedule says so: `synced` of every line, and the event with its version."""
    events = {event["batch"]: event for event in run.events if event["event"] == "weight_sync"}
    generated, kl, s = 0, 0.0, run.settings.schedule  # batches since the last sync, and the KL that the last measured
    for batch, (number, line) in sorted(run.metrics.items()):
        reason = "schedule" if s.kind == "lagged" or ((batch - 1) % s.batches + 1) % max(s.sync_every, 1) == 0 else ""
        if s.kind == "budget":
            reason = "budget" if kl > (s.delta or 0.0) else "cap" if generated >= s.sync_every else ""
        reason, event = "start" if batch == 1 else reason, events.get(batch, {})
        report.compare("weight syncs", f"metrics.jsonl, line {number}", {"synced": int(bool(reason))}, line)
        expected, found = (reason, line["version"] if reason else None), (event.get("reason", ""), event.get("version"))
        report.compare(
            "weight syncs", f"events.jsonl, batch {batch}", {"weight_sync": expected}, {"weight_sync": found}
        )
        generated, kl = 1 if reason else generated + 1, 0.0 if reason else kl
        kl = line["kl_sequence"] if line.get("kl_sequence") is not None else kl


def check_versions(run: RecordedRun, rows: Sequence[Row], report: Report) -> None:
    """Tokens have the version that the schedule announced, and π_k the version of the batch's metrics. A completion
    that vLLM finished after a weight sync may have tokens of later versions, too."""
    s, synced = run.settings, [batch for batch, (_, line) in run.metrics.items() if line["synced"]]
    spanning = s.vllm.on_weight_sync == "continue" and s.rollout.engine == "vllm"
    for row in (row for row in rows if row["batch"] in run.metrics):
        versions, batch = sampled(row, "versions"), row["batch"]
        known = bool(versions) and min(versions) >= 0
        expected = {"pi_k_version": run.metrics[batch][1]["version"]}
        expected["lag"] = row["pi_k_version"] - min(versions) if known else None
        sync = max([b for b in synced if b <= batch], default=0)
        sync = max(1, batch - s.schedule.sync_every) if s.schedule.kind == "lagged" else sync
        report.compare("versions", row["where"], expected, row)
        if known and is_generated(row) and sync in run.metrics:
            alpha = run.metrics[sync][1]["version"]
            found = min(versions) if spanning else next((v for v in versions if v != alpha), alpha)
            report.compare(
                "versions", row["where"], {"versions": max(alpha, found) if spanning else alpha}, {"versions": found}
            )


def check_groups(run: RecordedRun, rows: Sequence[Row], report: Report) -> None:
    """Which completions the objective leaves out, the sigma of each group and its advantages in float64, and the
    log-ratios Σ ln ρ and Σ (ρ - 1 - ln ρ) of π_k and α from the recorded log-probs."""
    made, seed, most = run.recipe, run.settings.run.seed, run.settings.rollout.max_completion_length
    for members in groups_of(rows):
        scored = [row for row in members if row["outcome"] == "scored"]
        rewards = torch.tensor([row["reward"] for row in scored], dtype=torch.float64)
        flat = "zero_variance" if len(set(rewards.tolist())) == 1 and made.mask_zero_variance else ""
        for row in members:
            masked = flat if row["outcome"] == "scored" else row["outcome"]
            report.compare("advantages", row["where"], {"masked": masked}, row)
            check_log_ratio(row, report)
        if scored:
            uniform = torch.from_numpy(uniforms(len(scored), seed, "advantage", *members[0]["group"]))
            lengths, spread = [sum(row["sampled"]) for row in scored], sigma(rewards, made.eps_std).item()
            values = made.advantages(rewards, torch.tensor(lengths), most, uniform).tolist()
            for row, value in zip(scored, values, strict=True):
                report.compare("advantages", row["where"], {"sigma": spread}, row, FLOAT64 * (1 + spread))
                near = FLOAT32 * (1 + abs(value) + float(rewards.abs().max()))
                report.compare("advantages", row["where"], {"advantage": value}, row, near)


def check_log_ratio(row: Row, report: Report) -> None:
    """log_ratio and kl_alpha of a completion, sums of float32 log-probs."""
    if None not in (row["log_ratio"], row["logp_k"]) and None not in sampled(row, "logp_alpha"):
        d = [k - alpha for k, alpha in zip(sampled(row, "logp_k"), sampled(row, "logp_alpha"), strict=True)]
        near = 1e-5 * (1 + sum(map(abs, d))) + FLOAT32 * sum(map(abs, sampled(row, "logp_k")))
        expected = {"log_ratio": sum(d), "kl_alpha": sum(math.expm1(x) - x for x in d)}
        report.compare("log π_k - log α", row["where"], expected, row, near * (1 + expected["kl_alpha"]))


def mean(values: Sequence[float]) -> float | None:
    """The mean; None of nothing."""
    return sum(values) / len(values) if values else None


def check_metrics(run: RecordedRun, rows: Sequence[Row], report: Report) -> None:
    """A line for every batch, in order, with the keys of the first, and the metrics that follow from its rows. The last
    batch on disk may have no line yet."""
    check, known = "metrics.jsonl", {"synced", "batch", "version"}
    for number, line in enumerate(run.lines, start=1):
        expected, found = (number, list(run.lines[0])), (line["batch"], list(line))
        report.compare(check, f"{check}, line {number}", {"batch and keys": expected}, {"batch and keys": found})
    for batch in sorted(run.batches.keys() - run.metrics.keys())[:-1]:
        report.compare(check, check, {f"the line of batch {batch}": "there"}, {})
    for batch, (number, line) in sorted(run.metrics.items()):
        own, where = [row for row in rows if row["batch"] == batch], f"{check}, line {number} (batch {batch})"
        if not len(own) == len(run.batches.get(batch, ())) > 0:
            report.skip("lines of metrics.jsonl: rows of their batch are missing or broken")
            continue
        found = {name: value for name, value in batch_metrics(run, batch, own).items() if name in line}
        for name, value in found.items():
            near = FLOAT64 * (1 + abs(value or 0))
            if name in ("kl_alpha", "ratio_mean"):  # sums in float32
                near = 1e-6 + 1e-4 * abs(value - (name == "ratio_mean"))
            report.compare(check, where, {name: value}, line, near)
        known |= found.keys()
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
    scored = groups_of(row for row in rows if row["outcome"] == "scored")
    rewards = [[row["reward"] for row in members] for members in scored]
    flat = [reward for group in rewards for reward in group]
    lags = [row["pi_k_version"] - v for row in rows for v in sampled(row, "versions") if v >= 0]
    found = (
        {
            "reward_mean": mean(flat),
            "reward_std": sigma(torch.tensor(flat, dtype=torch.float64), 0.0).item() if flat else None,
            "zero_variance_share": mean([len(set(group)) == 1 for group in rewards]),
            "unscored": outcomes.count("unscored"),
            "failed": outcomes.count("failed"),
            "tokens_sampled": tokens,
            "tokens_mean": tokens / len(rows),
            "finished_share": mean([row["finished"] for row in rows]),
            "turns_mean": mean([len(row["turns"][::2]) or 1 for row in rows]),
            "lag_mean": mean(lags),
            "lag_max": max(lags, default=None),
        }
        | token_metrics(run, rows)
        | sequence_metrics(run, scored)
    )
    for name in reward_columns(rows[0]):
        found[f"reward_{name}_mean"] = mean([x for row in rows if (x := row[f"reward_{name}"]) is not None])
    for name in (one.name for one in run.settings.eval.sets):
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
    rho = [math.exp(min(row["log_ratio"], 300.0)) for row in known]
    (low, high), ess, gains = run.settings.task.reward_range, sum(rho) ** 2 / sum(x * x for x in rho), list[float]()
    for members in (members for members in groups if len(members) > 1 and all(row in known for row in members)):
        r, log_ratio = torch.tensor([(row["reward"], row["log_ratio"]) for row in members], dtype=torch.float64).T
        gains.append((log_ratio.expm1() * leave_one_out((r - low) / (high - low))).mean().item())
    inside = all(low <= row["reward"] <= high for row in known) and run.recipe.eps_std <= 0.75
    return {
        "kl_sequence": mean([row["kl_alpha"] for row in known]),
        "tv_sequence": mean([abs(x - 1) / 2 if ess >= 0.8 * len(rho) else max(1 - x, 0.0) for x in rho]),
        "lag_ess": ess,
        **({"lag_improvement": mean(gains)} if inside else {}),
    }
