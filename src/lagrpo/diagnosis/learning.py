"""Detectors of what becomes of reward, entropy and evaluations over a run."""

from __future__ import annotations

import math
import re
import statistics

from lagrpo.diagnosis.finding import Finding, lower_rate, percent, places_of, raise_rate
from lagrpo.diagnosis.record import FIRST_BATCHES, RunRecord, differ, mean
from lagrpo.types import JsonView


def find_falling_entropy(record: RunRecord, threshold: float) -> Finding | None:
    """Entropy falls to its floor while the reward does not rise: variety is lost for nothing."""
    entropies = record.values("entropy")
    third = len(entropies) // 3
    if third < 3 or record.is_solved or record.rises():
        return None
    middle = mean(entropies[third : 2 * third]) or 0.0
    last = mean(entropies[-third:]) or 0.0
    # Half of it within a third of the run: batches differ by less.
    if last <= 0 or last > middle / 2:
        return None
    batches = third * math.log(last / threshold) / math.log(middle / last)
    when = f"it reaches {threshold:g} in about {batches:.0f} batches"
    if batches <= 0:
        when = f"it is at its floor of {threshold:g}"
    # Beyond as many batches as it has had, the pace says nothing.
    if batches > len(record.metrics):
        return None
    return Finding(
        f"The entropy fell from {middle:.2g} to {last:.2g} nats per token while the policy did not "
        f"improve; {when}.",
        cost=0.6 if batches <= 0 else 0.5,
        settings=lower_rate(record),
    )


def find_exploded_entropy(record: RunRecord, threshold: float) -> Finding | None:
    """The policy has become noise."""
    first = record.first("entropy")
    last = record.last("entropy")
    if first is None or last is None or len(record.metrics) < 2 * record.window:
        return None
    target = record.settings.get("loss.entropy_target") or 0.0
    if record.rises() or record.is_solved or last < 1.5 * target:
        return None
    # Below a nat, a policy still knows what it says.
    if last < threshold * first or last < 1:
        return None
    settings = lower_rate(record)
    coef = record.settings.get("loss.entropy_coef") or 0.0
    if coef:
        settings = {"loss.entropy_coef": coef / 10}
    return Finding(
        f"The entropy grew from {first:.2g} to {last:.2g} nats per token: the policy is becoming "
        "noise.",
        cost=1.0 if record.has_collapsed else 0.8,
        places=places_of(record.recent_rows[-1:]),
        settings=settings,
    )


def find_fallen_reward(record: RunRecord, threshold: float) -> Finding | None:
    """The reward was higher before."""
    rewards = record.values("reward")
    window = record.window
    if len(rewards) < 2 * window:
        return None
    last = rewards[-window:]
    starts = range(0, len(rewards) - 2 * window + 1)
    best_start = max(starts, key=lambda start: math.fsum(rewards[start : start + window]))
    best = rewards[best_start : best_start + window]
    low, high = record.reward_range
    fall = (math.fsum(best) - math.fsum(last)) / window
    if fall < threshold * (high - low) or not differ(best, last):
        return None
    best_mean = math.fsum(best) / window
    return Finding(
        f"The reward fell from {best_mean:.2f} around batch {best_start + window} to "
        f"{best_mean - fall:.2f} in the last {window} batches.",
        cost=min(1.0, fall / max(best_mean - low, fall)),
        places=places_of(record.recent_rows[-1:]),
        settings=lower_rate(record),
    )


def find_flat_reward(record: RunRecord, threshold: float) -> Finding | None:
    """The reward does not rise, although groups give a signal."""
    rewards = record.values("reward")
    third = len(rewards) // 3
    if third < record.window or record.is_solved or not record.has_signal:
        return None
    if record.ignores_reward:
        # What it learns is the distance to the teacher: find_flat_teacher.
        return None
    silent = mean(record.values("frac_reward_zero_std")) or 0.0
    # With less signal, its absence is the finding.
    if silent >= 0.7:
        return None
    first = mean(rewards[:third]) or 0.0
    last = mean(rewards[-third:]) or 0.0
    low, high = record.reward_range
    least = threshold * (high - low)
    is_flat = abs(last - first) < least
    if not is_flat or differ(rewards[:third], rewards[-third:]):
        return None
    # A quick run may have learned in the first third.
    if last - statistics.fmean(rewards[: record.window]) >= least:
        return None
    return Finding(
        f"The reward has not risen in {len(rewards)} batches: {first:.3f} in the first third, "
        f"{last:.3f} in the last, although {percent(1 - silent)} of the groups give a signal.",
        cost=0.45,
        settings=raise_rate(record),
    )


def find_flat_teacher(record: RunRecord, threshold: float) -> Finding | None:
    """The policy is its teacher from the start, or does not come nearer to it."""
    distances = record.values("kl")
    window = record.window
    if not record.ignores_reward or len(distances) < 2 * window or record.nears_teacher:
        return None
    first = statistics.fmean(distances[:window])
    last = statistics.fmean(distances[-window:])
    if max(first, last) < threshold:
        return Finding(
            f"The teacher says what the policy says: kl is {last:.1g} nats per token, so there is "
            "nothing to learn.",
            cost=1.0,
            advice="Check that loss.reference is another model than model.path, or that "
            "loss.reference_prompt shows what helps to answer.",
        )
    if last > first and differ(distances[:window], distances[-window:]):
        return Finding(
            f"The policy moves away from the teacher: kl went from {first:.2g} to {last:.2g} nats "
            "per token.",
            cost=0.9,
            settings=lower_rate(record),
        )
    return Finding(
        f"The policy does not come nearer to the teacher in {len(distances)} batches: kl was "
        f"{first:.2g} nats per token, and is {last:.2g}.",
        cost=0.45,
        settings=raise_rate(record),
    )


