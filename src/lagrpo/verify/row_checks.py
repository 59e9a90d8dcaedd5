"""Checks of the rows against the settings and each other.

They are about groups, weight syncs, versions and advantages.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from lagrpo.core.objective import Recipe
from lagrpo.rng import uniforms
from lagrpo.settings.sections import ScheduleSettings
from lagrpo.types import ExcludedReason, OutcomeKind, SyncReason
from lagrpo.verify.formulas import ScoredGroup, compute_advantages, group_deviation
from lagrpo.verify.record import RecordedRun, Row, groups_of, sampled

FLOAT64_TOLERANCE = 1e-9
"""Relative: sums of float64 in another order."""

FLOAT32_TOLERANCE = 2.0**-22
"""Relative: an advantage is rounded to float32."""

GROUP_COUNTS = "groups, and generated ones"


def check_rows(run: RecordedRun) -> None:
    """Checks that every step has its groups, with all their completions."""
    schedule = run.settings.schedule
    last_step = max([*run.metrics, *run.steps])
    for step in range(1, last_step + 1):
        groups = groups_of(run.steps.get(step, []))
        fresh_groups = [members for members in groups if members[0]["source"] == "sampler"]
        expected = {GROUP_COUNTS: (schedule.prompts_per_batch, run.fresh_prompts)}
        counts: tuple[int, int] | str = "no file"
        if step in run.steps:
            counts = (len(groups), len(fresh_groups))
        file = f"rollouts/step-{step:06d}.parquet"
        run.report.compare("rows", file, expected, {GROUP_COUNTS: counts})
        for members in fresh_groups:
            _check_members(run, step, members)


def _check_members(run: RecordedRun, step: int, members: Sequence[Row]) -> None:
    first = members[0]
    all_indices = list(range(run.settings.rollout.num_generations))
    expected = {"step": step, "completions": all_indices}
    recorded = {
        "step": first["step"],
        "completions": [row["sample_index"] for row in members],
    }
    run.report.compare("rows", first["where"], expected, recorded)


# Weight syncs and versions


def check_syncs(run: RecordedRun) -> None:
    """Checks that weights were synced when the schedule says so, in metrics and in events.

    The event has the reason, and the version of the weights.
    """
    events = {event["step"]: event for event in run.events if event["event"] == "weight_sync"}
    batches_since_sync = 0
    last_kl = 0.0  # since the last sync, nats per completion
    for step, line in sorted(run.metrics.items()):
        reason = _sync_reason(run.settings.schedule, step, batches_since_sync, last_kl)
        is_due = reason != SyncReason.NOT_DUE

        performed = {"weight_sync/performed": int(is_due)}
        where = f"metrics.jsonl, line {line.number}"
        run.report.compare("weight syncs", where, performed, line.values)

        version = line.values["policy_version"] if is_due else None
        event = events.get(step, {})
        expected = {"weight_sync": (reason.value, version)}
        recorded = {"weight_sync": (event.get("reason", ""), event.get("policy_version"))}
        run.report.compare("weight syncs", f"events.jsonl, step {step}", expected, recorded)

        if is_due:
            batches_since_sync = 0
            last_kl = 0.0
        batches_since_sync += 1
        kl = line.values.get("rollout/seq_kl")
        if kl is not None:
            last_kl = kl


def _sync_reason(
    schedule: ScheduleSettings, step: int, batches_since_sync: int, last_kl: float
) -> SyncReason:
    """Returns the reason for a weight sync before a step."""
    if step == 1:
        return SyncReason.START
    if schedule.kind == "budget":
        if last_kl > (schedule.sync_at_kl or 0.0):
            return SyncReason.BUDGET
        is_late = batches_since_sync >= schedule.v
        return SyncReason.CAP if is_late else SyncReason.NOT_DUE
    step_of_stage = (step - 1) % schedule.stage_length + 1
    is_due = schedule.runs_ahead or step_of_stage % schedule.v == 0
    return SyncReason.SCHEDULE if is_due else SyncReason.NOT_DUE


def check_versions(run: RecordedRun) -> None:
    """Checks the version of each token against the schedule, and of π_k against the step's metrics.

    With schedule.max_staleness a completion may have tokens of later versions, too.
    """
    for row in run.rows:
        if row["step"] not in run.metrics:
            continue
        versions = sampled(row, "policy_versions")
        # Tokens of offline data have version -1.
        is_known = bool(versions) and min(versions) >= 0
        line = run.metrics[row["step"]]
        expected = {
            "policy_version": line.values["policy_version"],
            "staleness": row["policy_version"] - min(versions) if is_known else None,
        }
        run.report.compare("versions", row["where"], expected, row)
        if is_known and row["source"] == "sampler":
            _check_version_of_alpha(run, row, versions)


def _check_version_of_alpha(run: RecordedRun, row: Row, versions: Sequence[int]) -> None:
    """Checks that tokens have the version of the weight sync that the schedule names."""
    sync_step = _sync_step_of(run, row)
    if sync_step not in run.metrics:
        return
    alpha = run.metrics[sync_step].values["policy_version"]
    oldest = alpha
    newest = alpha
    if run.settings.schedule.continues_completions:
        newest = row["policy_version"]
    recorded = alpha
    for version in versions:
        if not oldest <= version <= newest:
            recorded = version
            break
        # Weights are synced while completions go on, and never back.
        oldest = version
    expected = {"policy_versions": alpha}
    run.report.compare("versions", row["where"], expected, {"policy_versions": recorded})


def _sync_step_of(run: RecordedRun, row: Row) -> int:
    """Returns the step whose weight sync gave α to a completion; 0 if no line has one."""
    step = row["step"]
    schedule = run.settings.schedule
    # Dynamic sampling adds groups with the weights of the last sync.
    is_replacement = row["epoch"] < 0
    if schedule.runs_ahead and not is_replacement:
        earliest_steps = [1, step - schedule.v]
        # A finished run that is resumed for more batches has sampled none of them before.
        for event in run.events:
            if event["event"] == "resumed" and event["step"] + event["ahead"] < step:
                earliest_steps.append(event["step"] + 1)
        return max(earliest_steps)
    sync_steps = [
        sync_step
        for sync_step, line in run.metrics.items()
        if line.values["weight_sync/performed"] and sync_step <= step
    ]
    return max(sync_steps, default=0)


# Advantages


def check_groups(run: RecordedRun) -> None:
    """Checks which completions the objective leaves out, deviations of groups, and advantages."""
    if run.recipe is None:
        run.report.skip("advantages: the loss was given in Python, and no module has it")
        return
    for rows in run.steps.values():
        groups = groups_of(rows)
        for members in groups:
            _check_left_out(run, run.recipe, members)
        _check_advantages(run, run.recipe, groups)


def _check_left_out(run: RecordedRun, recipe: Recipe, members: Sequence[Row]) -> None:
    """Checks the reasons why completions of a group are not in the objective."""
    rewards = {row["reward"] for row in members if row["outcome"] == OutcomeKind.SCORED}
    is_masked = len(rewards) == 1 and recipe.mask_zero_variance
    for row in members:
        reason = row["outcome"]
        if reason == OutcomeKind.SCORED:
            excluded = ExcludedReason.ZERO_VARIANCE if is_masked else ExcludedReason.NOT_EXCLUDED
            reason = excluded.value
        run.report.compare("advantages", row["where"], {"excluded_reason": reason}, row)


def _check_advantages(run: RecordedRun, recipe: Recipe, groups: Sequence[Sequence[Row]]) -> None:
    """Checks deviations and advantages of the scored completions of a batch."""
    scored_rows_of_groups: list[list[Row]] = []
    scored_groups: list[ScoredGroup] = []
    for members in groups:
        scored_rows = [row for row in members if row["outcome"] == OutcomeKind.SCORED]
        if scored_rows:
            scored_rows_of_groups.append(scored_rows)
            scored_groups.append(_to_scored_group(run, scored_rows))
    if not scored_groups:
        return
    max_length = run.settings.rollout.max_completion_length
    advantages = compute_advantages(recipe, scored_groups, max_length)
    largest_reward = max(float(group.rewards_G.abs().max()) for group in scored_groups)
    for rows, group, advantages_G in zip(
        scored_rows_of_groups, scored_groups, advantages, strict=True
    ):
        deviation = group_deviation(group.rewards_G, recipe.eps_std)
        for row, advantage in zip(rows, advantages_G.tolist(), strict=True):
            _compare(run, row, "group_std", deviation, FLOAT64_TOLERANCE * (1 + deviation))
            tolerance = FLOAT32_TOLERANCE * (1 + abs(advantage) + largest_reward)
            _compare(run, row, "advantage", advantage, tolerance)


def _to_scored_group(run: RecordedRun, rows: Sequence[Row]) -> ScoredGroup:
    key = (run.settings.run.seed, "advantage", *rows[0]["group"])
    return ScoredGroup(
        rewards_G=torch.tensor([row["reward"] for row in rows], dtype=torch.float64),
        lengths=[sum(row["loss_mask"]) for row in rows],
        uniform_G=torch.from_numpy(uniforms(len(rows), *key)),
    )


def _compare(run: RecordedRun, row: Row, column: str, expected: object, tolerance: float) -> None:
    run.report.compare("advantages", row["where"], {column: expected}, row, tolerance)
