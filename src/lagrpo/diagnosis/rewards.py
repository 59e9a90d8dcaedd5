"""Detectors of rewards that carry no signal."""

from __future__ import annotations

import statistics
from collections import defaultdict
from collections.abc import Iterable, Sequence
from typing import Any

from lagrpo.diagnosis.answers import ends_with, read_answer
from lagrpo.diagnosis.finding import Finding, percent, places_of, show_completion
from lagrpo.diagnosis.record import (
    ALL_RIGHT,
    ALL_WRONG,
    RunRecord,
    groups_of,
    mean,
    scored_rows,
)
from lagrpo.runs.rollouts import REWARD
from lagrpo.terminal.text import count_of, count_reasons
from lagrpo.types import JsonView

VISITS = 3
"""Batches that must have had a prompt before it counts as never or always solved."""


def find_unscored(record: RunRecord, threshold: float) -> Finding | None:
    """Many completions have no reward."""
    rows = record.recent_rows
    unscored = [row for row in rows if row["reward"] is None]
    if len(unscored) <= threshold * len(rows):
        return None
    reasons = [row["reason"] or row["outcome"] for row in unscored]
    settings = {}
    timeouts = sum("time" in reason.lower() for reason in reasons)
    if timeouts > len(unscored) / 2:
        settings["task.reward_timeout"] = 2 * (record.settings.get("task.reward_timeout") or 5.0)
    share = len(unscored) / len(rows)
    return Finding(
        f"{percent(share)} of the completions have no reward and teach nothing: "
        f"{count_reasons(reasons)}.",
        cost=share,
        places=places_of(unscored),
        settings=settings,
    )


def find_too_hard(record: RunRecord, threshold: float) -> Finding | None:
    """Most groups are all wrong."""
    if record.has_teacher or record.has_collapsed:
        return None
    groups = [group for group in groups_of(record.recent_rows) if len(scored_rows(group)) > 1]
    wrong = [group for group in groups if record.kind(group) == ALL_WRONG]
    if not groups or len(wrong) < threshold * len(groups):
        return None
    rows = scored_rows(record.recent_rows)
    right = sum(record.is_correct(row) for row in rows)
    share = len(wrong) / len(groups)
    advice = ""
    verb = "was" if right == 1 else "were"
    known = f"{right:,} of {count_of(len(rows), 'completion')} {verb} right"
    settings: dict[str, Any] = {}
    if right:
        # Some groups have a signal: look for more of them.
        settings["rollout.dynamic_sampling_rounds"] = 2
    else:
        known = f"none of {count_of(len(rows), 'completion')} was right"
    best = max(rows, key=_nearness)
    if record.height(best["reward"]) > 0 and len({row["reward"] for row in rows}) == 1:
        known = f"all of {count_of(len(rows), 'completion')} have a reward of {best['reward']:g}"
        advice = "Check that the reward depends on the completion."
    sentence = f"{percent(share)} of the groups are all wrong, so they give no signal: {known}."
    return Finding(
        sentence,
        cost=share,
        places=places_of(group[0] for group in wrong),
        settings=settings,
        advice=advice,
        example=show_completion(best),
    )


def _nearness(row: JsonView) -> tuple[float, bool, bool]:
    """Orders completions by how near they are to a reward, the nearest last."""
    return row["reward"], ends_with(row["completion"], read_answer(row)), row["finished"]