def find_flat_evaluation(record: RunRecord, threshold: float) -> Finding | None:
    """The training reward rises more than the evaluation reward."""
    rewards = record.values("reward")
    last = record.last("reward")
    ends = _ends_of_first_set(record)
    if last is None or ends is None or len(rewards) < record.window:
        return None
    before, after = ends
    first = math.fsum(rewards[:FIRST_BATCHES]) / FIRST_BATCHES
    rise = record.height(last) - record.height(first)
    gain = record.height(after["reward"]) - record.height(before["reward"])
    # What the last evaluation may be wrong by, by its interval.
    chance = record.height(after.get("reward_high", after["reward"])) - record.height(
        after["reward"]
    )
    if rise - gain - chance < threshold:
        return None
    causes = []
    staleness = record.last("staleness/mean") or 0.0
    if staleness:
        causes.append(
            f"the reward is of samples {staleness:.0f} updates old on average: see pass@1 instead"
        )
    prompts = {row["prompt_id"] for row in record.rollouts}
    visits = len({(row["prompt_id"], row["step"]) for row in record.rollouts}) / len(prompts or " ")
    if visits >= 3:
        causes.append(
            f"the {len(prompts)} training prompts came {visits:.0f} times each: take more prompts"
        )
    advice = ""
    if causes:
        advice = f"Likely: {'; '.join(causes)}."
    return Finding(
        f"The reward went from {first:.2f} to {last:.2f} in training, but only from "
        f"{before['reward']:.2f} to {after['reward']:.2f} in the evaluation.",
        cost=min(1.0, (rise - gain) / rise) if rise > 0 else 0.5,
        advice=advice,
    )


def find_past_best(record: RunRecord, threshold: float) -> Finding | None:
    """The last evaluation is worse than an earlier one."""
    for name in {summary.get("set") or "" for summary in record.evaluations}:
        summaries = _evaluations_of(record, name)
        if len(summaries) < 2:
            continue
        best = max(summaries, key=lambda summary: summary["pass@1"])
        last = summaries[-1]
        fall = best["pass@1"] - last["pass@1"]
        if fall < threshold or last.get("pass@1_high", last["pass@1"]) >= best["pass@1"]:
            continue
        label = f" of {name}" if name else ""
        settings: dict[str, object] = {}
        if not record.settings.get("eval.best_metric"):
            settings["eval.best_metric"] = f"{name}.pass@1" if name else "pass@1"
        settings |= lower_rate(record)
        return Finding(
            f"pass@1{label} was {percent(best['pass@1'])} after batch {best.get('step') or 0}, and "
            f"is {percent(last['pass@1'])} after batch {last.get('step') or 0}.",
            cost=min(1.0, fall / best["pass@1"]),
            settings=settings,
        )
    return None


def _evaluations_of(record: RunRecord, name: str) -> list[JsonView]:
    """Returns the evaluations of a set ("" for the only one) that have a pass@1, in order."""
    return [
        summary
        for summary in record.evaluations
        if (summary.get("set") or "") == name and summary.get("pass@1") is not None
    ]


def _ends_of_first_set(record: RunRecord) -> tuple[JsonView, JsonView] | None:
    """Returns the first and the last evaluation of the first set; None if it has only one.

    Other sets may have tasks whose rewards are not comparable with training rewards.
    """
    if not record.evaluations:
        return None
    name = record.evaluations[0].get("set") or ""
    summaries = [one for one in _evaluations_of(record, name) if one.get("reward") is not None]
    return (summaries[0], summaries[-1]) if len(summaries) > 1 else None


def find_known_test_prompts(record: RunRecord, threshold: float) -> Finding | None:
    """Evaluation prompts are training prompts, too."""
    trained = {_question(row["prompt_text"]) for row in record.rollouts}
    for summary in record.evaluations:
        questions = [_question(one["prompt"] or "") for one in summary.get("records", ())]
        known = [question for question in questions if question in trained]
        if not questions or len(known) < threshold * len(questions):
            continue
        label = f" of {summary['set']}" if summary.get("set") else ""
        return Finding(
            f"{len(known)} of {len(questions)} evaluation prompts{label} are training prompts, "
            "too: pass@1 does not say what the policy does with new ones.",
            cost=0.2 * len(known) / len(questions),
            places=places_of(
                row for row in record.rollouts if _question(row["prompt_text"]) == known[0]
            ),
        )
    return None


def _question(text: str) -> str:
    """Returns the last message of a prompt, by its text in the rollouts or in an evaluation."""
    messages = re.split(r"(?:^|\n)(?:system|user|assistant|developer): ", text)
    return messages[-1].strip()
