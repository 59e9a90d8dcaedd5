"""pass@k of a policy on the held-out prompts of a task.

Completions are sampled at the sampling temperature, `samples` for each prompt. A completion is right when it has the
greatest reward of `task.reward_range`; pass@1 is the share of right ones among the scored, pass@k the unbiased
estimator. Intervals are for the mean over all the prompts that the held-out ones are drawn from, not for these prompts
alone. The random numbers have the same addresses every time, so before and after differ in the policy only, and
`change` compares them prompt by prompt.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Mapping, Sequence
from contextlib import ExitStack, closing
from dataclasses import dataclass
from itertools import count
from pathlib import Path
from typing import Any

import torch

from lagrpo.backends.process import restored
from lagrpo.core.estimators import bootstrap_interval, clustered_interval, paired_interval, pass_at_k
from lagrpo.data.prompts import PromptSource
from lagrpo.errors import refusing
from lagrpo.policy.chat import Templates
from lagrpo.runs.directory import plain_name
from lagrpo.runs.files import to_json, write_atomically, write_table
from lagrpo.sampling.base import Request, Sampler
from lagrpo.sampling.local import LocalSampler
from lagrpo.settings.schema import EvalSettings
from lagrpo.settings.toml import flatten
from lagrpo.tasks import Task, load_task
from lagrpo.terminal.text import count_of, formatted_interval
from lagrpo.training.build import build_policy, build_verifier
from lagrpo.training.checks import check_evaluation
from lagrpo.training.environments import Talk, replied
from lagrpo.training.memory import explained
from lagrpo.types import Group, Range, is_right
from lagrpo.verify import Verifier

ENOUGH_PROMPTS = 50


@dataclass(frozen=True, slots=True)
class Evaluation:
    """What an evaluation found: a summary for people and plots, and one row per prompt."""

    summary: dict[str, Any]
    records: list[dict[str, Any]]


def evaluate(
    sampler: Sampler, verifier: Verifier, requests: Sequence[Request], samples: int, seed: int, reward_range: Range
) -> Evaluation:
    """Generate, judge and count. Raises ValueError for no prompts."""
    if not requests:
        raise ValueError("there are no test prompts to evaluate on")
    generated = (group for _, group in sampler.sample(requests, samples))
    groups = sorted(verifier.judge(generated), key=lambda group: group.prompt.key)
    records = [_record(group, reward_range) for group in groups]
    return Evaluation(_summary(records, samples, seed, reward_range), records)


def _record(group: Group, reward_range: Range) -> dict[str, Any]:
    rewards, completions = group.rewards, group.completions
    right = sum(is_right(reward, reward_range) for reward in rewards)
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


def evaluate_model(settings: EvalSettings) -> Evaluation:
    """Evaluate the model of the settings on the test prompts of their task; print the summary, and write summary and
    per-prompt records to the directory that `place` names.

    Raises:
        SettingsError: settings that cannot be run, before anything heavy is loaded where that can be seen.
        VerifierError: too many completions could not be scored.
        NoMemoryError: the memory does not suffice.
    """
    check_evaluation(settings)
    with refusing():
        task = load_task(settings.task, settings.seed)
    output = place(settings, task.name)
    with restored(), explained(lambda: "evaluation", {"evaluation": "lower max_num_seqs or max_tokens"}):
        evaluation = _evaluated(settings, task)
    of = {"model": settings.model.path, "task": task.name}
    summary = {**of, **evaluation.summary, "settings": settings.model_dump()}
    write_table(output / "records.parquet", evaluation.records)
    write_atomically(output / "summary.json", to_json(summary) + "\n")
    _print(summary, output)
    return evaluation


def _evaluated(settings: EvalSettings, task: Task) -> Evaluation:
    print(f"loading {settings.model.path} …", file=sys.stderr, flush=True)
    with ExitStack() as last:
        templates = last.enter_context(closing(Templates()))
        longest = settings.max_prompt_tokens + settings.max_tokens + replied(settings, task)
        policy = build_policy(settings.model, settings.temperature, longest, templates)
        sampler = LocalSampler(policy, settings.seed, settings.max_tokens, settings.max_num_seqs, purpose="evaluate")
        given: dict[str, Any] = {}
        if (talk := Talk.find(settings.environment, task, policy.chat)) is not None:
            sampler.episodes = talk.start(settings, policy.chat, settings.max_tokens, last)
            given = {"tools": talk.tools, "opening": sampler.episodes.environments.open}
        prompts = PromptSource(task, policy, settings.seed, 1, settings.max_prompt_tokens, **given)
        requests = prompts.held_out(settings.prompts or task.size("test"))
        computed = f"computing with {policy.model.computation}; decoding {policy.model.decoding}"
        print(computed, file=sys.stderr, flush=True)
        verifier = last.enter_context(build_verifier(settings, task))
        return evaluate(sampler, verifier, requests, settings.samples, settings.seed, settings.task.reward_range)


def place(settings: EvalSettings, task: str) -> Path:
    """The directory for an evaluation: settings.output, else evaluations/MODEL-TASK, or that with the first number
    behind it (-2, -3 …) whose directory has no evaluation with other settings. Raises SettingsError where
    settings.output has one, or something else's summary.json."""
    if settings.output:
        with refusing("output"):
            if problem := _occupied(Path(settings.output), settings):
                raise ValueError(f"{problem}: name another directory")
        return Path(settings.output)
    name = f"evaluations/{label(settings.model.path)}-{plain_name(task)}"
    places = (Path(name if n == 1 else f"{name}-{n}") for n in count(1))
    return next(path for path in places if not _occupied(path, settings))


