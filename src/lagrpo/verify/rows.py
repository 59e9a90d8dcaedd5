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

FLOAT64, FLOAT32 = 1e-9, 2.0**-22  # relative rounding of sums of float64 in another order, and of an advantage


def check_rows(run: RecordedRun, report: Report) -> list[Row]:
    """All rows. Whether every step has its groups, with their completions."""
    s = run.settings
    for step in range(1, max([*run.metrics, *run.steps]) + 1):
        rows, file = run.steps.get(step, []), f"rollouts/step-{step:06d}.parquet"
        groups = groups_of(rows)
        fresh = [members for members in groups if members[0]["source"] == "sampler"]
        counts = (len(groups), len(fresh)) if step in run.steps else "no file"
        expected = {"groups, and generated ones": (s.schedule.prompts_per_batch, run.fresh_prompts)}
        report.compare("rows", file, expected, {"groups, and generated ones": counts})
        for members in fresh:
            found = {"completions": [row["sample_index"] for row in members]}
            report.compare("rows", members[0]["where"], {"completions": list(range(s.rollout.num_generations))}, found)
        for row in rows:
            report.compare("rows", row["where"], {"step": step}, row)
    return [row for rows in run.steps.values() for row in rows]


def check_syncs(run: RecordedRun, report: Report) -> None:
    """Whether weights were synced when the schedule says so: in every line, and the event with its version."""
    events = {event["step"]: event for event in run.events if event["event"] == "weight_sync"}
    generated, kl, s = 0, 0.0, run.settings.schedule  # batches since the last sync, and the KL that the last measured
    for step, (number, line) in sorted(run.metrics.items()):
        reason = "schedule" if s.kind == "lagged" or ((step - 1) % s.batches + 1) % max(s.sync_every, 1) == 0 else ""
        if s.kind == "budget":
            reason = "budget" if kl > (s.delta or 0.0) else "cap" if generated >= s.sync_every else ""
        reason, event = "start" if step == 1 else reason, events.get(step, {})
        performed = {"weight_sync/performed": int(bool(reason))}
        report.compare("weight syncs", f"metrics.jsonl, line {number}", performed, line)
        expected = {"weight_sync": (reason, line["policy_version"] if reason else None)}
        found = {"weight_sync": (event.get("reason", ""), event.get("policy_version"))}
        report.compare("weight syncs", f"events.jsonl, step {step}", expected, found)
        generated, kl = 1 if reason else generated + 1, 0.0 if reason else kl
        kl = line["rollout/seq_kl"] if line.get("rollout/seq_kl") is not None else kl


def check_versions(run: RecordedRun, rows: Sequence[Row], report: Report) -> None:
    """Tokens have the version that the schedule announced, and π_k the version of the step's metrics. A completion
    that vLLM finished after a weight sync may have tokens of later versions, too."""
    s, synced = run.settings, [step for step, (_, line) in run.metrics.items() if line["weight_sync/performed"]]
    spanning = s.vllm.on_weight_sync == "continue" and s.rollout.engine == "vllm"
    for row in (row for row in rows if row["step"] in run.metrics):
        versions, step = sampled(row, "policy_versions"), row["step"]
        known = bool(versions) and min(versions) >= 0
        expected = {"policy_version": run.metrics[step][1]["policy_version"]}
        expected["staleness"] = row["policy_version"] - min(versions) if known else None
        sync = max([b for b in synced if b <= step], default=0)
        sync = max(1, step - s.schedule.sync_every) if s.schedule.kind == "lagged" else sync
        report.compare("versions", row["where"], expected, row)
        if known and is_generated(row) and sync in run.metrics:
            alpha = run.metrics[sync][1]["policy_version"]
            found = min(versions) if spanning else next((v for v in versions if v != alpha), alpha)
            expected = {"policy_versions": max(alpha, found) if spanning else alpha}
            report.compare("versions", row["where"], expected, {"policy_versions": found})


