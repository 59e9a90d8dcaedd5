"""pass@k of a policy on the held-out prompts of a task.

Completions are sampled at the sampling temperature, `samples` for each prompt. A completion is right when it has the
greatest reward of `task.reward_range`; pass@1 is the share of right ones among the scored, pass@k the unbiased
estimator. Intervals are for the mean over all the prompts that the held-out ones are drawn from, not for these prompts
alone. The random numbers have the same addresses every time, so before and after differ in the policy only, and
`change` compares them prompt by prompt.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import torch

from lagrpo.core.estimators import bootstrap_interval, clustered_interval, paired_interval, pass_at_k
from lagrpo.rewards.pool import RewardPool
from lagrpo.rollout.base import Request
from lagrpo.runs.rollouts import REWARD
from lagrpo.terminal.text import count_of, formatted_interval
from lagrpo.types import Group, Outcome, Range, is_right

ENOUGH_PROMPTS = 50


@dataclass(frozen=True, slots=True)
class Evaluation:
    """What an evaluation found: a summary for people and plots, and one row per prompt."""

    summary: dict[str, Any]
    records: list[dict[str, Any]]


class Generates(Protocol):
    """Who generates the completions of an evaluation."""

    def sample(self, requests: Sequence[Request], G: int) -> Iterator[tuple[Request, Group]]:
        """One group for each request."""
        ...


def evaluate(
    sampler: Generates,
    verifier: RewardPool,
    requests: Sequence[Request],
    samples: int,
    seed: int,
    reward_range: Range,
    rewards: Sequence[str] = (),
) -> Evaluation:
    """Generate, judge and count; `rewards` are the names of several rewards. Raises ValueError for no prompts."""
    if not requests:
        raise ValueError("there are no test prompts to evaluate on")
    generated = (group for _, group in sampler.sample(requests, samples))
    groups = sorted(verifier.score(generated), key=lambda group: group.prompt.key)
    records = [_record(group, reward_range) | _parts(group, rewards) for group in groups]
    found = {name: _mean_of_parts(records, f"{REWARD}{name}") for name in rewards}
    parts = {f"{REWARD}{name}_mean": mean for name, mean in found.items() if mean is not None}
    return Evaluation(_summary(records, samples, seed, reward_range) | parts, records)


def _record(group: Group, reward_range: Range) -> dict[str, Any]:
    rewards, completions = group.rewards, group.completions
    outcomes = [c.outcome for c in group.scored if c.outcome is not None]
    right = sum(is_right(o.reward, reward_range, o.right) for o in outcomes if o.reward is not None)
    return {
        "prompt_key": group.prompt.key,
        "prompt": group.prompt.messages[-1]["content"],
        "gold": str(group.prompt.gold),
        "samples": len(completions),
        "scored": len(rewards),
        "right": right,
        "reward_mean": sum(rewards) / len(rewards) if rewards else None,
        "pass_at_1": right / len(rewards) if rewards else None,
        "tokens_mean": sum(c.length for c in completions) / len(completions),
        "finished_share": sum(c.finished for c in completions) / len(completions),
        "turns_mean": sum(c.policy_turns for c in completions) / len(completions),
        "completions": [c.text for c in completions],
        "rewards": [c.reward for c in completions],
    }


def _parts(group: Group, rewards: Sequence[str]) -> dict[str, Any]:
    """What a task with several rewards has further of a prompt: what each reward found, what is right, and of how many
    tokens each completion is."""
    if not rewards:
        return {}
    outcomes = [c.outcome or Outcome.unscored("") for c in group.completions]
    found: dict[str, Any] = {f"{REWARD}{name}": [o.parts.get(name) for o in outcomes] for name in rewards}
    return found | {"is_right": [o.right for o in outcomes], "tokens": [c.length for c in group.completions]}


def _mean_of_parts(records: Sequence[Mapping[str, Any]], column: str) -> float | None:
    """The mean over prompts of what one of several rewards found, where it found anything."""
    found = [[value for value in record[column] if value is not None] for record in records]
    means = [sum(values) / len(values) for values in found if values]
    return sum(means) / len(means) if means else None


def _summary(records: list[dict[str, Any]], samples: int, seed: int, reward_range: Range) -> dict[str, Any]:
    without_reward = sum(r["samples"] - r["scored"] for r in records)
    summary: dict[str, Any] = {"prompts": len(records), "samples": samples, "without_reward": without_reward}
    for name, (values, tries) in _measures(records, samples).items():
        if values:
            ends = reward_range if name == "reward_mean" else (0.0, 1.0)
            low, high = _interval(list(values.values()), tries, seed, ends)
            summary |= {name: sum(values.values()) / len(values), f"{name}_low": low, f"{name}_high": high}
    return summary


def _measures(records: list[dict[str, Any]], samples: int) -> dict[str, tuple[dict[int, float], float]]:
    """The metrics of an evaluation by prompt, without prompts of too few scored completions; and how many independent
    tries of each the samples of a prompt hold: pass@k takes k for one."""
    measures = {"reward_mean": ({r["prompt_key"]: r["reward_mean"] for r in records if r["scored"]}, float(samples))}
    for k in sorted({samples, *(1 << n for n in range(samples.bit_length()))}):
        by_prompt = {r["prompt_key"]: pass_at_k(r["scored"], r["right"], k) for r in records if r["scored"] >= k}
        measures[f"pass_at_{k}"] = by_prompt, samples / k
    return measures


def _interval(values: list[float], tries: float, seed: int, ends: Range) -> tuple[float, float]:
    """The 95 % interval of a metric that lies between these ends: `estimators.clustered_interval` in units of their
    distance, and a bootstrap over prompts for values outside."""
    values_N, (low, high) = torch.tensor(values, dtype=torch.float64), ends
    if not all(low <= value <= high for value in values):
        return bootstrap_interval(values_N, seed=seed)
    below, above = clustered_interval((values_N - low) / (high - low), tries)
    return low + below * (high - low), low + above * (high - low)


def change(before: Evaluation, after: Evaluation) -> dict[str, float]:
    """How pass@k changed between two evaluations, over the prompts that both have scores of: for each k the mean
    difference and its 95 % interval (`estimators.paired_interval`), for the summary of the second one."""
    found: dict[str, float] = {}
    old, new = (_measures(e.records, after.summary["samples"]) for e in (before, after))
    for name, (values, tries) in new.items():
        both = sorted(old[name][0].keys() & values.keys())
        if both and name != "reward_mean":
            b_N, a_N = (torch.tensor([m[key] for key in both], dtype=torch.float64) for m in (old[name][0], values))
            low, high = paired_interval(b_N, a_N, tries)
            difference = float(a_N.mean() - b_N.mean())
            found |= {f"{name}_change": difference, f"{name}_change_low": low, f"{name}_change_high": high}
    return found


def few_prompts(prompts: int) -> str | None:
    """The warning for an evaluation on so few prompts that its intervals are inexact; None for more prompts."""
    if prompts >= ENOUGH_PROMPTS:
        return None
    return (
        f"WARNING: only {count_of(prompts, 'test prompt')}: the 95 % intervals of pass@k are wide, and where "
        "nearly all or nearly no completions are right, they contain the true value 85 to 97 % of the time; use at "
        f"least {ENOUGH_PROMPTS}"
    )


def interval(summary: Mapping[str, Any], name: str) -> str:
    """One metric of a summary with its interval, for people.

    >>> interval({"pass_at_1": 0.5, "pass_at_1_low": 0.25, "pass_at_1_high": 0.7}, "pass_at_1")
    'pass@1       50.0%   95 % interval 25.0% to 70.0%'
    """
    heading = name.replace("_at_", "@").replace("_", " ")
    return f"{heading:<11} {formatted_interval(summary, name, '.3f' if name == 'reward_mean' else '.1%')}"
