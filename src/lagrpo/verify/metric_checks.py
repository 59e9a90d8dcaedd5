"""Checks of metrics.jsonl: its lines, and the metrics that follow from the rows of a step."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence

import torch
from torch import Tensor

from lagrpo.runs.rollouts import reward_columns
from lagrpo.types import JsonObject, OutcomeKind, Range
from lagrpo.verify import formulas
from lagrpo.verify.formulas import mean
from lagrpo.verify.record import RecordedRun, Row, groups_of, sampled

FILE = "metrics.jsonl"
Metrics = dict[str, float | None]

FLOAT64_TOLERANCE = 1e-9
"""Relative: sums of float64 in another order. The float32 log-probs are the recorded ones."""

MIN_ESS_OF_IMPROVEMENT = 25.0
"""Below this ESS, the improvement is too noisy to be recorded."""


def check_metrics(run: RecordedRun) -> None:
    """Checks that every step has a line, in order, with the keys of the first, and the metrics.

    The last batch on disk may have no line yet. Lines have more keys from where the run resumed, if
    a newer program resumed it.
    """
    _check_lines(run)
    _check_entropy_coefs(run)
    for step, line in sorted(run.metrics.items()):
        rows = run.steps.get(step)
        if not rows:
            continue
        where = f"{FILE}, line {line.number} (step {step})"
        for name, value in step_metrics(run, step, rows).items():
            if name not in line.values:
                continue  # an older version did not have this metric
            tolerance = FLOAT64_TOLERANCE * (1 + abs(value or 0))
            run.report.compare(FILE, where, {name: value}, line.values, tolerance)


def _check_lines(run: RecordedRun) -> None:
    column = "step and keys"
    resumed_after = {event["step"] for event in run.events if event["event"] == "resumed"}
    keys: list[str] = []
    for line in run.lines:
        may_have_more = not keys or line.values["step"] - 1 in resumed_after
        if may_have_more and line.values.keys() >= set(keys):
            keys = list(line.values)
        expected = {column: (line.number, keys)}
        recorded = {column: (line.values["step"], list(line.values))}
        run.report.compare(FILE, f"{FILE}, line {line.number}", expected, recorded)
    steps_without_line = sorted(run.steps.keys() - run.metrics.keys())
    for step in steps_without_line[:-1]:
        run.report.compare(FILE, FILE, {f"the line of step {step}": "there"}, {})


def _check_entropy_coefs(run: RecordedRun) -> None:
    """Checks that the coefficient of the entropy follows from the entropies of the batches before.

    The entropies are the recorded ones.
    """
    loss = run.settings.loss
    lines = [line for _, line in sorted(run.metrics.items())]
    if loss.entropy_target is not None:
        entropies = [line.values["entropy"] for line in lines]
        coefs = formulas.entropy_coefs(loss.entropy_coef, loss.entropy_target, entropies)
    elif loss.entropy_coef > 0:
        coefs = [loss.entropy_coef] * len(lines)
    else:
        return
    for line, coef in zip(lines, coefs, strict=True):
        where = f"{FILE}, line {line.number}"
        expected: Metrics = {"entropy_coef": coef}
        run.report.compare(FILE, where, expected, line.values, FLOAT64_TOLERANCE)


def step_metrics(run: RecordedRun, step: int, rows: Sequence[Row]) -> Metrics:
    """Returns the metrics of a step that follow from its rows; docs/metrics.md defines each."""
    scored_groups = groups_of(row for row in rows if row["outcome"] == OutcomeKind.SCORED)
    return {
        **_reward_metrics(rows, scored_groups),
        **_completion_metrics(rows),
        **_staleness_metrics(rows),
        **token_metrics(rows),
        **sequence_metrics(scored_groups, run.settings.task.reward_range),
        **_evaluation_metrics(run, step),
        **_learning_rate(run, step, rows),
    }


def _reward_metrics(rows: Sequence[Row], scored_groups: Sequence[Sequence[Row]]) -> Metrics:
    rewards = [row["reward"] for members in scored_groups for row in members]
    have_equal_rewards = [len({row["reward"] for row in members}) == 1 for members in scored_groups]
    metrics: Metrics = {
        "reward": mean(rewards),
        "reward_std": None,
        "frac_reward_zero_std": mean(have_equal_rewards),
    }
    if rewards:
        rewards_C = torch.tensor(rewards, dtype=torch.float64)
        metrics["reward_std"] = rewards_C.std(correction=0).item()
    for name in reward_columns(rows[0]):
        values = [row[f"reward_{name}"] for row in rows]
        metrics[f"rewards/{name}/mean"] = mean(value for value in values if value is not None)
    return metrics


def _completion_metrics(rows: Sequence[Row]) -> Metrics:
    tokens = sum(sum(row["loss_mask"]) for row in rows)
    outcomes = [row["outcome"] for row in rows]
    return {
        "num_tokens": tokens,
        "completions/mean_length": tokens / len(rows),
        "completions/clipped_ratio": mean(not row["finished"] for row in rows),
        "completions/unscored": outcomes.count(OutcomeKind.UNSCORED),
        "completions/failed": outcomes.count(OutcomeKind.FAILED),
        # A completion of one turn has no messages.
        "num_turns/mean": mean(len(row["messages"][::2]) or 1 for row in rows),
    }


def _staleness_metrics(rows: Sequence[Row]) -> Metrics:
    staleness_T = []
    is_mixed = []
    for row in rows:
        is_mixed.append(len(set(sampled(row, "policy_versions"))) > 1)
        for version in sampled(row, "policy_versions"):
            # -1: the version of offline data is unknown.
            if version >= 0:
                staleness_T.append(row["policy_version"] - version)
    return {
        "staleness/mean": mean(staleness_T),
        "staleness/max": max(staleness_T, default=None),
        "staleness/mixed": mean(is_mixed) if staleness_T else None,
    }


def _learning_rate(run: RecordedRun, step: int, rows: Sequence[Row]) -> Metrics:
    """Returns the learning rate of the last update of a step; None if the step has no update.

    Returns nothing if it depends on log-probs that are not recorded.
    """
    rows_of_objective = [row for row in rows if not row["excluded_reason"]]
    if not rows_of_objective:
        return {"learning_rate": None}
    schedule = run.settings.schedule
    optimizer = run.settings.optimizer
    last_update = run.metrics[step].values["policy_version"] + schedule.num_iterations - 1
    updates = schedule.batches * schedule.num_iterations
    rate = formulas.learning_rate(optimizer, last_update, updates)
    if not optimizer.scale_lr_by_ess and not optimizer.scale_lr_by_kl:
        return {"learning_rate": rate}
    if schedule.num_iterations > 1:
        run.report.skip("learning rates: they depend on log-probs between the updates of a step")
        return {}
    rate *= _factor_by_ess(run, rows_of_objective)
    if optimizer.scale_lr_by_kl:
        log_scale = _log_scale_before(run, step)
        kl = _kl_of_learned(run, rows_of_objective)
        if log_scale is None or run.recipe is None:
            run.report.skip("learning rates: they depend on rows or a loss that are not recorded")
            return {}
        if kl is not None:
            rate *= math.exp(sum(formulas.log_factors_by_kl(optimizer, schedule, log_scale, kl)))
    return {"learning_rate": rate}


def _factor_by_ess(run: RecordedRun, rows: Sequence[Row]) -> float:
    """Returns what `scale_lr_by_ess` multiplies the learning rate of these rows with."""
    full = run.settings.optimizer.scale_lr_by_ess
    rows_of_known = [row for row in rows if None not in sampled(row, "rollout_logprobs")]
    log_ratio_of_rows = log_ratios(rows_of_known) if full else []
    if not log_ratio_of_rows:
        return 1.0
    log_ratio_C = torch.stack([log_ratio_T.sum() for log_ratio_T in log_ratio_of_rows])
    share = formulas.effective_sample_size(log_ratio_C) / len(log_ratio_C)
    return min(1.0, share / full) ** 0.5


def _kl_of_learned(run: RecordedRun, rows: Sequence[Row]) -> float | None:
    """Returns the mean KL(α‖π_k) per token of the rows that an update learns from.

    None if there is no such token.
    """
    skips_zero_advantage = run.recipe is not None and run.recipe.skips_zero_advantage
    learned = [
        row
        for row in rows
        if None not in sampled(row, "rollout_logprobs")
        and (row["advantage"] or not skips_zero_advantage)
    ]
    log_ratio_of_rows = log_ratios(learned)
    if not log_ratio_of_rows:
        return None
    return formulas.kl_terms(formulas.limit(torch.cat(log_ratio_of_rows))).mean().item()


def _log_scale_before(run: RecordedRun, step: int) -> float | None:
    """Returns log of the scale of `scale_lr_by_kl` after the update before a step.

    It follows from the rate of that update, which is checked in its turn. None if its rows are not
    recorded.
    """
    optimizer = run.settings.optimizer
    schedule = run.settings.schedule
    for earlier in range(step - 1, -1, -1):
        line = run.metrics.get(earlier)
        if line is None and earlier in run.steps:
            return None
        if line is None or line.values["learning_rate"] is None:
            continue
        rows = [row for row in run.steps.get(earlier, []) if not row["excluded_reason"]]
        kl = _kl_of_learned(run, rows)
        if not rows:
            return None
        if kl is None:
            continue
        rate = formulas.learning_rate(
            optimizer, line.values["policy_version"], schedule.batches * schedule.num_iterations
        )
        rate *= _factor_by_ess(run, rows)
        at_once = formulas.log_factors_by_kl(optimizer, schedule, 0.0, kl)[1]
        return math.log(line.values["learning_rate"] / rate) - at_once
    return 0.0


def _evaluation_metrics(run: RecordedRun, step: int) -> Metrics:
    """Returns the values of each evaluation set, if it was evaluated before this step."""
    metrics: Metrics = {}
    for evaluation_set in run.settings.eval.sets:
        name = evaluation_set.name
        summary = _find_evaluation(run, name, step - 1)
        metrics[f"eval/{name}/pass@1"] = summary.get("pass@1")
        metrics[f"eval/{name}/reward"] = summary.get("reward")
    return metrics


def _find_evaluation(run: RecordedRun, name: str, step: int) -> JsonObject:
    """Returns the summary of a set's evaluation after a step; empty if there is none."""
    for summary in run.evaluations:
        if summary.get("set") == name and (summary.get("step") or 0) == step:
            return summary
    return {}