def check_groups(run: RecordedRun, rows: Sequence[Row], report: Report) -> None:
    """Which completions the objective leaves out, the standard deviation of each group and its advantages, in
    float64."""
    made, seed, most = run.recipe, run.settings.run.seed, run.settings.rollout.max_completion_length
    for members in groups_of(rows):
        scored = [row for row in members if row["outcome"] == "scored"]
        rewards = torch.tensor([row["reward"] for row in scored], dtype=torch.float64)
        flat = "zero_variance" if len(set(rewards.tolist())) == 1 and made.mask_zero_variance else ""
        for row in members:
            reason = flat if row["outcome"] == "scored" else row["outcome"]
            report.compare("advantages", row["where"], {"excluded_reason": reason}, row)
        if scored:
            uniform = torch.from_numpy(uniforms(len(scored), seed, "advantage", *members[0]["group"]))
            lengths, spread = [sum(row["loss_mask"]) for row in scored], sigma(rewards, made.eps_std).item()
            values = made.advantages(rewards, torch.tensor(lengths), most, uniform).tolist()
            for row, value in zip(scored, values, strict=True):
                report.compare("advantages", row["where"], {"group_std": spread}, row, FLOAT64 * (1 + spread))
                near = FLOAT32 * (1 + abs(value) + float(rewards.abs().max()))
                report.compare("advantages", row["where"], {"advantage": value}, row, near)


def log_ratios(row: Row) -> list[float] | None:
    """log π_k - log α of the sampled tokens; None if one of them is unknown."""
    if row["old_logprobs"] is None or None in sampled(row, "rollout_logprobs"):
        return None
    return [k - a for k, a in zip(sampled(row, "old_logprobs"), sampled(row, "rollout_logprobs"), strict=True)]


def mean(values: Sequence[float]) -> float | None:
    """The mean; None of nothing."""
    return sum(values) / len(values) if values else None


def check_metrics(run: RecordedRun, rows: Sequence[Row], report: Report) -> None:
    """A line for every step, in order, with the keys of the first, and the metrics that follow from its rows. The last
    batch on disk may have no line yet."""
    check, known = "metrics.jsonl", {"weight_sync/performed", "step", "policy_version"}
    for number, line in enumerate(run.lines, start=1):
        expected, found = (number, list(run.lines[0])), (line["step"], list(line))
        report.compare(check, f"{check}, line {number}", {"step and keys": expected}, {"step and keys": found})
    for step in sorted(run.steps.keys() - run.metrics.keys())[:-1]:
        report.compare(check, check, {f"the line of step {step}": "there"}, {})
    for step, (number, line) in sorted(run.metrics.items()):
        own, where = [row for row in rows if row["step"] == step], f"{check}, line {number} (step {step})"
        if not len(own) == len(run.steps.get(step, ())) > 0:
            report.skip("lines of metrics.jsonl: rows of their step are missing or broken")
            continue
        found = {name: value for name, value in step_metrics(run, step, own).items() if name in line}
        for name, value in found.items():
            near = FLOAT64 * (1 + abs(value or 0))
            if name.startswith("rollout/") and value is not None:  # sums in float32
                near = 1e-6 + 1e-4 * abs(value - (name == "rollout/ratio_mean"))
            report.compare(check, where, {name: value}, line, near)
        known |= found.keys()
    others = {name for line in run.lines for name in line} - known
    report.skip("metrics: not recomputed (clocks, gradients, weight-sync checks)", len(others))