def _occupied(output: Path, settings: EvalSettings) -> str | None:
    """Why an evaluation with these settings must not be written there; None where it may."""
    if output.exists() and not output.is_dir():
        return f"{output} is a file"
    file = output / "summary.json"
    if not file.exists():
        return None
    try:
        earlier = flatten(json.loads(file.read_bytes())["settings"])
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError):
        return f"{file} is not the summary of an evaluation"
    ours = flatten(json.loads(to_json(settings.model_dump())))
    names = [n for n in ours | earlier if ours.get(n) != earlier.get(n) and n != "output"]
    differing = ", ".join(f"{n} = {earlier.get(n)}, not {ours.get(n)}" for n in names[:3])
    return f"{output} holds an evaluation with other settings ({differing})" if names else None


def label(model: str) -> str:
    """A name for a model: its directory's, with the run's where it is a run's.

    >>> label("Qwen/Qwen2.5-0.5B"), label("runs/addition/weights/final")
    ('Qwen2.5-0.5B', 'addition-final')
    """
    path = Path(model)
    return f"{path.parent.parent.name}-{path.name}" if path.parent.name == "weights" else path.name


def _print(summary: dict[str, Any], output: Path) -> None:
    print(f"{summary['model']} on {summary['task']}: {summary['prompts']} prompts x {summary['samples']} samples")
    names = [name for name in summary if f"{name}_low" in summary]
    for name in names if summary.get("reward_mean") != summary.get("pass_at_1") else names[1:]:
        print(f"  {interval(summary, name)}")
    if summary["without_reward"]:
        print(f"  {summary['without_reward']} completions could not be scored and are not counted")
    print("  intervals: for the mean over all the prompts that these were drawn from")
    if warning := few_prompts(summary["prompts"]):
        print(f"  {warning}")
    print(f"  per-prompt records: {output / 'records.parquet'}")


def interval(summary: Mapping[str, Any], name: str) -> str:
    """One metric of a summary with its interval, for people.

    >>> interval({"pass_at_1": 0.5, "pass_at_1_low": 0.25, "pass_at_1_high": 0.7}, "pass_at_1")
    'pass@1       50.0%   95 % interval 25.0% to 70.0%'
    """
    heading = name.replace("_at_", "@").replace("_", " ")
    return f"{heading:<11} {formatted_interval(summary, name, '.3f' if name == 'reward_mean' else '.1%')}"
