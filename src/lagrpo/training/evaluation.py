"""Evaluations: pass@k of a policy on held-out prompts, with intervals for the mean over all prompts like them.

A completion is correct if it reaches the maximum of the range of rewards. Random numbers have the same keys every time,
so "before" and "after" differ in the policy only. `evaluate` makes one evaluation, `Evaluations` those of a run,
`evaluate_model` the one of `lagrpo eval`.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, closing, contextmanager
from copy import copy
from dataclasses import dataclass, replace
from itertools import count
from pathlib import Path
from typing import Any

import torch

from lagrpo.core.estimators import (
    bootstrap_interval,
    clustered_interval,
    paired_interval,
    pass_at_k,
)
from lagrpo.cpu.memory import freed_memory_kept
from lagrpo.errors import SettingsError
from lagrpo.machine import choose_threads, fixed_threads
from lagrpo.model.embedded import is_adapter
from lagrpo.rewards.pool import RewardPool
from lagrpo.rewards.reward import Rewards
from lagrpo.rollout.base import Request, SamplingParams
from lagrpo.rollout.episodes import MAIN_TASK, max_reply_tokens
from lagrpo.rollout.local import LocalSampler
from lagrpo.rollout.schedule import LoopState
from lagrpo.rollout.vllm.engine import build_engine
from lagrpo.runs.directory import BEST, Run, plain_name
from lagrpo.runs.files import to_json, write_atomically, write_table
from lagrpo.runs.reading import load_evaluation_records, load_evaluations
from lagrpo.runs.rollouts import REWARD
from lagrpo.settings.schema import Settings
from lagrpo.settings.sections import EvalSetSettings
from lagrpo.terminal.text import count_of, formatted_interval, unscored_text
from lagrpo.training import build
from lagrpo.training.build import TaskSetup, TrainerComponents
from lagrpo.training.checkpoint import needs_alpha
from lagrpo.training.checks import check_evaluation
from lagrpo.training.ranks import Ranks
from lagrpo.types import Group, Outcome, Range, is_correct


@dataclass(frozen=True, slots=True)
class Evaluation:
    """The result of an evaluation: a summary for people and plots, and one row per prompt."""

    summary: dict[str, Any]
    records: list[dict[str, Any]]


@dataclass(frozen=True, slots=True)
class EvalSet:
    """Prompts that policies are evaluated on, and how."""

    requests: Sequence[Request]
    reward_pool: RewardPool
    params: SamplingParams
    samples: int  # completions per prompt
    seed: int = 0
    reward_range: Range = (0.0, 1.0)
    rewards: Sequence[str] = ()  # names, if there are several
    name: str = ""  # "" without sets
    every: int = 0  # batches between evaluations; 0: before and after training only


def evaluate(of: EvalSet, evaluator: Any, ranks: Ranks | None = None) -> Evaluation:
    """Sample completions of the policy that the evaluator samples from, score and count them. Each of several ranks
    does so for its share, unless servers sample for rank 0."""
    ranks = ranks or Ranks()
    own = ranks.share(of.requests) if isinstance(evaluator, LocalSampler) else of.requests
    with ranks.sync_interrupts():
        scored = list(
            of.reward_pool.score(group for _, group in evaluator.sample(own, of.samples, of.params))
        )
    groups = sorted(ranks.join(scored), key=lambda group: group.prompt.key)
    records = [_record(group, of.reward_range, of.rewards) for group in groups]
    unscored = sum(record["samples"] - record["scored"] for record in records)
    summary: dict[str, Any] = {"prompts": len(records), "samples": of.samples, "unscored": unscored}
    if unscored:
        reasons = (reason for record in records for reason in record["reasons"] if reason)
        summary["unscored_reason"] = next(reasons, "")
    for name, (values, tries) in _measures(records, of.samples).items():
        if values:
            ends = of.reward_range if name == "reward" else (0.0, 1.0)
            low, high = _interval(list(values.values()), tries, of.seed, ends)
            summary |= {
                name: sum(values.values()) / len(values),
                f"{name}_low": low,
                f"{name}_high": high,
            }
    for name in of.rewards:
        found = [
            [value for value in record[f"{REWARD}{name}"] if value is not None]
            for record in records
        ]
        if means := [sum(values) / len(values) for values in found if values]:
            summary[f"rewards/{name}/mean"] = sum(means) / len(means)
    return Evaluation(summary, records)


def _record(group: Group, reward_range: Range, names: Sequence[str]) -> dict[str, Any]:
    rewards, completions = group.rewards, group.completions
    outcomes = [c.outcome or Outcome.unscored("") for c in completions]
    correct = sum(
        is_correct(o.reward, reward_range, o.correct) for o in outcomes if o.reward is not None
    )
    record = {
        "prompt_id": group.prompt.key,
        "prompt": group.prompt.messages[-1]["content"],
        "answer": str(group.prompt.answer),
        "samples": len(completions),
        "scored": len(rewards),
        "correct": correct,
        "reward": sum(rewards) / len(rewards) if rewards else None,
        "pass@1": correct / len(rewards) if rewards else None,
        "mean_length": sum(c.length for c in completions) / len(completions),
        "clipped_ratio": sum(not c.finished for c in completions) / len(completions),
        "num_turns": sum(c.policy_turns for c in completions) / len(completions),
        "completions": [c.text for c in completions],
        "rewards": [c.reward for c in completions],
        "reasons": [o.reason if o.reward is None else "" for o in outcomes],
    }
    if names:
        record |= {f"{REWARD}{name}": [o.parts.get(name) for o in outcomes] for name in names}
        record |= {
            "is_correct": [o.correct for o in outcomes],
            "tokens": [c.length for c in completions],
        }
    return record


def _measures(
    records: list[dict[str, Any]], samples: int
) -> dict[str, tuple[dict[int, float], float]]:
    """Each metric by prompt, without prompts that have too few scored completions; and how many independent tries of it
    a prompt has: one try of pass@k takes k samples."""
    measures = {
        "reward": ({r["prompt_id"]: r["reward"] for r in records if r["scored"]}, float(samples))
    }
    for k in sorted({samples, *(1 << n for n in range(samples.bit_length()))}):
        by_prompt = {
            r["prompt_id"]: pass_at_k(r["scored"], r["correct"], k)
            for r in records
            if r["scored"] >= k
        }
        measures[f"pass@{k}"] = by_prompt, samples / k
    return measures


def _interval(values: list[float], tries: float, seed: int, ends: Range) -> tuple[float, float]:
    """The 95 % interval of a metric in [ends]: `clustered_interval` of the values scaled to [0, 1]; a bootstrap over
    prompts if a value lies outside."""
    values_N, (low, high) = torch.tensor(values, dtype=torch.float64), ends
    if not all(low <= value <= high for value in values):
        return bootstrap_interval(values_N, seed=seed)
    below, above = clustered_interval((values_N - low) / (high - low), tries)
    return low + below * (high - low), low + above * (high - low)


def compare(before: Evaluation, after: Evaluation) -> dict[str, float]:
    """How each pass@k changed, over the prompts that have scores in both: the mean difference and its 95 % interval."""
    found: dict[str, float] = {}
    old, new = (_measures(e.records, after.summary["samples"]) for e in (before, after))
    for name, (values, tries) in new.items():
        both = sorted(old[name][0].keys() & values.keys())
        if both and name != "reward":
            b_N, a_N = (
                torch.tensor([m[key] for key in both], dtype=torch.float64)
                for m in (old[name][0], values)
            )
            low, high = paired_interval(b_N, a_N, tries)
            difference = float(a_N.mean() - b_N.mean())
            found |= {
                f"{name}_change": difference,
                f"{name}_change_low": low,
                f"{name}_change_high": high,
            }
    return found


# Of a run


class Evaluations:
    """The evaluation sets of a run, or a single one without a name, and the evaluations that were `made`, by the names
    of their files: before, batch-000010, after, each followed by .SET. Raises SettingsError for a set whose prompts do
    not fit."""

    def __init__(self, components: TrainerComponents) -> None:
        self.components, self.made, e = (
            components,
            dict[str, Evaluation](),
            components.settings.eval,
        )
        sets = {each.name: each for each in e.sets} or {"": EvalSetSettings(name="only")}
        self.sets = [
            build_eval_set(
                components.settings, components.tasks.get(name, components.main), each, name
            )
            for name, each in sets.items()
            if e.takes_place
        ]

    def load(self, run: Run, batch: int) -> dict[str, Evaluation]:
        """What a run evaluated until a batch, as `made` has it. What it evaluated later is removed, and what it
        evaluated at its end if it is to have more batches. Raises ValueError for damaged files, by name."""
        made = {}
        for summary in load_evaluations(run):
            name, step = summary.pop("name"), summary["step"]
            if step > batch or (
                name.startswith("after") and step < self.components.settings.schedule.batches
            ):
                for ending in ("json", "parquet"):
                    (run.path / "evaluations" / f"{name}.{ending}").unlink(missing_ok=True)
            else:
                made[name] = Evaluation(summary, load_evaluation_records(run, name))
        return made

    def find_due(self, batch: int, moment: str = "") -> dict[str, EvalSet]:
        """The sets that are due after a batch or at a moment, by the names of their files."""
        along = 0 < batch < self.components.settings.schedule.batches
        due = [s for s in self.sets if moment or (along and s.every and batch % s.every == 0)]
        named = {_file_name(batch, each.name, moment): each for each in due}
        return {name: each for name, each in named.items() if name not in self.made}

    def make(self, name: str, each: EvalSet, batch: int) -> Evaluation:
        """Evaluate the policy that the evaluator samples from, and compare it with the initial policy."""
        found = evaluate(each, self.components.evaluator, self.components.ranks)
        place: dict[str, Any] = {
            "step": batch,
            "policy_version": self.components.trainer.policy.version,
        }
        place |= {"set": each.name, "reward_range": list(each.reward_range)} if each.name else {}
        before = self.made.get(_file_name(0, each.name, "before"))
        change = compare(before, found) if before is not None else {}
        self.made[name] = found = replace(found, summary=place | found.summary | change)
        return found

    def metrics(self, batch: int) -> dict[str, float | None]:
        """The metrics of each named set after `batch` batches, for the line of the next batch; None without them."""
        metrics: dict[str, float | None] = {}
        for each in (each for each in self.sets if each.name):
            made = self.made.get(_file_name(batch, each.name, "" if batch else "before"))
            for name in ("pass@1", "reward"):
                metrics[f"eval/{each.name}/{name}"] = made.summary.get(name) if made else None
        return metrics

    def summary(self, moment: str) -> dict[str, Any] | None:
        """The summary of the first set before or after training."""
        made = [self.made.get(_file_name(0, each.name, moment)) for each in self.sets]
        return next((found.summary for found in made if found is not None), None)

    def find_best(self, run: Run, batch: int, moment: str) -> dict[str, Any] | None:
        """What weights/best is to say if the policy is the best so far by `eval.best_metric`; else None."""
        best = self.components.settings.eval.best_metric
        of_set, _, metric = (best or "").rpartition(".")
        made = self.made.get(_file_name(batch, of_set, moment))
        if best is None or made is None or (value := made.summary.get(metric)) is None:
            return None
        file = run.path / "weights" / "best" / BEST
        so_far = json.loads(file.read_bytes()) if file.exists() else {}
        if so_far.get("best") == best and so_far["value"] >= value and so_far["step"] != batch:
            return None
        return {
            "best": best,
            "value": value,
            "step": batch,
            "policy_version": self.components.trainer.policy.version,
        }


def _file_name(batch: int, of_set: str, moment: str) -> str:
    name = moment or f"batch-{batch:06d}"
    return f"{name}.{of_set}" if of_set else name


def build_eval_set(
    settings: Settings, setup: TaskSetup, each: EvalSetSettings, name: str = ""
) -> EvalSet:
    """The prompts of a set, and how it samples. `name` keys its random numbers."""
    e, s, episodes = settings.eval, settings.rollout, setup.episodes
    max_tokens = each.max_completion_length or s.max_completion_length
    if episodes is not None:
        episodes = replace(episodes, sampled=max_tokens)
    return EvalSet(
        requests=setup.prompts.held_out(each.num_prompts or e.num_prompts),
        reward_pool=setup.reward_pool,
        params=SamplingParams(f"evaluate {name}".rstrip(), s.temperature, max_tokens, episodes),
        samples=each.num_samples or e.num_samples,
        seed=settings.run.seed,
        reward_range=(each.task or settings.task).reward_range,
        rewards=Rewards.from_reward(setup.task.reward).names,
        name=name,
        every=e.every if each.every is None else each.every,
    )


@contextmanager
def sampling_from_policy(components: TrainerComponents, state: LoopState) -> Iterator[None]:
    """Inside, the evaluator samples from π. vLLM servers have α: they get π, checked as after any weight sync, and then
    get α back if it is to sample more."""
    evaluator, policy, check = (
        components.evaluator,
        components.trainer.policy,
        components.check_weight_sync,
    )
    if isinstance(evaluator, LocalSampler):
        yield
        return
    components.prefetcher.finish()
    with evaluator.temporary_weights(
        policy.weights, policy.version, back=needs_alpha(components, state)
    ):
        copy(check)(policy, evaluator)  # the next weight sync is compared with the last one
        yield


# `lagrpo eval`


def evaluate_model(settings: Settings) -> Evaluation:
    """Evaluate a model on the test prompts of a task; print the summary, and write it with one record per prompt to
    run.output_dir. Raises SettingsError, and RewardError if too many completions could not be scored."""
    check_evaluation(settings)
    rollout = settings.rollout
    if rollout.engine == "vllm" and is_adapter(settings.model.path):
        raise SettingsError(
            "model.path is an adapter: set rollout.engine = 'local', or merge the adapter first"
        )
    task = build.load_tasks(settings)[MAIN_TASK]
    output = _choose_output(settings, task.name)
    with freed_memory_kept(), fixed_threads(choose_threads()), ExitStack() as stack:
        replied = max_reply_tokens(settings, task)
        servers = build.start_servers(
            settings, replied, stack
        )  # takes minutes: what is cheap to check came first
        print(f"loading {settings.model.path} …", file=sys.stderr, flush=True)
        policy = build.build_policy(settings.model, rollout.temperature, settings.longest + replied)
        setup = build.set_up_tasks(settings, {MAIN_TASK: task}, policy, stack)[MAIN_TASK]
        evaluator: Any = LocalSampler(
            policy, settings.run.seed, rollout.max_completion_length, rollout.max_num_seqs
        )
        if servers:
            evaluator = stack.enter_context(closing(build_engine(settings, policy, servers)))
            evaluator.sync_weights(policy.weights, policy.version)
            build.build_weight_sync_check(policy, setup.prompts, evaluator)(policy, evaluator)
        sampled = ", ".join(map(str, servers)) or "this process"
        print(
            f"computation: {policy.model.computation}; sampling: {sampled}",
            file=sys.stderr,
            flush=True,
        )
        evaluation = evaluate(
            build_eval_set(settings, setup, EvalSetSettings(name="only")), evaluator
        )
    summary = {
        "model": settings.model.path,
        "task": task.name,
        **evaluation.summary,
        "settings": settings.model_dump(),
    }
    write_table(output / "records.parquet", evaluation.records)
    write_atomically(output / "summary.json", to_json(summary) + "\n")
    _print_summary(summary, output)
    return evaluation


def _choose_output(settings: Settings, task: str) -> Path:
    """run.name in run.output_dir, by default MODEL-TASK; with a number if that has an evaluation."""
    path = Path(settings.model.path)
    model = f"{path.parent.parent.name}-{path.name}" if path.parent.name == "weights" else path.name
    root, name = Path(settings.run.output_dir), settings.run.name or f"{model}-{plain_name(task)}"
    places = (root / (name if n == 1 else f"{name}-{n}") for n in count(1))
    return next(place for place in places if not (place / "summary.json").exists())


def _print_summary(summary: dict[str, Any], output: Path) -> None:
    prompts, samples = (
        count_of(summary["prompts"], "prompt"),
        count_of(summary["samples"], "sample"),
    )
    print(f"{summary['model']} on {summary['task']}: {prompts} x {samples}")
    for name in summary:
        if f"{name}_low" in summary:
            form = ".3f" if name == "reward" else ".1%"
            unscored = f"   {unscored_text(summary)}" if name == "pass@1" else ""
            print(f"  {name:<11} {formatted_interval(summary, name, form)}{unscored}".rstrip())
        elif name.startswith("rewards/"):
            print(f"  {name} {summary[name]:.3f}")
    print("  intervals: 95 %, for the mean over all prompts of this kind")
    if summary["unscored"]:
        print(f"  not scored, the first: {summary['unscored_reason']}")
    print(f"  per-prompt records: {output / 'records.parquet'}")
