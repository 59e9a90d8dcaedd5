"""What the rows and lines of a run say about each other: weight syncs, versions, advantages, metrics."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

import torch
from torch import Tensor

from lagrpo.core import kl
from lagrpo.core.advantages import leave_one_out, sigma
from lagrpo.core.ratios import limit
from lagrpo.rng import uniforms
from lagrpo.runs.rollouts import reward_columns
from lagrpo.types import Range
from lagrpo.verify.record import RecordedRun, Row, groups_of, sampled

FLOAT64, FLOAT32 = 1e-9, 2.0**-22  # relative rounding of sums of float64 in another order, and of an advantage


def check_rows(run: RecordedRun) -> None:
    """Whether every step has its groups, with their completions."""
    s, what, report = run.settings, "groups, and generated ones", run.report
    for step in range(1, max([*run.metrics, *run.steps]) + 1):
        groups = groups_of(run.steps.get(step, []))
        fresh = [members for members in groups if members[0]["source"] == "sampler"]
        found = {what: (len(groups), len(fresh)) if step in run.steps else "no file"}
        expected = {what: (s.schedule.prompts_per_batch, run.fresh_prompts)}
        report.compare("rows", f"rollouts/step-{step:06d}.parquet", expected, found)
        for members in fresh:
            found = {"step": members[0]["step"], "completions": [row["sample_index"] for row in members]}
            expected = {"step": step, "completions": list(range(s.rollout.num_generations))}
            report.compare("rows", members[0]["where"], expected, found)


def check_syncs(run: RecordedRun) -> None:
    """Whether weights were synced when the schedule says so: in every line, and the event with its version."""
    events = {event["step"]: event for event in run.events if event["event"] == "weight_sync"}
    generated, kl, s = 0, 0.0, run.settings.schedule  # batches since the last sync, and the KL that the last measured
    for step, (number, line) in sorted(run.metrics.items()):
        reason = "schedule" if s.kind == "lagged" or ((step - 1) % s.stage_length + 1) % s.v == 0 else ""
        if s.kind == "budget":
            reason = "budget" if kl > (s.sync_at_kl or 0.0) else "cap" if generated >= s.v else ""
        reason, event = "start" if step == 1 else reason, events.get(step, {})
        performed = {"weight_sync/performed": int(bool(reason))}
        run.report.compare("weight syncs", f"metrics.jsonl, line {number}", performed, line)
        expected = {"weight_sync": (reason, line["policy_version"] if reason else None)}
        found = {"weight_sync": (event.get("reason", ""), event.get("policy_version"))}
        run.report.compare("weight syncs", f"events.jsonl, step {step}", expected, found)
        generated, kl = 1 if reason else generated + 1, 0.0 if reason else kl
        kl = line["rollout/seq_kl"] if line.get("rollout/seq_kl") is not None else kl


def check_versions(run: RecordedRun) -> None:
    """Tokens have the version that the schedule announced, and π_k the version of the step's metrics. A completion
    that vLLM finished after a weight sync may have tokens of later versions, too. If a finished run was resumed for
    more batches, none of them was sampled before."""
    s, synced = run.settings, [step for step, (_, line) in run.metrics.items() if line["weight_sync/performed"]]
    resumed = [event for event in run.events if event["event"] == "resumed"]
    spanning = s.vllm.on_weight_sync == "continue" and s.rollout.engine == "vllm"
    for row in (row for row in run.rows if row["step"] in run.metrics):
        step, versions = row["step"], sampled(row, "policy_versions")
        known = bool(versions) and min(versions) >= 0
        expected = {"policy_version": run.metrics[step][1]["policy_version"]}
        expected["staleness"] = row["policy_version"] - min(versions) if known else None
        run.report.compare("versions", row["where"], expected, row)
        sync = max([b for b in synced if b <= step], default=0)
        is_behind = s.schedule.kind == "lagged" and row["epoch"] >= 0  # dynamic sampling adds groups of the last sync
        if is_behind:
            sync = max(1, step - s.schedule.v, *(e["step"] + 1 for e in resumed if e["step"] + e["ahead"] < step))
        if known and row["source"] == "sampler" and sync in run.metrics:
            alpha = run.metrics[sync][1]["policy_version"]
            other = next((v for v in versions if v < alpha or (v > alpha and not spanning)), alpha)
            run.report.compare("versions", row["where"], {"policy_versions": alpha}, {"policy_versions": other})


def check_groups(run: RecordedRun) -> None:
    """Which completions the objective leaves out, the standard deviation of each group and its advantages, in
    float64."""
    made, seed, most = run.recipe, run.settings.run.seed, run.settings.rollout.max_completion_length
    for members in groups_of(run.rows):
        scored = [row for row in members if row["outcome"] == "scored"]
        rewards = torch.tensor([row["reward"] for row in scored], dtype=torch.float64)
        flat = "zero_variance" if len(rewards.unique()) == 1 and made.mask_zero_variance else ""
        for row in members:
            reason = flat if row["outcome"] == "scored" else row["outcome"]
            run.report.compare("advantages", row["where"], {"excluded_reason": reason}, row)
        if scored:
            uniform = torch.from_numpy(uniforms(len(scored), seed, "advantage", *members[0]["group"]))
            lengths, spread = [sum(row["loss_mask"]) for row in scored], sigma(rewards, made.eps_std).item()
            values = made.advantages(rewards, torch.tensor(lengths), most, uniform).tolist()
            for row, value in zip(scored, values, strict=True):
                run.report.compare("advantages", row["where"], {"group_std": spread}, row, FLOAT64 * (1 + spread))
                near = FLOAT32 * (1 + abs(value) + float(rewards.abs().max()))
                run.report.compare("advantages", row["where"], {"advantage": value}, row, near)


def check_metrics(run: RecordedRun) -> None:
    """A line for every step, in order, with the keys of the first, and the metrics that follow from its rows. The last
    batch on disk may have no line yet."""
    check, report = "metrics.jsonl", run.report
    for number, line in enumerate(run.lines, start=1):
        expected, found = (number, list(run.lines[0])), (line["step"], list(line))
        report.compare(check, f"{check}, line {number}", {"step and keys": expected}, {"step and keys": found})
    for step in sorted(run.steps.keys() - run.metrics.keys())[:-1]:
        report.compare(check, check, {f"the line of step {step}": "there"}, {})
    for step, (number, line) in sorted(run.metrics.items()):
        found = step_metrics(run, step, run.steps[step]) if run.steps.get(step) else {}
        for name, value in found.items():
            near = FLOAT64 * (1 + abs(value or 0))
            if name.startswith("rollout/") and value is not None:  # sums in float32
                near = 1e-6 + 1e-4 * abs(value - (name == "rollout/ratio_mean"))
            report.compare(check, f"{check}, line {number} (step {step})", {name: value}, line, near)


def mean(values: Iterable[float]) -> float | None:
    """The mean; None of nothing."""
    values = list(values)
    return sum(values) / len(values) if values else None


def step_metrics(run: RecordedRun, step: int, rows: Sequence[Row]) -> dict[str, Any]:
    """The metrics of a step that follow from its rows; docs/metrics.md defines each."""
    tokens, outcomes = sum(sum(row["loss_mask"]) for row in rows), [row["outcome"] for row in rows]
    groups = groups_of(row for row in rows if row["outcome"] == "scored")
    rewards = [row["reward"] for members in groups for row in members]
    stale = [row["policy_version"] - v for row in rows for v in sampled(row, "policy_versions") if v >= 0]
    found = {
        "num_tokens": tokens,
        "reward": mean(rewards),
        "reward_std": sigma(torch.tensor(rewards, dtype=torch.float64), 0.0).item() if rewards else None,
        "frac_reward_zero_std": mean(len({row["reward"] for row in members}) == 1 for members in groups),
        "completions/mean_length": tokens / len(rows),
        "completions/clipped_ratio": mean(not row["finished"] for row in rows),
        "completions/unscored": outcomes.count("unscored"),
        "completions/failed": outcomes.count("failed"),
        "num_turns/mean": mean(len(row["messages"][::2]) or 1 for row in rows),
        "staleness/mean": mean(stale),
        "staleness/max": max(stale, default=None),
        **token_metrics(rows),
        **sequence_metrics(groups, run.settings.task.reward_range),
    }
    for name in reward_columns(rows[0]):
        found[f"rewards/{name}/mean"] = mean(x for row in rows if (x := row[f"reward_{name}"]) is not None)
    for name in (one.name for one in run.settings.eval.sets):
        made = [e for e in run.evaluations if e.get("set") == name and (e.get("step") or 0) == step - 1]
        found |= {f"eval/{name}/{m}": made[0].get(m) if made else None for m in ("pass@1", "reward")}
    return found


def log_ratios(rows: Iterable[Row]) -> list[Tensor]:
    """log π_k - log α of the sampled tokens of each row, in float64; nothing if one of them is unknown."""
    found = []
    for row in rows:
        if row["old_logprobs"] is None or None in sampled(row, "rollout_logprobs"):
            return []
        k, alpha = (torch.tensor(sampled(row, f"{of}_logprobs"), dtype=torch.float32) for of in ("old", "rollout"))
        found.append((k - alpha).double())  # rounded as in the run
    return found


def token_metrics(rows: Sequence[Row]) -> dict[str, float]:
    """π_k against α over the tokens of the objective; nothing if some of them lack a log-prob."""
    if not (known := log_ratios(row for row in rows if not row["excluded_reason"])):
        return {}
    d, bounded = torch.cat(known), limit(torch.cat(known))
    ratio = bounded.exp()
    found = {"kl": kl.sampled_kl(bounded), "ratio_mean": ratio.mean(), "ess": kl.ess(ratio) / len(d)}
    found |= {"logp_difference_mean": d.abs().mean(), "logp_difference_max": d.abs().max()}
    return {f"rollout/{name}": value.item() for name, value in found.items()}


def sequence_metrics(groups: Iterable[Sequence[Row]], reward_range: Range) -> dict[str, float | None]:
    """π_k against α for whole completions with known log α; nothing if one of them lacks log π_k. The improvement is
    the mean of (rho - 1) (r - mean of the others), r in units of the range of rewards."""
    groups, (low, high) = list(groups), reward_range
    rows = [row for members in groups for row in members if None not in sampled(row, "rollout_logprobs")]
    if not (ratios := log_ratios(rows)):
        return {}
    d, gains = torch.stack([x.sum() for x in ratios]), list[float]()
    for members in (members for members in groups if len(members) > 1):
        if own := log_ratios(members):
            r = torch.tensor([(row["reward"] - low) / (high - low) for row in members], dtype=torch.float64)
            gains.append((torch.stack([x.sum() for x in own]).expm1() * leave_one_out(r)).mean().item())
    ess, gain = kl.ess((d - d.max()).exp()).item(), mean(gains)
    usable = ess >= 25 and all(low <= row["reward"] <= high for row in rows) and gain is not None and abs(gain) <= 1
    return {
        "improvement": gain if usable else None,
        "rollout/seq_kl": sum((x.expm1() - x).sum().item() for x in ratios) / len(ratios),
        "rollout/seq_tv": kl.sampled_tv(d, kl.prefers_bounded(d)).item(),
        "rollout/seq_ess": ess,
    }