# Rollout policy α against π_k


def log_ratios(rows: Iterable[Row]) -> list[Tensor]:
    """Returns log π_k - log α of the sampled tokens of each row, float64 [t].

    Returns an empty list if one of the log-probs is unknown.
    """
    log_ratio_of_rows = []
    for row in rows:
        if row["old_logprobs"] is None or None in sampled(row, "rollout_logprobs"):
            return []
        old_logp = torch.tensor(sampled(row, "old_logprobs"), dtype=torch.float32)
        rollout_logp = torch.tensor(sampled(row, "rollout_logprobs"), dtype=torch.float32)
        # The difference is rounded to float32 as in training.
        log_ratio_of_rows.append((old_logp - rollout_logp).double())
    return log_ratio_of_rows


def token_metrics(rows: Sequence[Row]) -> Metrics:
    """Compares π_k with α over the tokens of the objective; empty if a log-prob is unknown."""
    log_ratio_of_rows = log_ratios(row for row in rows if not row["excluded_reason"])
    if not log_ratio_of_rows:
        return {}
    log_ratio_T = torch.cat(log_ratio_of_rows)
    limited_T = formulas.limit(log_ratio_T)
    difference_T = log_ratio_T.abs()
    return {
        "rollout/kl": formulas.kl_terms(limited_T).mean().item(),
        "rollout/ratio_mean": limited_T.exp().mean().item(),
        "rollout/ess": formulas.effective_sample_size(limited_T) / len(limited_T),
        "rollout/logp_difference_mean": difference_T.mean().item(),
        "rollout/logp_difference_max": difference_T.max().item(),
    }