def step_metrics(run: RecordedRun, step: int, rows: Sequence[Row]) -> dict[str, Any]:
    """The metrics of a step that follow from its rows; docs/metrics.md defines each."""
    tokens, outcomes = sum(sum(row["loss_mask"]) for row in rows), [row["outcome"] for row in rows]
    scored = groups_of(row for row in rows if row["outcome"] == "scored")
    rewards = [[row["reward"] for row in members] for members in scored]
    flat = [reward for group in rewards for reward in group]
    stale = [row["policy_version"] - v for row in rows for v in sampled(row, "policy_versions") if v >= 0]
    found = {
        "num_tokens": tokens,
        "reward": mean(flat),
        "reward_std": sigma(torch.tensor(flat, dtype=torch.float64), 0.0).item() if flat else None,
        "frac_reward_zero_std": mean([len(set(group)) == 1 for group in rewards]),
        "completions/mean_length": tokens / len(rows),
        "completions/clipped_ratio": mean([not row["finished"] for row in rows]),
        "completions/unscored": outcomes.count("unscored"),
        "completions/failed": outcomes.count("failed"),
        "num_turns/mean": mean([len(row["messages"][::2]) or 1 for row in rows]),
        "staleness/mean": mean(stale),
        "staleness/max": max(stale, default=None),
        **token_metrics(rows),
        **sequence_metrics(run, scored),
    }
    for name in reward_columns(rows[0]):
        found[f"rewards/{name}/mean"] = mean([x for row in rows if (x := row[f"reward_{name}"]) is not None])
    for name in (one.name for one in run.settings.eval.sets):
        made = [e for e in run.evaluations if e.get("set") == name and (e.get("step") or 0) == step - 1]
        found |= {f"eval/{name}/{m}": made[0].get(m) if made else None for m in ("pass@1", "reward")}
    return found


def token_metrics(rows: Sequence[Row]) -> dict[str, float | None]:
    """π_k against α over the tokens of the objective; nothing if some of them lack a log-prob."""
    ratios = [log_ratios(row) for row in rows if not row["excluded_reason"]]
    d = [x for of_row in ratios if of_row for x in of_row]
    if not d or None in ratios:
        return {}
    rho = [math.exp(x) for x in d]
    return {
        "rollout/kl": mean([math.expm1(x) - x for x in d]),
        "rollout/ratio_mean": mean(rho),
        "rollout/ess": sum(rho) ** 2 / (len(rho) * sum(x * x for x in rho)),
        "rollout/logp_difference_mean": mean([abs(x) for x in d]),
        "rollout/logp_difference_max": max(map(abs, d)),
    }


def sequence_metrics(run: RecordedRun, groups: Sequence[Sequence[Row]]) -> dict[str, float | None]:
    """π_k against α for whole completions with known log α; nothing if one of them lacks log π_k. The improvement is
    the mean of (rho - 1) (r - mean of the others), r in units of the range of rewards."""
    known = [row for members in groups for row in members if None not in sampled(row, "rollout_logprobs")]
    d = {row["where"]: log_ratios(row) for row in known}
    if not known or None in d.values():
        return {}
    total = {where: sum(values or ()) for where, values in d.items()}
    rho = [math.exp(min(x, 300.0)) for x in total.values()]
    ess, gains = sum(rho) ** 2 / sum(x * x for x in rho), list[float]()
    low, high = run.settings.task.reward_range
    for members in (members for members in groups if len(members) > 1 and all(row in known for row in members)):
        r = torch.tensor([row["reward"] for row in members], dtype=torch.float64)
        log_ratio = torch.tensor([total[row["where"]] for row in members], dtype=torch.float64)
        gains.append((log_ratio.expm1() * leave_one_out((r - low) / (high - low))).mean().item())
    usable = ess >= 25 and all(low <= row["reward"] <= high for row in known)
    gain = mean(gains) if usable else None
    return {
        "rollout/seq_kl": mean([sum(math.expm1(x) - x for x in values or ()) for values in d.values()]),
        "rollout/seq_tv": mean([abs(x - 1) / 2 if ess >= 0.8 * len(rho) else max(1 - x, 0.0) for x in rho]),
        "rollout/seq_ess": ess,
        "improvement": gain if gain is None or abs(gain) <= 1 else None,
    }