def find_too_easy(record: RunRecord, threshold: float) -> Finding | None:
    """Most groups were all right from the start."""
    groups = [group for group in groups_of(record.first_rows) if len(scored_rows(group)) > 1]
    # Of the first batches only the first half counts: a quick run may have learned by then.
    groups = groups[: (len(groups) + 1) // 2]
    right = [group for group in groups if record.kind(group) == ALL_RIGHT]
    if record.has_teacher or not groups or len(right) < threshold * len(groups):
        return None
    share = len(right) / len(groups)
    return Finding(
        f"{percent(share)} of the groups were all right from the start, so they give no signal.",
        cost=share,
        places=places_of(group[0] for group in right),
        settings={"rollout.dynamic_sampling_rounds": 2},
    )


def find_never_solved(record: RunRecord, threshold: float) -> Finding | None:
    """Many prompts were never solved, although others are."""
    return _find_constant_prompts(record, threshold, ALL_WRONG, "never solved")


def find_always_solved(record: RunRecord, threshold: float) -> Finding | None:
    """Many prompts were solved by every completion of every batch."""
    return _find_constant_prompts(record, threshold, ALL_RIGHT, "solved every time")


def _find_constant_prompts(
    record: RunRecord, threshold: float, kind: str, verdict: str
) -> Finding | None:
    """Many prompts have had no other kind of group."""
    if record.has_teacher:
        return None
    groups_by_prompt: dict[int, list[list[JsonView]]] = defaultdict(list)
    for group in groups_of(record.rollouts):
        groups_by_prompt[group[0]["prompt_id"]].append(group)
    visited = {key: groups for key, groups in groups_by_prompt.items() if len(groups) >= VISITS}
    constant = [
        groups for groups in visited.values() if all(record.kind(group) == kind for group in groups)
    ]
    # If all prompts are alike, the task as a whole is too hard or too easy.
    if len(constant) in (0, len(visited)) or len(constant) < threshold * len(visited):
        return None
    completions = sum(len(group) for groups in constant for group in groups)
    all_completions = sum(len(group) for groups in visited.values() for group in groups)
    return Finding(
        f"{len(constant)} of {count_of(len(visited), 'prompt')} that came {VISITS} times or more "
        f"were {verdict}: they took {percent(completions / all_completions)} of the completions.",
        cost=completions / all_completions,
        places=places_of(groups[-1][0] for groups in constant),
    )


def find_constant_reward(record: RunRecord, threshold: float) -> Finding | None:
    """One of several rewards never varies, and not because it is always met."""
    rows = scored_rows(record.recent_rows)
    rewards = _weighted_rewards(record)
    # A single reward that never varies leaves groups without a signal.
    for reward in rewards if len(rewards) > 1 else ():
        values = [value for value in _values(rows, reward["name"]) if value is not None]
        low, high = reward.get("range") or (0.0, 1.0)
        if len(values) < 2 or statistics.pstdev(values) > threshold * (high - low):
            continue
        if values[0] >= high - 0.1 * (high - low):
            continue
        best = max(rows, key=_nearness)
        return Finding(
            f"The reward {reward['name']} is {values[0]:g} for all of "
            f"{count_of(len(values), 'completion')}, so it teaches nothing.",
            cost=_share_of_weight(record, reward),
            places=places_of([best]),
            example=show_completion(best),
        )
    return None


def find_dominant_reward(record: RunRecord, threshold: float) -> Finding | None:
    """One of several rewards decides alone which completions of a group are better."""
    rewards = _weighted_rewards(record)
    if len(rewards) < 2:
        return None
    rows = scored_rows(record.recent_rows)
    variances = {}
    for reward in rewards:
        of_groups = []
        for group in groups_of(rows):
            values = [value for value in _values(group, reward["name"]) if value is not None]
            if len(values) > 1:
                of_groups.append(statistics.pvariance(values))
        variances[reward["name"]] = (mean(of_groups) or 0.0) * reward.get("weight", 1.0) ** 2
    total = sum(variances.values())
    name = max(variances, key=lambda name: variances[name])
    if not total or variances[name] < threshold * total:
        return None
    mute = [reward for reward in rewards if reward["name"] != name and not _is_met(rows, reward)]
    # A reward that never varies has its own finding.
    mute = [reward for reward in mute if variances[reward["name"]] > 0]
    if not mute:
        return None
    names = ", ".join(reward["name"] for reward in mute)
    return Finding(
        f"The reward {name} makes {percent(variances[name] / total)} of the variance within "
        f"groups: {names} hardly changes which completion is better.",
        cost=sum(_share_of_weight(record, reward) for reward in mute) / 2,
    )


def _weighted_rewards(record: RunRecord) -> list[dict[str, Any]]:
    """Returns the rewards of the settings that count; none if the task has a single one."""
    if record.ignores_reward:
        return []
    rewards = record.settings.get("task.rewards") or []
    names = {name.removeprefix(REWARD) for row in record.recent_rows[:1] for name in row}
    return [reward for reward in rewards if reward["name"] in names and reward.get("weight", 1.0)]


def _values(rows: Iterable[JsonView], name: str) -> list[float | None]:
    return [row.get(f"{REWARD}{name}") for row in rows]


def _is_met(rows: Sequence[JsonView], reward: dict[str, Any]) -> bool:
    """True if a reward is near its largest value: then little variance costs nothing."""
    low, high = reward.get("range") or (0.0, 1.0)
    value = mean([value for value in _values(rows, reward["name"]) if value is not None])
    return value is not None and value >= high - 0.1 * (high - low)


def _share_of_weight(record: RunRecord, reward: dict[str, Any]) -> float:
    weights = [abs(other.get("weight", 1.0)) for other in _weighted_rewards(record)]
    return abs(reward.get("weight", 1.0)) / sum(weights)