def sequence_metrics(groups: Sequence[Sequence[Row]], reward_range: Range) -> Metrics:
    """Compares π_k with α over whole completions whose log α is known.

    Returns nothing if log π_k of one of them is unknown.
    """
    rows = []
    for members in groups:
        rows += [row for row in members if None not in sampled(row, "rollout_logprobs")]
    log_ratio_of_rows = log_ratios(rows)
    if not log_ratio_of_rows:
        return {}
    log_ratio_C = torch.stack([log_ratio_T.sum() for log_ratio_T in log_ratio_of_rows])
    # The estimate of a completion is a sum over its tokens, in which ratios have no limit.
    kl_of_rows = [formulas.kl_terms(log_ratio_T).sum().item() for log_ratio_T in log_ratio_of_rows]
    ess = formulas.effective_sample_size(log_ratio_C)

    low, high = reward_range
    is_in_range = all(low <= row["reward"] <= high for row in rows)
    improvement = None
    if ess >= MIN_ESS_OF_IMPROVEMENT and is_in_range:
        improvement = estimate_improvement(groups, reward_range)
    # The improvement cannot be larger than the range of rewards: such an estimate is noise.
    if improvement is not None and not abs(improvement) <= 1:
        improvement = None
    return {
        "improvement": improvement,
        "rollout/seq_kl": mean(kl_of_rows),
        "rollout/seq_tv": formulas.total_variation(log_ratio_C),
        "rollout/seq_ess": ess,
    }


def estimate_improvement(groups: Sequence[Sequence[Row]], reward_range: Range) -> float | None:
    """Returns the mean over the groups of (rho - 1) (r - mean of the others), rho = π_k/α.

    r is in units of the range of rewards. Groups of one completion, or with an unknown log-prob,
    are left out. None without a group.
    """
    low, high = reward_range
    gains = []
    for members in groups:
        log_ratio_of_rows = log_ratios(members)
        if len(members) < 2 or not log_ratio_of_rows:
            continue
        log_ratio_G = torch.stack([log_ratio_T.sum() for log_ratio_T in log_ratio_of_rows])
        rewards_G = torch.tensor([row["reward"] for row in members], dtype=torch.float64)
        advantages_G = formulas.leave_one_out_of((rewards_G - low) / (high - low))
        gains.append((log_ratio_G.expm1() * advantages_G).mean().item())
    return mean(gains)
